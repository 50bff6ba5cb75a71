"""Checkpoints: what the next step depends on, sharded, complete or absent, loadable by another number of ranks.

A folder holds ``weights/*.safetensors`` (every rank writes its own shards through ``torch.distributed.checkpoint``),
``rng/`` (one file per rank), ``engine.json`` (counters, schedule, what is inside) and, when asked for, ``lora/`` or
``hf_model/`` that other tools load. It is written beside its place and renamed when everything is on disk. There is no
pickle in it: safetensors and JSON only.
"""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import weights
from .config import CheckpointConfig
from .errors import CheckpointError, EngineError, nearest

if TYPE_CHECKING:
    from .engine import DiffusersFSDPEngine

_FORMAT = 1
_RECORD = "engine.json"
_CONTENTS = ("model", "optimizer", "extra", "lora", "hf_model")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def check_config(config: CheckpointConfig) -> None:
    """Refuse unknown contents before anything is trained."""
    for field in ("save_contents", "load_contents"):
        for entry in getattr(config, field):
            if entry not in _CONTENTS:
                raise EngineError(
                    f"{field} has {entry!r}; use some of {_CONTENTS} (nearest: {nearest(entry, _CONTENTS, 1)})"
                )
    if config.max_ckpt_to_keep is not None and config.max_ckpt_to_keep < 1:
        raise EngineError(f"max_ckpt_to_keep={config.max_ckpt_to_keep!r} must be at least 1, or null to keep all")


def save(engine: DiffusersFSDPEngine, path: Path, global_step: int, keep: int | None) -> Path:
    """Write ``path``; an older checkpoint there is replaced only once the new one is complete."""
    contents = set(engine.checkpoint_config.save_contents)
    first = engine.layout.rank == 0
    temporary = path.with_name(f".{path.name}.writing")
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "rng").mkdir(parents=True)
    _barrier(engine)
    tensors = _tensors(engine, contents, create=False)
    if tensors:
        from torch.distributed.checkpoint import save as save_shards
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

        writer = HuggingFaceStorageWriter(str(temporary / "weights"), save_distributed=True)
        with _quiet():
            save_shards(tensors, storage_writer=writer, no_dist=not engine.layout.sharded)
    if "extra" in contents:
        _save_rng(temporary / "rng" / f"rank{engine.layout.rank}.safetensors", engine.device)
    if "lora" in contents and engine.lora:
        weights.export_lora(engine, temporary / "lora")
    if "hf_model" in contents:
        weights.export_transformer(engine, temporary / "hf_model")
    if first:
        (temporary / _RECORD).write_text(json.dumps(_record(engine, global_step, contents, tensors), indent=1))
    _barrier(engine)
    if first:
        path.parent.mkdir(parents=True, exist_ok=True)
        retired = path.with_name(f".{path.name}.replaced")
        shutil.rmtree(retired, ignore_errors=True)
        if path.exists():
            path.rename(retired)
        temporary.rename(path)
        shutil.rmtree(retired, ignore_errors=True)
        _prune(path, engine.checkpoint_config.max_ckpt_to_keep if keep is None else keep)
    _barrier(engine)
    return path


def load(engine: DiffusersFSDPEngine, path: Path) -> int:
    """Restore ``path`` into ``engine``; returns the ``global_step`` it was saved with."""
    record = _read_record(path)
    wanted = set(engine.checkpoint_config.load_contents) & {"model", "optimizer", "extra"}
    missing = wanted - set(record["contents"])
    if missing:
        raise CheckpointError(
            f"{str(path)!r} holds {record['contents']}, and load_contents asks for {sorted(missing)} too; "
            f"take them out of load_contents or load another checkpoint"
        )
    _check_fit(engine, path, record)
    tensors = _tensors(engine, wanted, create=True)
    if tensors:
        _load_tensors(engine, path, tensors)
    if "optimizer" in wanted:
        _set_steps(engine, record["optimizer"])
    if "extra" in wanted:
        engine.optimizer_steps, engine.skipped_steps = record["optimizer_steps"], record["skipped_steps"]
        engine.lr_scheduler.set_step(record["scheduler_step"])
        _load_rng(path / "rng" / f"rank{engine.layout.rank}.safetensors", engine.device)
    return int(record["global_step"])


def _tensors(engine: DiffusersFSDPEngine, contents: set[str], *, create: bool) -> dict[str, Tensor]:
    """Everything that is kept, by name in the files: live tensors, which saving reads and loading writes in place."""
    found: dict[str, Tensor] = {}
    if "model" in contents:
        found |= {f"model.{name}": p.detach() for name, p in engine.trainable.items()}
        if engine.states is not None:
            for state, copies in engine.states.copies.items():
                found |= {f"state.{state}.{name}": copy for name, copy in copies.items()}
        elif engine.lora:
            for name, p in engine.module.named_parameters():  # those of the other policies too
                if ".lora_A." in name or ".lora_B." in name:
                    found.setdefault(f"model.{name}", p.detach())
    if "optimizer" in contents:
        for name, parameter in engine.trainable.items():
            state = engine.optimizer.state[parameter] if create else engine.optimizer.state.get(parameter, {})
            for moment in _MOMENTS:
                if create and moment not in state:
                    state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                if moment in state:
                    found[f"optimizer.{name}.{moment}"] = state[moment].detach()
    return found


def _load_tensors(engine: DiffusersFSDPEngine, path: Path, tensors: dict[str, Tensor]) -> None:
    from torch.distributed.checkpoint import load as load_shards
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    folder = path / "weights"
    try:
        stored = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:
        raise CheckpointError(
            f"{str(folder)!r} cannot be read ({error}); the checkpoint is damaged, load another"
        ) from error
    # A parameter that has not been stepped yet (an expert outside the window) has no moments: those stay zero.
    expected = {name for name in tensors if name in stored or not name.startswith("optimizer.")}
    absent = sorted(expected - set(stored))
    if absent:
        raise CheckpointError(
            f"{str(path)!r} has no {absent[0]!r} ({len(absent)} tensors missing; nearest {nearest(absent[0], stored, 2)}); "
            f"it was saved with other policy states or targets, use the config of that run"
        )
    surplus = sorted(n for n in stored if n.startswith(("model.", "state.")) and n not in tensors)
    if surplus and any(name.startswith("model.") for name in tensors):
        raise CheckpointError(
            f"{str(path)!r} holds {surplus[0]!r}, which this engine lacks ({len(surplus)} tensors in all): they would be lost; "
            f"use the target_modules and policy_state_adapters of the run that saved it"
        )
    for name in expected:
        size = tuple(stored[name].size)  # type: ignore[union-attr]
        if size != tuple(tensors[name].shape):
            raise CheckpointError(
                f"{name!r} is {list(size)} in {str(path)!r} and {list(tensors[name].shape)} here; "
                f"use the lora_rank and the model of the run that saved it"
            )
    wanted = {name: tensors[name] for name in sorted(expected)}
    with _quiet():
        load_shards(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not engine.layout.sharded)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that a process without a group saves alone, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _record(
    engine: DiffusersFSDPEngine, global_step: int, contents: set[str], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    steps = {
        name: float(engine.optimizer.state[p]["step"])
        for name, p in engine.trainable.items()
        if "step" in engine.optimizer.state.get(p, {})
    }
    return {
        "format": _FORMAT,
        "global_step": global_step,
        "contents": sorted(contents),
        "world_size": engine.layout.world_size,
        "architecture": engine.spec.transformer_class,
        "lora": {"rank": engine.model_config.lora_rank, "alpha": engine.model_config.lora_alpha},
        "optimizer_steps": engine.optimizer_steps,
        "skipped_steps": engine.skipped_steps,
        "scheduler_step": engine.lr_scheduler.last_epoch,
        "optimizer": steps,
        "tensors": len(tensors),
    }


def _read_record(path: Path) -> dict[str, Any]:
    file = path / _RECORD
    if not file.is_file():
        near = sorted(p.name for p in path.parent.iterdir() if (p / _RECORD).is_file()) if path.parent.is_dir() else []
        raise CheckpointError(
            f"{str(path)!r} is no checkpoint of this engine (it has no {_RECORD})"
            + (f"; there are {near[-5:]} beside it" if near else "; none lies beside it either")
        )
    record: dict[str, Any] = json.loads(file.read_text())
    if record.get("format") != _FORMAT:
        raise CheckpointError(f"{str(path)!r} has format {record.get('format')!r}, this version reads {_FORMAT}")
    return record


def _check_fit(engine: DiffusersFSDPEngine, path: Path, record: Mapping[str, Any]) -> None:
    here = {"rank": engine.model_config.lora_rank, "alpha": engine.model_config.lora_alpha}
    if record["architecture"] != engine.spec.transformer_class:
        raise CheckpointError(
            f"{str(path)!r} is of a {record['architecture']}, the engine has a {engine.spec.transformer_class}; "
            f"load it with the model it was trained from"
        )
    if record["lora"] != here:
        raise CheckpointError(
            f"{str(path)!r} was saved with LoRA {record['lora']}, the config has {here}; make them equal"
        )


def _set_steps(engine: DiffusersFSDPEngine, steps: Mapping[str, float]) -> None:
    fused = bool(engine.optimizer.defaults.get("fused"))
    for name, parameter in engine.trainable.items():
        if name in steps:
            device = parameter.device if fused else torch.device("cpu")
            engine.optimizer.state[parameter]["step"] = torch.tensor(steps[name], dtype=torch.float32, device=device)
        else:
            engine.optimizer.state.pop(parameter, None)


def _save_rng(file: Path, device: torch.device) -> None:
    from safetensors.torch import save_file

    version, numbers, gauss = random.getstate()
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    save_file(states, str(file), metadata={"python": json.dumps([version, list(numbers), gauss])})


def _load_rng(file: Path, device: torch.device) -> None:
    """Restore this rank's generators; a rank that was not there when saving keeps its own."""
    from safetensors import safe_open

    if not file.is_file():
        return
    with safe_open(str(file), framework="pt") as stored:
        torch.set_rng_state(stored.get_tensor("torch"))
        if device.type == "cuda" and "cuda" in stored.keys():  # noqa: SIM118
            torch.cuda.set_rng_state(stored.get_tensor("cuda"), device)
        version, numbers, gauss = json.loads(stored.metadata()["python"])
    random.setstate((version, tuple(numbers), gauss))


def _prune(path: Path, keep: int | None) -> None:
    """Delete the oldest finished checkpoints beside ``path``; nothing that this engine did not write."""
    if keep is None:
        return
    found = []
    for folder in path.parent.iterdir():
        if (folder / _RECORD).is_file() and not folder.name.startswith("."):
            found.append((json.loads((folder / _RECORD).read_text())["global_step"], folder.stat().st_mtime_ns, folder))
    for _, _, folder in sorted(found)[:-keep]:
        if folder != path:
            shutil.rmtree(folder)


def _barrier(engine: DiffusersFSDPEngine) -> None:
    if engine.layout.sharded and engine.layout.world_size > 1:
        dist.barrier()
