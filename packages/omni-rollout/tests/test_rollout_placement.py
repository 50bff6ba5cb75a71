"""Replicas on nodes: packing, spreading, and an immediate refusal of what cannot fit."""

import pytest
from omni_rollout.errors import RolloutConfigError
from omni_rollout.placement import Node, assign

NODES = [Node("a", "alpha", 4, 16), Node("b", "beta", 2, 16)]


def names(*arguments, **options):
    return [node.name for node, _ in assign(NODES, *arguments, **options)]


def test_pack_and_spread():
    assert names(3, gpus=2) == ["alpha", "alpha", "beta"]
    assert names(3, gpus=2, strategy="spread") == ["alpha", "beta", "alpha"]
    assert names(2, gpus=0, cpus=12) == ["alpha", "beta"]
    assert all(devices is None for _, devices in assign(NODES, 3, gpus=2))


def test_as_many_as_find_gpus():
    assert names(None, gpus=1) == ["alpha"] * 4 + ["beta"] * 2
    assert names(None, gpus=0) == ["alpha"]
    assert [d for _, d in assign(NODES, None, gpus=2, beside=[("a", "0"), ("a", "1"), ("b", "5"), ("b", "6")])] == [
        "0,1",
        "5,6",
    ]


def test_what_cannot_fit_is_refused_with_the_shortfall():
    with pytest.raises(RolloutConfigError, match=r"1 of them find no node.*alpha: 4 GPUs.*Missing: 4 GPUs"):
        assign(NODES, 2, gpus=4)
    with pytest.raises(RolloutConfigError, match=r"Missing: 8 GPUs"):
        assign(NODES, 1, gpus=8)  # eight GPUs exist nowhere on one node
    with pytest.raises(RolloutConfigError, match=r"Missing: 8 GPUs"):
        assign(NODES, None, gpus=8)
    with pytest.raises(RolloutConfigError, match="no node"):
        assign([], 1, gpus=1)


def test_replicas_beside_trainers_take_their_gpus_in_order_and_never_across_nodes():
    held = [("b", "1"), ("a", "0"), ("b", "0"), ("a", "1"), ("a", "2")]
    assert [(n.name, gpus) for n, gpus in assign(NODES, 3, gpus=1, beside=held)] == [
        ("beta", "1"), ("beta", "0"), ("alpha", "0"),
    ]  # fmt: skip
    assert [(n.name, gpus) for n, gpus in assign(NODES, 2, gpus=2, beside=held)] == [("beta", "1,0"), ("alpha", "0,1")]
    with pytest.raises(RolloutConfigError, match=r"beside the trainers: 1 of them.*beta: 2 GPUs.*Missing: 2 GPUs"):
        assign(NODES, 3, gpus=2, beside=held)  # alpha's third GPU has no neighbour
    with pytest.raises(RolloutConfigError, match="Missing: 1 GPUs"):
        assign(NODES, 1, gpus=1, beside=[])
    with pytest.raises(RolloutConfigError, match="2 of them find no node.*16 CPUs"):
        assign(NODES, 2, gpus=1, cpus=17, beside=held[:2])
