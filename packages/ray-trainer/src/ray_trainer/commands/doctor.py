"""`doctor [recipe=NAME] [key=value …]`: whether a run would work on this machine, and what to do where it would not.

Checks one thing after the other and goes on after a failure, so that a person sees all of them at once. Nothing is trained or
downloaded, and no Ray is started here; a cluster that the config names is joined and left.

exit code 0: all is well; 1: something deserves a look (warn); 2: a run would fail (fail)
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..card_memory import GB, measure, text_bound
from ..cluster import available_cpus, check_ray, cluster_address, memory_mb, ray_session
from ..config import RunConfig
from ..errors import TrainerError
from ..failure import words
from ..model_folder import check_folder, part_shapes, parts, transformers
from ..models import is_hub_id, locate, spec_class
from ..placement import foresee
from ..prompts import load_prompt_sets
from ..validate import validate_config

if TYPE_CHECKING:
    from ..app import App

Status = Literal["ok", "warn", "fail"]
EXIT_CODES: dict[Status, int] = {"ok": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True)
class Finding:
    """One line of the table; `remedy` says what to do about a warning or a failure."""

    status: Status
    subject: str
    said: str
    remedy: str = ""


def main(app: App, arguments: list[str]) -> int:
    """Print the table; returns 0, 1 or 2."""
    from ..app import parse

    config, _ = parse(app, arguments)
    if config is None:
        print((__doc__ or "").strip())
        return 0
    findings = []
    for finding in examine(config):
        print(line(finding), flush=True)
        findings.append(finding)
    counts = {status: sum(f.status == status for f in findings) for status in EXIT_CODES}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return max(EXIT_CODES[f.status] for f in findings)


def line(finding: Finding) -> str:
    """A row of the table; a remedy stands below it."""
    text = f"{finding.status:<5} {finding.subject:<15} {finding.said}"
    return text + (f"\n{'':<22}→ {finding.remedy}" if finding.remedy else "")


def examine(config: RunConfig) -> Iterator[Finding]:
    """Every finding, as soon as it is known. A check that raises is a failure of its subject, and the next one follows.

    One cause that stops several is told once.
    """
    told: dict[str, str] = {}
    for subject, check in CHECKS.items():
        try:
            yield from check(config)
        except Exception as error:
            why = str(error) if isinstance(error, ValueError) else words(error)
            first = told.setdefault(why, subject)
            said, _, remedy = why.rpartition("; ")
            if first != subject:
                said, remedy = "not known, for the same cause", f"see {first}"
            yield Finding("fail", subject, " ".join((said or remedy).split()), remedy if said else "")


def _python(config: RunConfig) -> Iterator[Finding]:
    known = (3, 11) <= sys.version_info[:2] <= (3, 13)
    remedy = "" if known else "use Python 3.11, 3.12 or 3.13: uv python install 3.13"
    yield Finding("ok" if known else "fail", "Python", f"{platform.python_version()} ({sys.executable})", remedy)


def gpus() -> list[dict[str, str]]:
    """Name, driver and memory (MiB) of each GPU, as nvidia-smi tells them; empty where there is none."""
    fields = ("name", "driver_version", "memory.total", "memory.free")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[value.strip() for value in row.split(",")] for row in said.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _torch(config: RunConfig) -> Iterator[Finding]:
    import torch

    cards, built = gpus(), torch.version.cuda
    driver = cards[0]["driver_version"] if cards else ""
    text = f"torch {torch.__version__}, CUDA {built or 'none'}" + (
        f", driver {driver}" if driver else ", no NVIDIA GPU"
    )
    if cards and built is None:
        yield Finding(
            "fail", "torch", text, "this torch has no CUDA: uv pip install torch from the index of your CUDA version"
        )
    elif cards and not torch.cuda.is_available():
        yield Finding(
            "fail",
            "torch",
            text,
            f"torch cannot use the GPU: update the driver to one for CUDA {built}, or look at CUDA_VISIBLE_DEVICES",
        )
    elif tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 11):
        yield Finding("fail", "torch", text, "needs torch 2.11 or newer: uv sync")
    elif config.actor.fsdp_config.device not in (None, "cpu") and not cards:
        yield Finding(
            "fail",
            "torch",
            text,
            f"actor.fsdp_config.device={config.actor.fsdp_config.device} needs a GPU; set it to cpu or null",
        )
    else:
        yield Finding("ok", "torch", text)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _pinned(package: str, name: str) -> str | None:
    """The version of `name` that an installed package asks for exactly."""
    for requirement in requires(package) or []:
        if found := re.match(rf"{re.escape(name)}\s*(?:\[[^]]*\])?\s*\(?==\s*([\w.]+)", requirement):
            return found[1]
    return None


def _vllm(config: RunConfig) -> Iterator[Finding]:
    needed = config.rollout.backend == "vllm_omni"
    found = {name: _installed(name) for name in ("vllm", "vllm-omni", "torch")}
    install = f"uv run --extra vllm apps/{config.app} …"
    if not (found["vllm"] and found["vllm-omni"]):
        missing = " and ".join(name for name in ("vllm", "vllm-omni") if not found[name])
        status: Status = "fail" if needed else "ok"
        said = f"{missing} not installed" + ("" if needed else " (only rollout.backend=vllm_omni needs it)")
        yield Finding(status, "vLLM-Omni", said, install if needed else "")
        return
    text = f"vllm {found['vllm']}, vllm-omni {found['vllm-omni']}, torch {found['torch']}"
    minor = [str(found[name]).split(".")[:2] for name in ("vllm", "vllm-omni")]
    asked, there = _pinned("vllm", "torch"), str(found["torch"]).partition("+")[0]
    bad: Status = "fail" if needed else "warn"
    if minor[0] != minor[1]:
        yield Finding(bad, "vLLM-Omni", text, f"vllm and vllm-omni must have the same version: {install}")
    elif asked and asked.partition("+")[0] != there:
        yield Finding(bad, "vLLM-Omni", text, f"vllm {found['vllm']} was built for torch {asked}: {install}")
    else:
        yield Finding("ok", "vLLM-Omni", text)


def _ray(config: RunConfig) -> Iterator[Finding]:
    check_ray(config.ray)
    address, text = cluster_address(config.ray), f"ray {version('ray')}"
    if not address:
        free = shutil.disk_usage("/dev/shm").free / 2**20 if Path("/dev/shm").is_dir() else None
        cpus = config.ray.num_cpus or max(available_cpus(), 2)
        text += f", starts on this machine: {cpus} CPUs, {memory_mb() / 1024:.0f} GiB of memory"
        if free is not None and free < config.ray.object_store_mb:
            remedy = (
                f"/dev/shm has {free:.0f} MiB: enlarge it, or lower ray.object_store_mb={config.ray.object_store_mb}"
            )
            yield Finding("warn", "Ray", text, remedy)
        else:
            yield Finding("ok", "Ray", text)
        return
    from ..machines import check_machines

    with ray_session(config.ray):
        import ray

        check_machines(config)
        have = ray.cluster_resources()
        text += f", cluster {address}: {len(ray.nodes())} machines, {have.get('CPU', 0):g} CPUs, {have.get('GPU', 0):g} GPUs"
    short = 0 < have.get("GPU", 0) < config.trainer.num_workers
    remedy = (
        f"trainer.num_workers={config.trainer.num_workers} needs as many GPUs; ask for {have.get('GPU', 0):g} or fewer"
    )
    yield Finding("fail" if short else "ok", "Ray", text, remedy if short else "")


def _gpu_memory(config: RunConfig) -> Iterator[Finding]:
    for number, card in enumerate(gpus()):
        total, free = (float(card[key]) * 2**20 / GB for key in ("memory.total", "memory.free"))
        busy = free < 0.9 * total
        remedy = f"{total - free:.1f} GB are in use: `nvidia-smi` names the processes" if busy else ""
        text = f"{number}: {card['name']}, {free:.1f} of {total:.1f} GB free"
        yield Finding("warn" if busy else "ok", "GPU", text, remedy)
    lines = foresee(config)
    for text in lines:
        if text.startswith("warning: "):
            yield Finding("warn", "memory", *text.removeprefix("warning: ").rsplit("; ", 1))
    yield Finding("ok", "placement", lines[0].removeprefix("placement: "))


def _disk(config: RunConfig) -> Iterator[Finding]:
    folder = next(parent for parent in Path(config.trainer.run_dir).parents if parent.is_dir())
    free, model = shutil.disk_usage(folder).free, locate(config.model.path)
    needs = None if model is None or config.model.transformer_config else measure(model, config, text_bound(config))
    # A checkpoint holds the trained weights, their copies and two moments; one more is written before the oldest goes.
    needed = (needs.trained if needs else 0.0) * (config.trainer.keep_checkpoints + 1) + 0.2 * GB
    text = f"{free / GB:.1f} GB free in {folder}, the run takes about {needed / GB:.1f} GB"
    if not os.access(folder, os.W_OK):
        yield Finding("fail", "disk", text, f"{folder} may not be written; set trainer.run_dir to a folder of yours")
    elif free < needed:
        yield Finding(
            "fail", "disk", text, "make room, lower trainer.keep_checkpoints, or set trainer.run_dir to another disk"
        )
    else:
        yield Finding("ok", "disk", text)


def _model(config: RunConfig) -> Iterator[Finding]:
    location = config.model.path
    folder = locate(location)
    if folder is None:
        yield _on_the_hub(location)
        return
    spec = check_folder(folder, config.model.architecture)
    count = sum(_size(part_shapes(folder, part)) for part in transformers(folder))
    dtypes = sorted(set().union(*(_dtypes(folder / part) for part in transformers(folder))))
    kind = f"{type(spec).pipeline_class}, {count / 1e9:.3g} billion parameters in {', '.join(dtypes)}"
    text = f"{kind}; parts {', '.join(parts(folder))}; {folder}"
    wanted = config.actor.fsdp_config.model_dtype
    if count > 1e9 and wanted in ("fp32", "float32"):
        yield Finding(
            "warn", "model", text, f"actor.fsdp_config.model_dtype={wanted} takes {4 * count / GB:.0f} GB; set bf16"
        )
    else:
        yield Finding("ok", "model", text)


def _size(shapes: dict[str, tuple[int, ...]]) -> int:
    import math

    return sum(math.prod(shape) for shape in shapes.values())


def _dtypes(part: Path) -> set[str]:
    """Of the tensors in a folder's safetensors files."""
    from safetensors import safe_open

    found = set()
    for file in part.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as opened:
            found |= {opened.get_slice(name).get_dtype() for name in opened.keys()}
    return found


def _on_the_hub(location: str) -> Finding:
    """Whether a Hub id that is not on this machine can be downloaded. Asks the Hub; nothing is downloaded."""
    if not is_hub_id(location):
        raise TrainerError(f"model.path={location!r} is neither a folder nor a Hub id; correct it")
    from huggingface_hub import auth_check
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        auth_check(location)
    except GatedRepoError:
        return Finding(
            "fail", "model", f"{location} is gated", f"accept its licence on the page of {location} and set HF_TOKEN"
        )
    except RepositoryNotFoundError:
        return Finding(
            "fail",
            "model",
            f"there is no {location} on the Hub, or it is private",
            "correct model.path, or set HF_TOKEN",
        )
    except Exception as error:
        return Finding("warn", "model", f"{location} is not here, and the Hub cannot be asked ({type(error).__name__})",
                       "copy the pipeline folder here and give it as model.path, or mend the connection")  # fmt: skip
    return Finding("warn", "model", f"{location} is not on this machine; it will be downloaded when training starts",
                   f"hf download {location} downloads it now")  # fmt: skip


def _lora(config: RunConfig) -> Iterator[Finding]:
    """The adapters are put into the network on the meta device: no memory, but the real layers."""
    model = config.model
    if model.lora_rank == 0:
        yield Finding("ok", "LoRA", "none: the whole transformer is trained (model.lora_rank=0)")
        return
    folder = locate(model.path)
    if folder is None:
        yield Finding("warn", "LoRA", "targets are bound when the model is on this machine", "download it first")
        return
    from fsdp_diffusers_engine.adapters import adapter_parameters, inject_adapters

    spec = spec_class(model.architecture)(folder) if model.architecture else check_folder(folder)
    module = spec.empty_transformer(folder, None)
    inject_adapters(module, model, spec, ["default"])
    tensors = adapter_parameters(module, "default")
    count = sum(p.numel() for p in tensors.values())
    scale = model.lora_alpha / model.lora_rank
    yield Finding(
        "ok", "LoRA", f"rank {model.lora_rank}, scale {scale:g}: {len(tensors) // 2} layers, {count:,} parameters"
    )


def _prompts(config: RunConfig) -> Iterator[Finding]:
    train, held_out = load_prompt_sets(config.data)
    for name, prompts in (("train_file", train), ("val_file", held_out)):
        where = (
            getattr(config.data, name)
            or (config.data.sources and "of several sources")
            or f"held out of {config.data.train_file}"
        )
        first = "".join(
            f"\n{'':<23}{p.text[:100]!r}" + (f" {p.metadata}"[:100] if p.metadata else "") for p in prompts[:2]
        )
        yield Finding("ok", f"data.{name}", f"{len(prompts)} prompts, {where}{first}")
    both = {p.text for p in train} & {p.text for p in held_out}
    if both:
        yield Finding("warn", "data.val_file", f"{len(both)} held-out prompts are also trained on: {min(both)[:80]!r}",
                      "validate on other prompts, or leave data.val_file empty")  # fmt: skip


def _reward(config: RunConfig) -> Iterator[Finding]:
    """One call of each reward on a grey picture (or latents of zeros) of the size of training, with the first prompt that it
    scores: slow rewards and missing weights show here."""
    import numpy as np
    from image_rewards import RewardSample, load

    drawn = config.rollout.pipeline
    shape = (3, drawn.height, drawn.width)
    if drawn.num_frames > 1:
        shape = (drawn.num_frames, *shape)  # type: ignore[assignment]
    train = load_prompt_sets(config.data)[0]
    for label, pool in config.reward.each.items():
        first = next(p for p in train if label in config.rewards_of(p.source))
        key = f"reward.several.{label}" if label else "reward"
        start = time.perf_counter()
        reward = load(pool.name, **pool.options)
        what, given = "a grey picture", np.full(shape, 127, np.uint8)
        if reward.inputs == "latents":
            if (folder := locate(config.model.path)) is None:
                yield Finding("ok", key, f"{pool.name} reads latents, and is tried when the model is here")
                continue
            size = drawn.height, drawn.width, drawn.num_frames
            what, given = (
                "latents of zeros",
                np.zeros(check_folder(folder, config.model.architecture).latent_shape(*size), np.float32),
            )
        loaded = time.perf_counter()
        result = reward.score([RewardSample(given, first.text, first.metadata)])[0]
        seconds = time.perf_counter() - loaded
        if result.error:
            said = f"{pool.name} does not score {what}: {result.error}"
            yield Finding("fail", key, said, f"correct {key}.options, or the reward")
            continue
        parts_ = ", ".join(f"{name} {value:.3g}" for name, value in result.components.items())
        text = f"{pool.name} gives {what} {result.score:.3g} ({parts_})"
        text += f" in {seconds:.2f} s, made in {loaded - start:.1f} s"
        samples = config.data.prompts_per_step * config.rows_per_prompt
        step = seconds * samples / pool.num_workers
        slow = step > 60
        workers = f"{key}.num_workers={pool.num_workers}"
        remedy = (
            f"{samples} samples a step take {step:.0f} s with {workers}; use more, or a served reward" if slow else ""
        )
        yield Finding("warn" if slow else "ok", key, text, remedy)


def _trackers(config: RunConfig) -> Iterator[Finding]:
    """Whether each is installed, and a key is there for one that wants it."""
    for name in config.trainer.trackers:
        if find_spec(name) is None:
            yield Finding(
                "fail", "trackers", f"{name} is not installed", f"uv run --extra trackers apps/{config.app} …"
            )
        elif name == "wandb" and not (_wandb_key() or os.environ.get("WANDB_MODE", "online") != "online"):
            yield Finding("warn", "trackers", "wandb has no key here", "set WANDB_API_KEY, or WANDB_MODE=offline")
        else:
            yield Finding("ok", "trackers", name)
    if not config.trainer.trackers:
        yield Finding("ok", "trackers", "none (metrics.jsonl and report.html are always written)")


def _wandb_key() -> bool:
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    return "WANDB_API_KEY" in os.environ or (netrc.is_file() and "wandb" in netrc.read_text(errors="replace"))


def _whole(config: RunConfig) -> Iterator[Finding]:
    lines = validate_config(config)
    for text in lines:
        if text.startswith("warning: "):
            yield Finding("warn", "config", *text.removeprefix("warning: ").rsplit("; ", 1))
    yield Finding("ok", "config", f"{config.recipe}: {lines[0]}")


CHECKS: dict[str, Callable[[RunConfig], Iterator[Finding]]] = {
    "Python": _python,
    "torch": _torch,
    "vLLM-Omni": _vllm,
    "Ray": _ray,
    "memory": _gpu_memory,
    "disk": _disk,
    "model": _model,
    "LoRA": _lora,
    "prompts": _prompts,
    "reward": _reward,
    "trackers": _trackers,
    "config": _whole,
}
"""Each check under the subject that its own failure has; the cheap ones first."""
