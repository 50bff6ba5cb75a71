"""Jagged prompt embeddings: there and back, and masks that would lose tokens are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_diffusers_engine import EngineError, embeds_padding_2_no_padding
from fsdp_diffusers_engine.padding import narrow_jagged, pad_jagged
from tensordict import TensorDict


def batch(mask: list[list[int]] | None) -> Any:
    data = TensorDict({"prompt_embeds": torch.arange(24.0).view(2, 4, 3)}, batch_size=[2])
    if mask is not None:
        data["prompt_embeds_mask"] = torch.tensor(mask)
    return data


def test_there_and_back() -> None:
    data = batch([[1, 1, 0, 0], [1, 1, 1, 0]])
    whole = data["prompt_embeds"].clone()
    jagged = embeds_padding_2_no_padding(data)
    assert jagged["prompt_embeds"].is_nested
    assert [len(row) for row in jagged["prompt_embeds"].unbind()] == [2, 3]
    assert [row.tolist() for row in jagged["prompt_embeds_mask"].unbind()] == [[True] * 2, [True] * 3]
    assert embeds_padding_2_no_padding(jagged) is jagged  # a second time changes nothing
    row, mask = pad_jagged(narrow_jagged(jagged["prompt_embeds"], 1, 2))
    assert torch.equal(row[0], whole[1, :3])
    assert mask.all()
    padded, mask = pad_jagged(jagged["prompt_embeds"])
    assert mask.tolist() == [[True, True, False], [True, True, True]]
    assert torch.equal(padded[1], whole[1, :3])
    assert torch.equal(padded[0], torch.cat([whole[0, :2], torch.zeros(1, 3)]))


def test_without_a_mask_every_token_stays() -> None:
    jagged = embeds_padding_2_no_padding(batch(None))
    assert [len(row) for row in jagged["prompt_embeds"].unbind()] == [4, 4]
    assert "prompt_embeds_mask" not in jagged.keys()


def test_gradients_pass_through() -> None:
    data = batch([[1, 1, 0, 0], [1, 1, 1, 0]])
    leaf = data["prompt_embeds"].clone().requires_grad_(True)
    data["prompt_embeds"] = leaf
    padded, _ = pad_jagged(embeds_padding_2_no_padding(data)["prompt_embeds"])
    padded.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.sum(dim=(1, 2)).tolist() == [6.0, 9.0]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([[0, 1, 1, 0], [1, 1, 1, 1]], "row 0 is not left-aligned"),
        ([[1, 1, 1, 1], [1, 0, 1, 0]], "row 1 is not left-aligned"),
        ([[1, 0, 0, 0], [0, 0, 0, 0]], "row 1 has no valid token"),
        ([[1, 1, 1], [1, 1, 1]], "expected"),
    ],
)
def test_masks_that_would_lose_tokens_are_refused(mask: list[list[int]], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        embeds_padding_2_no_padding(batch(mask))
