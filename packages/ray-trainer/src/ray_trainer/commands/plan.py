"""`plan [recipe=NAME] [key=value …] [gpu=NAME] [price=DOLLARS] …`: what a run will need and take, before it is begun.

gpu=H100        the GPU to plan for; by default this machine's, and H100 where it has none (ray.gpu_memory_gb is its memory)
price=2.5       dollars for an hour of one GPU
reward=0.1      seconds that a reward worker takes for a picture: `doctor` measures one call
engine=stock    with rollout.backend=vllm_omni: vLLM-Omni as it comes, whose adapters stand outside of its compiled blocks, as other
                programs use it; own (the default) is the engine of this program

Memory comes from the headers of the model's files, seconds from counted operations and shares of the peak that were measured
on full-size runs.

exit code 0: it fits; 1: it does not; 2: the input cannot be used
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fsdp_diffusers_engine.peaks import PEAK_BF16, tabled_peak

from ..card_memory import GB, Needs
from ..config import RunConfig
from ..errors import TrainerError
from ..models import locate
from ..placement import Placement, foreseen
from ..prompts import load_prompt_sets
from ..step_time import Phase, phases, text_tokens
from ..validate import validate_config

if TYPE_CHECKING:
    from ..app import App


OWN = {
    "gpu": "the name of a GPU, such as gpu=H100",
    "price": "dollars for an hour of one GPU, such as price=2.5",
    "reward": "seconds that a picture takes, such as reward=0.1",
    "engine": "own or stock",
}
"""Arguments that are no keys of the config."""


def main(app: App, arguments: list[str]) -> int:
    """Print the plan; returns 0 where it fits, 1 where it does not."""
    from ..app import parse

    own = {key: value for key, _, value in (a.partition("=") for a in arguments) if key in OWN}
    config, _ = parse(app, [a for a in arguments if a.partition("=")[0] not in own])
    if config is None:
        print((__doc__ or "").strip())
        return 0
    validate_config(config)
    folder, seen = locate(config.model.path), foreseen(config)
    if folder is None or seen is None:
        raise TrainerError(
            f"model.path={config.model.path!r} is not on this machine, and a plan reads the headers of its files; download it first"
        )
    placed, needs = seen
    name, peak = _gpu(own.get("gpu"), needs, config)
    text = text_tokens(folder, config, load_prompt_sets(config.data)[0])
    reward, apart = _number(own, "reward"), own.get("engine", "own") == "stock"
    if own.get("engine", "own") not in ("own", "stock"):
        raise TrainerError(f"engine={own['engine']!r} is unknown; give own or stock")
    found = phases(config, folder, needs, placed, text, peak, name != "CPU", reward or 0.0, apart)
    print(f"{config.recipe} on {config.trainer.num_workers} x {name}, {peak / 1e12:.3g} TFLOP/s at most")
    print("\n".join(memory_lines(placed)))
    print("\n".join(time_lines(config, found, _number(own, "price"))))
    if sum(placed.parts.values()) <= placed.usable:
        return 0
    print(f"it does not fit: {what_would_fit(config)}")
    return 1


def _number(given: dict[str, str], key: str) -> float | None:
    """A number of the command's own arguments, None where it is not given."""
    try:
        return float(given[key]) if key in given else None
    except ValueError as error:
        raise TrainerError(f"{key}={given[key]!r} is no number; give {OWN[key]}") from error


def _gpu(asked: str | None, needs: Needs, config: RunConfig) -> tuple[str, float]:
    """Name and peak of the GPU that is planned for; "CPU" and a measured product where the run has none."""
    from .doctor import gpus

    here = gpus()
    if asked is None and not here and (config.actor.fsdp_config.device == "cpu" or needs.base < GB):
        import torch
        from fsdp_diffusers_engine.perf import measured_flops

        torch.set_num_threads(config.ray.worker_threads or torch.get_num_threads())
        return "CPU", measured_flops("cpu", 0, torch.float32)
    name = asked or (here[0]["name"] if here else "H100")
    peak = config.actor.fsdp_config.peak_tflops or tabled_peak(name)
    if peak is None:
        raise TrainerError(
            f"gpu={name!r} is in no table; set actor.fsdp_config.peak_tflops to its peak, or take one of {', '.join(PEAK_BF16)}"
        )
    return name, peak * 1e12


def memory_lines(placed: Placement) -> Iterator[str]:
    """Where things lie, and what each takes of a GPU."""
    yield placed.lines[0]
    if not placed.parts:
        return
    for name, size in placed.parts.items():
        yield f"  {name:<36}{size / GB:>8.1f} GB"
    total = sum(placed.parts.values())
    yield f"  {'in all':<36}{total / GB:>8.1f} GB of {placed.usable / GB:.1f} that may be filled"


def time_lines(config: RunConfig, found: list[Phase], price: float | None) -> Iterator[str]:
    """Seconds of each phase, and what follows for the run."""
    samples, ranks = config.data.prompts_per_step * config.rows_per_prompt, config.trainer.num_workers
    without = (
        ""
        if any(phase.name == "reward" for phase in found)
        else ", without rewards (reward=SECONDS of a picture adds them)"
    )
    yield f"seconds of a step of {samples} samples{without}"
    for phase in found:
        yield f"  {phase.name:<20}{phase.seconds:>8.1f}   {phase.why}"
    step = sum(phase.seconds for phase in found)
    hours = step * config.trainer.total_steps / 3600
    rate = samples / step
    length = f"{config.trainer.total_steps} steps {hours:.2f} h"
    yield f"  {'step':<20}{step:>8.1f}   {rate:.3g} images/s, {rate / ranks:.3g} a GPU; {length}"
    if price is None:
        return
    cost = price * hours * ranks
    image = cost / samples / config.trainer.total_steps
    yield f"  {'dollars':<20}{cost:>8.2f}   at {price:g} for an hour of a GPU; {image:.2g} an image"


def what_would_fit(config: RunConfig) -> str:
    """The first changes that make it fit, each over the ones before; those that the sums do not need are not named."""
    changed, said = copy.deepcopy(config), list[str]()
    for key, change in _changes(config):
        change(changed)
        seen = foreseen(changed)
        assert seen is not None
        said.append(key)
        if sum(seen[0].parts.values()) <= seen[0].usable:
            return f"with {', '.join(said)} it takes {sum(seen[0].parts.values()) / GB:.1f} GB and does"
    return f"not with {', '.join(said)} either; take GPUs with more memory"


def _changes(config: RunConfig) -> Iterator[tuple[str, Callable[[RunConfig], None]]]:
    """What lowers memory, the cheapest in time first."""

    def put(key: str, value: object) -> tuple[str, Callable[[RunConfig], None]]:
        def change(target: RunConfig) -> None:
            *sections, leaf = key.split(".")
            place: object = target
            for section in sections:
                place = getattr(place, section)
            setattr(place, leaf, value)

        return f"{key}={str(value).lower() if isinstance(value, bool) else value}", change

    actor, rollout = config.actor, config.rollout
    if actor.fsdp_config.model_dtype in ("fp32", "float32"):
        yield put("actor.fsdp_config.model_dtype", "bf16")
        yield put("rollout.dtype", "bfloat16")
    if not config.model.enable_gradient_checkpointing:
        yield put("model.enable_gradient_checkpointing", True)
    micro, batch = actor.ppo_micro_batch_size_per_gpu, rollout.max_batch_size
    while micro > 1 or batch > 8:
        if micro > 1:
            micro //= 2
            yield put("actor.ppo_micro_batch_size_per_gpu", micro)
        if batch > 8:
            batch //= 2
            yield put("rollout.max_batch_size", batch)
    if config.trainer.num_workers > 1:
        yield put("actor.fsdp_config.sharding", "shard")
    if config.trainer.num_workers < 8:
        yield put("trainer.num_workers", 8)
