"""The tensors of a batch that an update depends on: shape, type, who writes and who reads each; and the check of a batch.

What travels beside them (uid, index, counters, sampler settings) is not listed.

Shapes: B sample, K denoise step, W window step, S token, C H W T as usual; `…` stands for the latent's own dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict

from .errors import TrainingFailed


@dataclass(frozen=True)
class Key:
    """One tensor of a batch. `shape` is symbolic; a letter stands for one size throughout the batch. dtype None is any float."""

    name: str
    shape: str
    dtype: torch.dtype | None
    writer: str
    readers: str


KEYS: tuple[Key, ...] = (
    Key("responses", "B …", torch.uint8, "rollout", "reward, gallery"),
    Key("rm_scores", "B 1", torch.float32, "reward", "advantages, pairs, metrics"),
    Key("latents", "B W …", torch.float32, "rollout", "policy-gradient engine"),
    Key("next_latents", "B W …", torch.float32, "rollout", "policy-gradient engine"),
    Key("step_index", "B W", torch.int64, "rollout", "policy-gradient engine"),
    Key("sigmas", "B K", torch.float32, "rollout", "both engines"),
    Key("std", "B W", torch.float32, "rollout", "policy-gradient losses"),
    Key("rollout_log_probs", "B W", torch.float32, "rollout", "parity metric, correction"),
    Key("means", "B W …", torch.float32, "rollout, where the loss reads old means", "policy-gradient losses"),
    Key("final_latents", "B …", torch.float32, "rollout", "forward-process engine"),
    # In the type that the text encoder computed them in, `rollout.dtype`: rounded once, and the same on both sides.
    Key("prompt_embeds", "B S C", None, "rollout", "both engines"),
    Key("prompt_embeds_mask", "B S", torch.bool, "rollout", "both engines"),
    Key("old_log_probs", "B W", torch.float32, "trainer or rollout", "policy-gradient losses"),
    Key("old_means", "B W …", torch.float32, "trainer", "GRPO-Guard, Flow-DPPO"),
    Key("ref_means", "B W …", torch.float32, "trainer, adapters off", "KL"),
    Key("advantages", "B 1", torch.float32, "driver", "losses"),
)
_BY_NAME = {key.name: key for key in KEYS}

TRAJECTORY = ("latents", "next_latents", "step_index", "std", "rollout_log_probs")
"""Keys with one entry for each step of the window."""


def check(batch: TensorDict, names: tuple[str, ...], after: str) -> None:
    """Raise unless `batch` holds the named tensors in the shape and type that the table gives.

    A stored trajectory must be fp32: a bf16 latent moves a log-prob by up to 0.15, thousands of clip ranges.

    Raises:
        TrainingFailed: names the key, what was found and what the table says.
    """
    sizes: dict[str, int] = {"B": batch.batch_size[0]}
    for name in names:
        key = _BY_NAME[name]
        value = batch.get(name, None)
        if value is None:
            raise TrainingFailed(
                f"after {after} the batch lacks {name!r} [{key.shape}], which {key.writer} should have written"
            )
        if value.dtype != key.dtype if key.dtype is not None else not value.is_floating_point():
            raise TrainingFailed(
                f"after {after}, {name!r} is {value.dtype}, but {key.readers} need {key.dtype or 'a floating-point type'}"
            )
        letters = key.shape.split()
        wanted = [letter for letter in letters if letter != "…"]
        fits = value.ndim == len(wanted) or (letters[-1] == "…" and value.ndim >= len(wanted))
        for letter, size in zip(wanted, value.shape, strict=False):
            fits &= size == (int(letter) if letter.isdigit() else sizes.setdefault(letter, size))
        if not fits:
            raise TrainingFailed(
                f"after {after}, {name!r} has shape {tuple(value.shape)}, expected [{key.shape}] with {sizes}"
            )
