"""Which node holds which replica, decided before anything starts, so that what cannot fit fails at once and says why."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from .errors import MissingExtraError, RolloutConfigError


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, with what is free on it."""

    node_id: str
    name: str
    gpus: float
    cpus: float


def assign(
    nodes: Sequence[Node],
    replicas: int | None,
    *,
    gpus: int,
    cpus: float = 1.0,
    strategy: str = "pack",
    beside: Sequence[tuple[str, str]] | None = None,
) -> list[tuple[Node, str | None]]:
    """A node for each replica, and which GPUs of it where it shares them with trainers (a value for CUDA_VISIBLE_DEVICES).

    Args:
        nodes: the cluster.
        replicas: how many; None takes as many as find GPUs, and one where they need none.
        gpus, cpus: what one replica needs, on one node.
        strategy: "pack" fills a node before the next one, "spread" gives every node one before any gets a second.
        beside: (node id, GPU id) of GPUs that trainers hold. Each replica takes the next ones that lie on one node; a remainder
            that is too small stays unused. None: free GPUs.

    Raises:
        RolloutConfigError: the cluster has not enough, with the shortfall.
    """
    held: dict[str, list[str]] = {}
    for node_id, gpu in beside or ():
        held.setdefault(node_id, []).append(gpu)
    known = {node.node_id: node for node in nodes}
    places: list[list[tuple[Node, str | None]]] = []
    for node in nodes if beside is None else [known[node_id] for node_id in held]:
        shared = held.get(node.node_id, [])
        cuts: list[str | None] = [",".join(shared[i : i + gpus]) for i in range(0, len(shared) - gpus + 1, gpus or 1)]
        if beside is None:
            cuts = [None] * (int(node.gpus // gpus) if gpus else replicas or 1)
        room = int(node.cpus // cpus) if cpus else len(cuts)
        places.append([(node, cut) for cut in cuts[:room]])
    found = sum(map(len, places))
    replicas = replicas or (found if gpus else 1) or 1
    if found < replicas:
        free = (
            "; ".join(f"{n.name}: {len(held.get(n.node_id, ())) or n.gpus:g} GPUs, {n.cpus:g} CPUs" for n in nodes)
            or "no node"
        )
        raise RolloutConfigError(
            f"{replicas} replicas of {gpus} GPUs and {cpus:g} CPUs each do not fit{' beside the trainers' if held else ''}: "
            f"{replicas - found} of them find no node with that much ({free}). Missing: {(replicas - found) * gpus} GPUs, or "
            f"{(replicas - found) * cpus:g} CPUs. Ask for fewer replicas, or for less tensor parallelism."
        )
    if strategy == "spread":
        return [place for turn in zip_longest(*places) for place in turn if place is not None][:replicas]
    return [place for here in places for place in here][:replicas]


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
        raise MissingExtraError("replicas in actors need Ray: uv pip install './packages/omni-rollout[ray]'") from error
    return ray
