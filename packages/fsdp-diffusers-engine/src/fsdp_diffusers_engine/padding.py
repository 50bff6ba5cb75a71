"""Prompt embeddings without padding: jagged nested tensors, and back.

A batch padded to its longest prompt spends memory and bandwidth on zeros. Between processes the embeddings travel as
jagged tensors; a micro-batch pads again to its own longest prompt. Nothing is ever cropped: masks must be left-aligned
(`1…10…0`), anything else is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import EngineError

if TYPE_CHECKING:
    from tensordict import TensorDict

_PREFIXES = ("", "negative_")


def lengths_of(mask: Tensor, key: str) -> list[int]:
    """Valid tokens per row of a mask [B, S].

    Raises:
        EngineError: a mask that is not left-aligned, or has an empty row, which is named.
    """
    valid = mask.bool()
    lengths = valid.sum(dim=1)
    aligned = torch.arange(valid.shape[1], device=valid.device) < lengths[:, None]
    wrong = (aligned != valid).any(dim=1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise EngineError(
            f"{key!r} row {row} is not left-aligned ({valid[row].int().tolist()}); valid tokens must come first and "
            f"padding last, reorder the embeddings with their mask"
        )
    if bool((lengths == 0).any()):
        raise EngineError(f"{key!r} row {int((lengths == 0).nonzero()[0])} has no valid token; encode an empty prompt")
    return lengths.tolist()


def to_jagged(embeds: Tensor, mask: Tensor | None, key: str = "prompt_embeds_mask") -> Tensor:
    """[B, S, C] with its mask [B, S] → jagged [B, s_b, C]; without a mask every row keeps its S tokens."""
    if embeds.ndim != 3 or (mask is not None and mask.shape != embeds.shape[:2]):
        shape = None if mask is None else tuple(mask.shape)
        raise EngineError(
            f"{key!r} is {shape} and its embeddings are {tuple(embeds.shape)}; expected [B, S] and [B, S, C]"
        )
    rows = [embeds.shape[1]] * embeds.shape[0] if mask is None else lengths_of(mask, key)
    return torch.nested.nested_tensor_from_jagged(
        torch.cat([embeds[i, :length] for i, length in enumerate(rows)]), lengths_to_offsets(rows, embeds.device)
    )


def lengths_to_offsets(lengths: list[int], device: torch.device) -> Tensor:
    """[B] lengths → [B + 1] offsets, as jagged tensors keep them."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor(lengths).cumsum(0)
    return offsets.to(device)


def _offsets(jagged: Any) -> Tensor:
    offsets: Tensor = jagged.offsets()
    return offsets


def longest(jagged: Tensor) -> int:
    """Tokens of the longest row."""
    return int(_offsets(jagged).diff().max())


def pad_jagged(embeds: Tensor) -> tuple[Tensor, Tensor]:
    """Jagged [B, s_b, C] → ([B, S, C] padded with zeros to the longest, mask [B, S] bool)."""
    values, offsets = embeds.values(), _offsets(embeds)
    lengths = offsets.diff()
    width = longest(embeds)
    mask = torch.arange(width, device=values.device) < lengths[:, None]
    padded = values.new_zeros(len(lengths), width, values.shape[-1])
    padded[mask] = values
    return padded, mask


def narrow_jagged(embeds: Tensor, start: int, stop: int) -> Tensor:
    """Rows `start:stop` of a jagged tensor."""
    offsets = _offsets(embeds)
    first, last = int(offsets[start]), int(offsets[stop])
    return torch.nested.nested_tensor_from_jagged(embeds.values()[first:last], offsets[start : stop + 1] - first)


def embeds_padding_2_no_padding(data: TensorDict) -> TensorDict:
    """Replace padded `prompt_embeds` and `negative_prompt_embeds` [B, S, C] by jagged tensors, and masks likewise.

    A missing mask leaves all S tokens of a row. Embeddings that are jagged already, or absent, are left as they are.
    Returns `data`, changed in place. Raises `EngineError` for a mask that is not left-aligned.
    """
    for prefix in _PREFIXES:
        key, mask_key = f"{prefix}prompt_embeds", f"{prefix}prompt_embeds_mask"
        if key not in data.keys() or data[key].is_nested:
            continue
        mask = data[mask_key] if mask_key in data.keys() and isinstance(data[mask_key], Tensor) else None
        data[key] = to_jagged(data[key], mask, mask_key)
        if mask is not None:
            values = torch.ones(data[key].values().shape[0], dtype=torch.bool, device=mask.device)
            data[mask_key] = torch.nested.nested_tensor_from_jagged(values, _offsets(data[key]))
    return data
