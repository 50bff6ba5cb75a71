"""Replicas on nodes: packing, spreading, and an immediate refusal of what cannot fit."""

import pytest
from omni_rollout.errors import RolloutConfigError
from omni_rollout.placement import Node, assign_nodes

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
