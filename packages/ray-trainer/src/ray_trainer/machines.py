"""The machines of a Ray cluster: whether they have the same software, disk and model, and where on them training processes go."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .config import RunConfig
from .errors import TrainerError
from .placement import Machine

ANSWER_S = 120.0
"""How long a machine may take to start a process and answer a question."""
LEAVE_S = 45.0
"""How long Ray may take to see that a machine is gone."""
_OWN = [
    "ray_trainer", "omni_rollout", "fsdp_diffusers_engine", "image_rewards", "run_report", "lora_sync",
    "model_specs", "sde_samplers", "diffusion_losses", "flowgrpo", "dpo_online",
]  # fmt: skip
_OTHERS = ["torch", "ray", "diffusers", "transformers", "peft"]


def machines() -> dict[str, dict[str, Any]]:
    """The living machines that can run something, by Ray's node id, in the order of their addresses."""
    import ray

    living = [n for n in ray.nodes() if n["Alive"] and (n["Resources"].get("CPU") or n["Resources"].get("GPU"))]
    return {n["NodeID"]: n for n in sorted(living, key=lambda n: (n["NodeManagerAddress"], n["NodeManagerPort"]))}


def on_each(work: Callable[[], Any], nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Call a function once on every machine; its answers by node id. A machine that has left meanwhile gives none.

    Args:
        work: nested in another function, so that it travels as code: a machine with other packages can run it too.

    Raises:
        TrainerError: a machine that does not answer, or what the function raised, with the machine's address.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(work)
    asked = {
        node: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in nodes
    }
    answers = {}
    for node, answer in asked.items():
        where = f"machine {nodes[node]['NodeManagerAddress']}"
        try:
            answers[node] = ray.get(answer, timeout=ANSWER_S)
        except ray.exceptions.GetTimeoutError as error:
            raise TrainerError(
                f"{where} started no process within {ANSWER_S:.0f} s; look at `ray status` there"
            ) from error
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            if cause is error and _leaves(node):
                continue
            raise TrainerError(f"{where}: {type(cause).__name__}: {str(cause).splitlines()[-1][:300]}") from error
    return answers


def _leaves(node: str) -> bool:
    """Whether Ray takes a machine off its list: it notices after some seconds that one is gone."""
    deadline = time.monotonic() + LEAVE_S
    while node in machines():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def check_machines(config: RunConfig) -> None:
    """Every machine must have this one's software and see its run folder; asked before anything is loaded.

    Raises:
        TrainerError: the first difference, with the machine's address and what to do.
    """
    nodes = machines()
    folder = next(parent for parent in Path(config.trainer.run_dir).parents if parent.is_dir())
    token, own, others = secrets.token_hex(16), _OWN, _OTHERS
    mark = folder / f".{token}.shared-disk"

    def look() -> tuple[dict[str, str], bool]:
        import hashlib
        import platform
        from importlib.metadata import PackageNotFoundError, version
        from importlib.util import find_spec
        from pathlib import Path

        found = {"Python": platform.python_version()}
        for name in others:
            try:
                found[name] = version(name).partition("+")[0]
            except PackageNotFoundError:
                found[name] = "missing"
        for name in own:
            spec, digest = find_spec(name), hashlib.blake2b(digest_size=4)
            for place in (spec.submodule_search_locations or []) if spec else []:
                for file in sorted(Path(place).rglob("*.py")):
                    digest.update(file.read_bytes())
            found[name] = f"source {digest.hexdigest()}" if spec else "missing"
        try:
            return found, Path(mark).read_text() == token
        except OSError:
            return found, False

    here = look()[0]
    mark.write_text(token)
    try:
        answers = on_each(look, nodes)
    finally:
        mark.unlink(missing_ok=True)
    for node, (there, shared) in answers.items():
        address = nodes[node]["NodeManagerAddress"]
        different = [f"{name} {there[name]} (here {here[name]})" for name in here if there[name] != here[name]]
        if different:
            raise TrainerError(
                f"machine {address} has {', '.join(different[:4])}; use the same checkout and `uv sync` on every machine, and "
                "start Ray there again"
            )
        if not shared:
            raise TrainerError(
                f"trainer.run_dir={config.trainer.run_dir!r}: machine {address} does not see {str(folder)!r} of this one; put "
                "the run folder on a disk that every machine mounts at the same path"
            )


def fetch_everywhere(location: str, nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The folder of a model on each machine, by node id; what is missing there is downloaded, once per machine."""

    def fetch_here() -> str:
        from .models import check_present, fetch

        return str(check_present(location, fetch(location)))

    return on_each(fetch_here, nodes)


@dataclass(frozen=True)
class Gang:
    """A place for every training process, reserved together; neighbouring ranks lie on one machine."""

    group: Any
    bundles: Sequence[int]
    nodes: Sequence[str]
    """Node id of each rank's machine."""
    addresses: Sequence[str]
    machines: Sequence[Machine]
    """Without the GPUs of the rewards."""
    rewards: Mapping[str, Any] = field(default_factory=dict)
    """Ray's placement group of each reward that has GPUs of its own."""

    def strategy(self, rank: int) -> Any:
        """Ray's scheduling strategy of a rank."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[rank])

    def release(self) -> None:
        """Give the places back."""
        from ray.util import remove_placement_group

        for group in (self.group, *self.rewards.values()):
            with suppress(Exception):  # the cluster may be gone
                remove_placement_group(group)


def reserve(config: RunConfig, cpus: float) -> tuple[Gang, bool]:
    """Places for all training processes, and for rewards that have GPUs of their own; and whether each process has a GPU.

    Raises:
        TrainerError: the cluster has not enough.
    """
    import ray
    from ray.util import placement_group, placement_group_table, remove_placement_group

    size, nodes = config.trainer.num_workers, machines()
    gpus = {node: int(entry["Resources"].get("GPU", 0)) for node, entry in nodes.items()}
    use_gpu = config.actor.fsdp_config.device != "cpu" and sum(gpus.values()) > 0
    if use_gpu and sum(gpus.values()) < size:
        raise TrainerError(
            f"trainer.num_workers={size} needs {size} GPUs and Ray sees {sum(gpus.values())}; ask for {sum(gpus.values())} or "
            "fewer, or set actor.fsdp_config.device=cpu"
        )
    own = math.ceil(config.reward.own_gpus)
    if own > (free := sum(gpus.values()) - size * use_gpu):
        raise TrainerError(
            f"reward.num_gpus asks for {own} GPUs beside the trainers', and Ray sees {free}; use fewer reward workers or a smaller "
            "share, set reward.share_trainers_gpus=true, or score on the CPU with reward.num_gpus=0"
        )
    group = placement_group([{"CPU": cpus, **({"GPU": 1} if use_gpu else {})}] * size, strategy="PACK")
    if not group.wait(timeout_seconds=ANSWER_S):
        remove_placement_group(group)
        free = ray.available_resources()
        raise TrainerError(
            f"trainer.num_workers={size} needs {size} places of {cpus:g} CPUs{' and a GPU' if use_gpu else ''} each, and free are "
            f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs; ask for fewer, or end what else runs there"
        )
    place = placement_group_table(group)["bundles_to_node_id"]
    order = list(nodes)
    bundles = sorted(place, key=lambda bundle: (order.index(place[bundle]), bundle))
    held = [place[bundle] for bundle in bundles]
    addresses = [nodes[node]["NodeManagerAddress"] for node in held]
    gang = Gang(group, bundles, held, addresses, [], {})
    taken = dict.fromkeys(order, 0.0)
    for name, reward in config.reward.each.items():
        if not reward.num_gpus or reward.share_trainers_gpus:
            continue
        bundle = {"CPU": reward.num_cpus, "GPU": reward.num_gpus}
        places = placement_group([bundle] * reward.num_workers, strategy="PACK")
        gang = replace(gang, rewards={**gang.rewards, name: places})
        if not places.wait(timeout_seconds=ANSWER_S):
            gang.release()
            raise TrainerError(
                f"reward {reward.name!r}: {reward.num_workers} workers of {reward.num_gpus:g} GPUs and {reward.num_cpus:g} CPUs "
                "each find no room beside the trainers; use fewer, or end what else runs there"
            )
        for node in placement_group_table(places)["bundles_to_node_id"].values():
            taken[node] += reward.num_gpus
    counted = [Machine(gpus[node] - math.ceil(taken[node]) if use_gpu else 0, held.count(node)) for node in order]
    return replace(gang, machines=[m for m in counted if m.gpus or m.ranks]), use_gpu
