"""Checkpoints: what the next step depends on, sharded, complete or absent, loadable by another number of ranks.

A folder holds `weights/*.safetensors` (every rank writes its own shards through `torch.distributed.checkpoint`),
`rng/` (one file per rank), `engine.json` (counters, schedule, what is inside) and, when asked for, `lora/` or
`hf_model/` that other tools load. It is written beside its place and renamed when everything is on disk. There is no
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
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from .config import CheckpointConfig, Content
from .errors import CheckpointError, EngineError, nearest
from .sharding import Layout

_FORMAT = 1
_RECORD = "engine.json"
_CONTENTS = get_args(Content)


def check_config(config: CheckpointConfig) -> None:
    """Refuse unknown contents before anything is trained."""
    for entry in config.save_contents:
        if entry not in _CONTENTS:
            near = nearest(entry, _CONTENTS, 1)
            raise EngineError(f"save_contents has {entry!r}; use some of {_CONTENTS} (nearest: {near})")


@contextmanager
def writing(path: Path, layout: Layout) -> Iterator[Path]:
    """A folder to write a checkpoint into, which takes the place of `path` once every rank has written its part.

    An older checkpoint there is replaced only then. A collective.
    """
    first = layout.rank == 0
    temporary = path.with_name(f".{path.name}.writing")
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "rng").mkdir(parents=True)
    _barrier(layout)
    yield temporary
    _barrier(layout)
    if first:
        path.parent.mkdir(parents=True, exist_ok=True)
        retired = path.with_name(f".{path.name}.replaced")
        shutil.rmtree(retired, ignore_errors=True)
        if path.exists():
            path.rename(retired)
        temporary.rename(path)
        shutil.rmtree(retired, ignore_errors=True)
    _barrier(layout)


def write_tensors(folder: Path, tensors: dict[str, Tensor], layout: Layout) -> None:
    """Every rank writes its own shards; of whole copies the first rank's."""
    if not tensors or (layout.rank and not layout.sharded):
        return
    from torch.distributed.checkpoint import save as save_shards
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(folder / "weights"), save_distributed=True)
    with _quiet():
        save_shards(tensors, storage_writer=writer, no_dist=not layout.sharded)


def read_tensors(path: Path, tensors: dict[str, Tensor], layout: Layout) -> None:
    """Overwrite the named tensors with what `path` holds; CheckpointError where names or shapes differ."""
    if not tensors:
        return
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
        load_shards(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not layout.sharded)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns that a process without a group saves alone, which is what is meant. What fails in it, such as a full disk,
    comes in an exception that no `except Exception` sees: the first cause is raised instead."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise cause if isinstance(cause, Exception) else CheckpointError(repr(cause)) from None


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """What is inside, as JSON."""
    (folder / _RECORD).write_text(json.dumps({"format": _FORMAT, **record}, indent=1))


def read_record(path: Path) -> dict[str, Any]:
    """The counterpart of `write_record`; CheckpointError where there is none of this format."""
    file = path / _RECORD
    if not file.is_file():
        near = sorted(p.name for p in path.parent.iterdir() if (p / _RECORD).is_file()) if path.parent.is_dir() else []
        raise CheckpointError(
            f"{str(path)!r} is no checkpoint of this engine (it has no {_RECORD})"
            + (f"; there are {near[-5:]} beside it" if near else "; none lies beside it either")
        )
    try:
        record: dict[str, Any] = dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{str(file)!r} is damaged ({error}); load another checkpoint") from error
    if record.get("format") != _FORMAT:
        raise CheckpointError(f"{str(path)!r} has format {record.get('format')!r}, this version reads {_FORMAT}")
    return record


def check_fit(path: Path, record: Mapping[str, Any], architecture: str, lora: dict[str, int]) -> None:
    """Refuse a checkpoint of another model or LoRA, or without all that the next step depends on."""
    if missing := {"model", "optimizer", "extra"} - set(record["contents"]):
        raise CheckpointError(
            f"{str(path)!r} holds {record['contents']} and lacks {sorted(missing)}; save them too (save_contents), or load another "
            "checkpoint"
        )
    if record["architecture"] != architecture:
        raise CheckpointError(
            f"{str(path)!r} is of a {record['architecture']}, the engine has a {architecture}; "
            f"load it with the model it was trained from"
        )
    if record["lora"] != lora:
        raise CheckpointError(
            f"{str(path)!r} was saved with LoRA {record['lora']}, the config has {lora}; make them equal"
        )


def save_rng(file: Path, device: torch.device) -> None:
    """Keep this rank's generators."""
    from safetensors.torch import save_file

    version, numbers, gauss = random.getstate()
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    save_file(states, str(file), metadata={"python": json.dumps([version, list(numbers), gauss])})


def load_rng(file: Path, device: torch.device) -> None:
    """Restore this rank's generators; a rank that was not there when saving keeps its own."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return
    try:
        with safe_open(str(file), framework="pt") as stored:
            version, numbers, gauss = json.loads(stored.metadata()["python"])
            torch.set_rng_state(stored.get_tensor("torch"))
            if device.type == "cuda" and "cuda" in stored.keys():
                torch.cuda.set_rng_state(stored.get_tensor("cuda"), device)
        random.setstate((version, tuple(numbers), gauss))
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"{str(file)!r} is damaged ({error}); load another checkpoint") from error


def _barrier(layout: Layout) -> None:
    if layout.world_size > 1:
        dist.barrier()
