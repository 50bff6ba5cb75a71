"""What a failed step leaves behind, so that it can be looked at and run again."""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from tensordict import TensorDict

from ray_trainer.prompts import Prompt


def record_failure(
    root: Path, step: int, error: BaseException, batch: TensorDict | None, prompts: Sequence[Prompt] = ()
) -> Path:
    """Write the traceback, the step's prompts, and the batch as far as it had come, into `root/step_000012`.

    Returns:
        That folder: `error.txt`, `prompts.json`, and with a batch also `batch.safetensors` (tensors) and `batch.json` (the rest,
        a row per sample).
    """
    from safetensors.torch import save_file

    folder = root / f"step_{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "error.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    (folder / "prompts.json").write_text(json.dumps([asdict(prompt) for prompt in prompts], indent=1), encoding="utf-8")
    if batch is not None:
        tensors = {str(k): v.contiguous() for k, v in batch.items() if isinstance(v, torch.Tensor)}
        save_file(tensors, folder / "batch.safetensors")
        rest = {str(k): batch[k] for k in batch.keys() if k not in tensors}  # noqa: SIM118 - a TensorDict iterates over rows
        (folder / "batch.json").write_text(json.dumps(rest, default=repr, indent=1), encoding="utf-8")
    return folder
