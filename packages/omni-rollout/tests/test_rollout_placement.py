"""Replicas on nodes: packing, spreading, and an immediate refusal of what cannot fit."""

import pytest
from omni_rollout.errors import RolloutConfigError
from omni_rollout.placement import Node, assign_beside, assign_nodes

NODES = [Node("a", "alpha", 4, 16), Node("b", "beta", 2, 16)]


def test_pack_and_spread():
    assert [n.name for n in assign_nodes(NODES, 3, gpus=2)] == ["alpha", "alpha", "beta"]
    assert [n.name for n in assign_nodes(NODES, 3, gpus=2, strategy="spread")] == ["alpha", "beta", "alpha"]
    assert [n.name for n in assign_nodes(NODES, 2, gpus=0, cpus=12)] == ["alpha", "beta"]


def test_what_cannot_fit_is_refused_with_the_shortfall():
    with pytest.raises(RolloutConfigError, match=r"1 of them find no node.*alpha: 4 GPUs.*Missing: 4 GPUs"):
        assign_nodes(NODES, 2, gpus=4)
    with pytest.raises(RolloutConfigError, match=r"Missing: 8 GPUs"):
        assign_nodes(NODES, 1, gpus=8)  # eight GPUs exist nowhere on one node
    with pytest.raises(RolloutConfigError, match="no node"):
        assign_nodes([], 1, gpus=1)
    with pytest.raises(RolloutConfigError, match="'pack' or 'spread'"):
        assign_nodes(NODES, 1, gpus=1, strategy="both")


def test_replicas_beside_trainers_take_their_gpus_in_order_and_never_across_nodes():
    held = [("b", "1"), ("a", "0"), ("b", "0"), ("a", "1"), ("a", "2")]
    assert [(n.name, gpus) for n, gpus in assign_beside(NODES, held, 3, gpus=1)] == [
        ("beta", "1"), ("beta", "0"), ("alpha", "0"),
    ]  # fmt: skip
    assert [(n.name, gpus) for n, gpus in assign_beside(NODES, held, 2, gpus=2)] == [("beta", "1,0"), ("alpha", "0,1")]
    with pytest.raises(RolloutConfigError, match=r"1 of them find no node.*beta: 2 GPUs.*Missing: 2 GPUs of trainers"):
        assign_beside(NODES, held, 3, gpus=2)  # alpha's third GPU has no neighbour
    with pytest.raises(RolloutConfigError, match="Missing: 1 GPUs"):
        assign_beside(NODES, [], 1, gpus=1)
    with pytest.raises(RolloutConfigError, match="2 of them find no node.*16 CPUs"):
        assign_beside(NODES, held[:2], 2, gpus=1, cpus=17)
    with pytest.raises(RolloutConfigError, match="node 'c'"):
        assign_beside(NODES, [("c", "0")], 1, gpus=1)
    with pytest.raises(RolloutConfigError, match="GPU '0' of node 'alpha' twice"):
        assign_beside(NODES, [("a", "0"), ("a", "0")], 1, gpus=1)
