"""What a failure says, and what it leaves behind to be looked at and run again. Nothing here raises: the cause stays first."""

from __future__ import annotations

import errno
import json
import shutil
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from .pictures import fetched
from .prompts import Prompt

if TYPE_CHECKING:
    from .config import RunConfig

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "unable to allocate", "alloc_failed")


def record_failure(
    root: Path,
    step: int,
    error: BaseException,
    batch: TensorDict | None,
    prompts: Sequence[Prompt] = (),
    rows: Callable[[Path], object] | None = None,
) -> tuple[Path, list[str]]:
    """Write the traceback, the step's prompts, and the batch as far as it had come, into `root/step_000012`.

    `rows`, when given, lets the workers write theirs into that folder.

    Returns:
        That folder (`error.txt`, `prompts.json`, and with a batch also `batch.safetensors` for its tensors and `batch.json` for
        the rest, a row per sample), and a line for each file that could not be written.
    """
    folder = root / f"step_{step:06d}"
    lost: list[str] = []

    def attempt(name: str, write: Callable[[Path], object]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write(folder / name)
        except Exception as second:
            lost.append(f"{folder / name} could not be written: {words(second)}")

    text = "".join(traceback.format_exception(error))
    attempt("error.txt", lambda file: file.write_text(text, encoding="utf-8", errors="backslashreplace"))
    attempt("prompts.json", lambda file: _write_json(file, [asdict(prompt) for prompt in prompts]))
    if batch is not None:
        tensors: dict[str, torch.Tensor] = {}
        rest: dict[str, Any] = {}
        for key in batch.keys():
            try:
                value = fetched(batch[key]) if key == "responses" else batch[key]
                plain = _plain(value) if isinstance(value, torch.Tensor) else None
            except Exception as second:
                value, plain = f"could not be read: {words(second)}", None
            if plain is None:
                rest[str(key)] = value
            else:
                tensors[str(key)] = plain
        attempt("batch.safetensors", lambda file: write_tensors(file, tensors))
        attempt("batch.json", lambda file: _write_json(file, rest))
        if rows is not None:
            attempt("rows", lambda file: rows(file.parent))
    return folder, lost


def _plain(value: torch.Tensor) -> torch.Tensor | None:
    """A dense copy on the CPU with a storage of its own, as a safetensors file takes it; None where there is no such form."""
    if value.is_nested or value.is_quantized or value.layout is not torch.strided or value.is_complex():
        return None
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def write_tensors(file: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, or none."""
    from safetensors.torch import save_file

    try:
        save_file(tensors, file, metadata)
    except BaseException:
        file.unlink(missing_ok=True)  # half a file cannot be read
        raise


def _write_json(file: Path, content: Any) -> None:
    try:
        text = json.dumps(content, default=_repr, indent=1)
    except (TypeError, ValueError, RecursionError):  # keys that JSON does not have, a circle
        rows = content.items() if isinstance(content, dict) else enumerate(content)
        text = json.dumps({str(key): _repr(value) for key, value in rows}, indent=1)
    file.write_text(text, encoding="utf-8")


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"


def first_cause(error: BaseException) -> BaseException:
    """The error that a person should read: out of Ray's wrapper, and the first of a group."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else getattr(error, "cause", None)
        error = inner if isinstance(inner, BaseException) else error
    return error


def words(error: BaseException) -> str:
    """Type and message of the first cause in one line; of a traceback in the message its error."""
    cause = first_cause(error)
    try:
        lines = str(cause).splitlines()
    except Exception:
        lines = []
    if any(_TRACEBACK in line for line in lines):
        lines = _raised(lines)
    text = " ".join(line.strip() for line in lines if line.strip())
    return f"{type(cause).__name__}: {text[:800]}{' …' if len(text) > 800 else ''}" if text else type(cause).__name__


_TRACEBACK = "Traceback (most recent call last)"


def _raised(lines: list[str]) -> list[str]:
    """The error that the last traceback in a text ends with. What follows after an empty line is advice, such as a compiler's."""
    raised, inside = lines[-1:], False
    for number, line in enumerate(lines):
        if inside and line[:1].strip():  # the frames are indented
            end = next((n for n in range(number, len(lines)) if not lines[n].strip()), len(lines))
            raised, inside = lines[number:end], False
        inside = inside or _TRACEBACK in line
    return raised


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: of a GPU, of this machine, or of Ray's limit. The texts are those of torch, CUDA and numpy."""
    text = words(error)
    marked = text.startswith(("OutOfMemoryError", "MemoryError")) or any(m in text.lower() for m in _OUT_OF_MEMORY)
    return marked or isinstance(first_cause(error), MemoryError | torch.OutOfMemoryError)


def disk_full(error: BaseException, run: Path) -> str:
    """What to say when a disk is full: which file, how much is free and how much a checkpoint takes. Empty for other errors."""
    cause, text = first_cause(error), words(error)
    marked = "No space left on device" in text or "Disk quota exceeded" in text
    if not marked and getattr(cause, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    file = getattr(cause, "filename", None) or run
    free = shutil.disk_usage(run).free
    sizes = [sum(f.stat().st_size for f in c.rglob("*") if f.is_file()) for c in run.glob("checkpoints/*step_*")]
    needed = f", and a checkpoint of this run takes {max(sizes) / 2**20:.0f} MiB or more" if sizes else ""
    return f"the disk of {file} is full: {free / 2**20:.0f} MiB are free{needed}; make room, then resume"


def less_memory(config: RunConfig, phase: str) -> str:
    """The keys that lower the memory of a phase, those with the largest effect first, each only where it is not set already."""
    rollout, micro = config.rollout, config.actor.ppo_micro_batch_size_per_gpu
    drawn, engine = phase in ("rollout", "validation"), rollout.backend == "vllm_omni"
    pipeline = "rollout.val_kwargs.pipeline" if phase == "validation" else "rollout.pipeline"
    keys = {
        "model.enable_gradient_checkpointing=true": phase == "update"
        and not config.model.enable_gradient_checkpointing,
        f"actor.ppo_micro_batch_size_per_gpu={micro // 2} (and log_prob_micro_batch_size_per_gpu)": phase == "update"
        and micro > 1,
        f"rollout.vllm_omni.max_num_seqs={max(rollout.vllm_omni.max_num_seqs // 2, 1)}": drawn and engine,
        f"rollout.max_batch_size={rollout.max_batch_size // 2}": drawn and not engine and rollout.max_batch_size > 1,
        f"smaller {pipeline}.height and width": drawn,
        f"reward.batch_size={max(config.reward.batch_size // 2, 1)}": phase == "reward",
        "fewer reward.num_workers": phase == "reward",
        "actor.fsdp_config.model_dtype=bf16": config.actor.fsdp_config.model_dtype not in ("bf16", "bfloat16"),
        "rollout.dtype=bfloat16": config.shares_weights and rollout.dtype == "float32" and phase != "update",
        f"more GPUs (trainer.num_workers, now {config.trainer.num_workers})": True,
    }
    return "less memory: " + ", ".join(key for key, helps in keys.items() if helps)
