"""CLIP and T5, as SD3 and FLUX.1 use them, and the VAE that SD3, FLUX.1 and Z-Image share.

CLIP reads 77 tokens at most; that is part of those architectures, whose T5 reads the whole prompt. A prompt that CLIP
cannot read to its end is logged with its token count; one that T5 cannot is an error.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from model_specs.common import split_batch, to_uint8
from model_specs.embeddings import check_length

logger = logging.getLogger(__name__)


def clip_output(tokenizer: Any, model: Any, prompt: str, *, must_fit: bool) -> Any:
    """CLIP's output with hidden states for one prompt, padded to its 77 tokens.

    Raises:
        PromptTooLongError: `must_fit` (no other encoder reads the prompt) and the prompt is longer.
    """
    limit = tokenizer.model_max_length
    count = len(tokenizer(prompt).input_ids)
    if must_fit:
        check_length(prompt, count, limit, "CLIP")
    elif count > limit:
        logger.warning("CLIP reads %d of the %d tokens of %r; the T5 encoder reads all of it.", limit, count, prompt)
    ids = tokenizer(prompt, padding="max_length", max_length=limit, truncation=True, return_tensors="pt").input_ids
    return model(ids.to(model.device), output_hidden_states=True)


def t5_hidden(tokenizer: Any, model: Any, prompt: str, length: int) -> Tensor:
    """T5's last hidden state [length, C] of one prompt. Padding is encoded and attended to, as in the stock pipelines.

    Raises:
        PromptTooLongError: more than `length` tokens, the closing one included.
    """
    check_length(prompt, len(tokenizer(prompt).input_ids), length, "T5")
    ids = tokenizer(prompt, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
    return model(ids.to(model.device))[0][0]


@torch.no_grad()
def decode_images(vae: Any, latents: Tensor, pixels_per_sample: int) -> Tensor:
    """Latents [B, C, h, w] through an `AutoencoderKL` to uint8 [B, 3, H, W]."""
    scale, shift = vae.config.scaling_factor, vae.config.shift_factor or 0.0
    dtype = next(vae.parameters()).dtype
    parts = split_batch(latents.float() / scale + shift, pixels_per_sample)
    return torch.cat([to_uint8(vae.decode(part.to(dtype), return_dict=False)[0]) for part in parts])


def kl_vae_factor(config: Any) -> int:
    """Pixels per latent cell of an `AutoencoderKL` with that config (8 for the published ones)."""
    return 2 ** (len(config.get("block_out_channels", (128, 256, 512, 512))) - 1)
