"""Which node holds which replica, decided before anything starts, so that what cannot fit fails at once and says why."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import MissingExtraError, RolloutConfigError


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, with what is free on it."""

    node_id: str
    name: str
    gpus: float
    cpus: float


def assign_nodes(
    nodes: Sequence[Node], replicas: int, *, gpus: int, cpus: float = 1.0, strategy: str = "pack"
) -> list[Node]:
    """A node for each replica.

    Args:
        gpus, cpus: what one replica needs, on one node.
        strategy: "pack" fills a node before the next one, "spread" gives every node one before any gets a second.

    Raises:
        RolloutConfigError: the cluster has not enough, with the shortfall; or an unknown strategy.
    """
    if strategy not in ("pack", "spread"):
        raise RolloutConfigError(f"placement={strategy!r} must be 'pack' or 'spread'.")
    room = {node.node_id: slots(node, gpus, cpus) for node in nodes}
    if sum(room.values()) < replicas:
        free = "; ".join(f"{node.name}: {node.gpus:g} GPUs, {node.cpus:g} CPUs" for node in nodes) or "no node"
        missing = replicas - sum(room.values())
        raise RolloutConfigError(
            f"{replicas} replicas of {gpus} GPUs and {cpus:g} CPUs each do not fit: {missing} of them find no node with "
            f"that much free ({free}). Missing: {missing * gpus} GPUs, or {missing * cpus:g} CPUs beside the GPUs there "
            "are. Ask for fewer replicas, or for less tensor parallelism."
        )
    chosen: list[Node] = []
    used = dict.fromkeys(room, 0)
    for _ in range(replicas):
        open_nodes = [node for node in nodes if used[node.node_id] < room[node.node_id]]
        node = open_nodes[0] if strategy == "pack" else min(open_nodes, key=lambda n: used[n.node_id])
        used[node.node_id] += 1
        chosen.append(node)
    return chosen


def assign_beside(
    nodes: Sequence[Node], beside: Sequence[tuple[str, str]], replicas: int, *, gpus: int, cpus: float = 1.0
) -> list[tuple[Node, str]]:
    """A node and GPUs for each replica, on GPUs that trainers hold already.

    Args:
        nodes: the cluster; what is free on it matters for CPUs alone.
        beside: (node id, GPU id) of the trainers, in the order in which they are to be used.
        gpus, cpus: what one replica needs, on one node.

    Returns:
        Per replica its node and a value for CUDA_VISIBLE_DEVICES: the next `gpus` of `beside` that lie on one node. Nodes
        come in the order in which `beside` names them; a remainder of a node that is too small for a replica stays unused.

    Raises:
        RolloutConfigError: too few GPUs or CPUs, with the shortfall; a GPU named twice; a node that is not in the cluster.
    """
    known, devices = {node.node_id: node for node in nodes}, dict[str, list[str]]()
    for node_id, gpu in beside:
        if node_id not in known:
            raise RolloutConfigError(f"beside names node {node_id!r}, which is not in the cluster: {sorted(known)!r}.")
        if str(gpu) in devices.setdefault(node_id, []):
            raise RolloutConfigError(f"beside names GPU {gpu!r} of node {known[node_id].name!r} twice.")
        devices[node_id].append(str(gpu))
    places: list[tuple[Node, str]] = []
    for node_id, held in devices.items():
        room = slots(known[node_id], 0, cpus)
        cuts = [held[start : start + gpus] for start in range(0, len(held) - gpus + 1, gpus)][:room]
        places += [(known[node_id], ",".join(cut)) for cut in cuts]
    if len(places) < replicas:
        have = "; ".join(f"{known[n].name}: {len(held)} GPUs, {known[n].cpus:g} CPUs" for n, held in devices.items())
        missing = replicas - len(places)
        raise RolloutConfigError(
            f"{replicas} replicas of {gpus} GPUs and {cpus:g} CPUs each do not fit beside the trainers: {missing} of them "
            f"find no node with that much ({have or 'no GPU'}). Missing: {missing * gpus} GPUs of trainers, or "
            f"{missing * cpus:g} CPUs. Ask for fewer replicas, less tensor parallelism, or GPUs of their own."
        )
    return places[:replicas]


def slots(node: Node, gpus: int, cpus: float) -> int:
    """Replicas that a node has room for."""
    limits = [int(free // need) for free, need in ((node.gpus, gpus), (node.cpus, cpus)) if need > 0]
    return min(limits) if limits else 10**6


def cluster_nodes() -> list[Node]:
    """The living nodes of the Ray cluster that this process is connected to, by address, with what is free now."""
    ray = import_ray()
    from ray._private.state import available_resources_per_node

    free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    nodes = [entry for entry in ray.nodes() if entry["Alive"]]
    nodes.sort(key=lambda entry: (entry["NodeManagerAddress"], entry["NodeManagerPort"]))
    found = []
    for entry in nodes:
        have = free.get(entry["NodeID"], {})
        name = f"{entry['NodeManagerHostname']}:{entry['NodeManagerPort']}"
        found.append(Node(entry["NodeID"], name, have.get("GPU", 0.0), have.get("CPU", 0.0)))
    return found


def on_node(node: Node) -> Any:
    """Ray's scheduling strategy for exactly this node."""
    import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node.node_id, soft=False)


def import_ray() -> Any:
    """The ray module, or `MissingExtraError`."""
    # Else Ray's hook, under `uv run`, starts every worker through `uv run` in an uploaded copy of the folder.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("replicas in actors need Ray: pip install './packages/omni-rollout[ray]'") from error
    return ray
