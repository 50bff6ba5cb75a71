"""Reading rewards and group ids.

A group is the set of samples that share an id (a `uid`, never the prompt's text: two prompts with equal text are two
groups). Ids may come in any order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import LossError

GroupIds = Sequence[Any] | Tensor


def read_rewards(name: str, rewards: Tensor | Sequence[float]) -> Tensor:
    """Rewards as a detached float64 tensor, [B]."""
    tensor = rewards if isinstance(rewards, Tensor) else torch.as_tensor(rewards, dtype=torch.float64)
    if tensor.ndim != 1 or tensor.shape[0] == 0:
        raise LossError(f"{name} has shape {tuple(tensor.shape)}; give one reward per sample, [B] with B >= 1")
    return tensor.detach().double()


def result_dtype(rewards: Tensor | Sequence[float]) -> torch.dtype:
    """float64 in, float64 out; everything else becomes float32."""
    is_double = isinstance(rewards, Tensor) and rewards.dtype == torch.float64
    return torch.float64 if is_double else torch.float32


def read_groups(groups: GroupIds | None, size: int) -> dict[Hashable, list[int]]:
    """Rows of each group, in order of first appearance. Raises `LossError` for a missing id or a wrong length."""
    if (
        groups is None
        or isinstance(groups, (str, bytes))
        or not (hasattr(groups, "tolist") or isinstance(groups, Iterable))
    ):
        raise LossError(f"groups={groups!r} is missing or not a sequence; give one id per sample, {size} of them")
    ids = list(groups.tolist() if hasattr(groups, "tolist") else groups)
    if len(ids) != size:
        raise LossError(f"groups has {len(ids)} ids for {size} rewards; give exactly one id per sample")
    rows: dict[Hashable, list[int]] = {}
    for row, name in enumerate(ids):
        if name is None or (isinstance(name, float) and math.isnan(name)) or not isinstance(name, Hashable):
            raise LossError(f"groups[{row}]={name!r} is not an id; every sample needs a hashable id such as its uid")
        rows.setdefault(name, []).append(row)
    return rows


def metric(value: float) -> Tensor:
    """A 0-dim fp32 tensor, the type of every metric in this package."""
    return torch.tensor(float(value), dtype=torch.float32)
