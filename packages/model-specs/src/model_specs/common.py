"""Small arithmetic that several architectures share: dtypes, sigma grids, packing, decoding in pieces. Imports without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .errors import PromptTooLongError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


def compute_dtype(transformer: nn.Module) -> torch.dtype:
    """Dtype in which the base weights compute.

    Adapters (often fp32 beside a bf16 base) and what the architecture keeps in fp32 on purpose do not count. Under
    FSDP2 it is the mixed-precision policy's `param_dtype`, if set: shards may be fp32 while the forward is bf16. Use
    that policy with `cast_forward_inputs=False`: timesteps and rotary angles would not survive a cast to bf16.
    """
    import torch

    sharded = getattr(transformer, "_get_fsdp_state", None)
    if sharded is not None and sharded()._mp_policy.param_dtype is not None:
        return sharded()._mp_policy.param_dtype
    kept = tuple(getattr(transformer, "_keep_in_fp32_modules", None) or ())
    for name, parameter in transformer.named_parameters():
        if parameter.is_floating_point() and "lora_" not in name and not any(part in name for part in kept):
            return parameter.dtype
    return torch.float32


def config_of(module: nn.Module) -> Any:
    """The diffusers config of a network, also through the wrappers of FSDP2, DDP and `torch.compile`."""
    inner = getattr(module, "module", module)
    return inner.config


def dynamic_shift(scheduler: Any, tokens: int) -> float:
    """The `mu` of resolution-dependent shifting: linear in the number of image tokens between two anchor points.

    Defaults are those of the FLUX and Qwen-Image pipelines in diffusers 0.40 (256 tokens: 0.5, 4096 tokens: 1.15).
    """
    config = scheduler.config
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, top = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (top - base) / (high - low)
    return tokens * slope + (base - slope * low)


def linear_sigmas(num_steps: int) -> list[float]:
    """1, ..., 1/K: the grid before shifting that the Qwen-Image and FLUX pipelines hand to their scheduler."""
    if num_steps == 1:
        return [1.0]
    last = 1.0 / num_steps
    step = (last - 1.0) / (num_steps - 1)
    return [1.0 + i * step for i in range(num_steps - 1)] + [last]


def timestep_of(sigma: Tensor) -> Tensor:
    """sigma [B] on the schedulers' scale 0..1000, in fp32: the number that the stock pipelines go by."""
    return sigma.float() * 1000.0


def whole_timestep_of(sigma: Tensor) -> Tensor:
    """The same cut to a whole number, as diffusers' multistep solvers hand it over; they move sigma = 1 down by 1e-6."""
    return (sigma.double().clamp(max=1.0 - 1e-6) * 1000.0).floor().float()


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] to [B, H/2 * W/2, 4C]: every 2x2 patch becomes one token."""
    B, C, H, W = latents.shape
    return latents.view(B, C, H // 2, 2, W // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, H * W // 4, C * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack`; height and width of the latent."""
    B, _, C = tokens.shape
    x = tokens.view(B, height // 2, width // 2, C // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(B, C // 4, height, width)


def to_uint8(image: Tensor) -> Tensor:
    """[-1, 1] to 0..255 with the rounding of diffusers' `output_type="pil"`.

    Clamped in the given dtype, then scaled and rounded half to even in fp32. Any shape.
    """
    return image.mul(0.5).add_(0.5).clamp_(0, 1).float().mul_(255).round_().byte()


def split_batch(latents: Tensor, pixels_per_sample: int) -> Sequence[Tensor]:
    """Cut a batch for decoding, so that memory stays flat: by 4 million pixels, on a CPU by what its caches like."""
    budget = 128 * 1024 if latents.device.type == "cpu" else 4 * 1024 * 1024
    return latents.split(max(1, budget // max(1, pixels_per_sample)))


def with_statistics(vae: Any, latents: Tensor) -> Tensor:
    """Latents [B, C, T, H, W] in the autoencoder's dtype, each channel with the mean and deviation that its config says."""
    z, config = latents.to(vae.dtype), config_of(vae)
    mean, std = (z.new_tensor(one).view(1, -1, 1, 1, 1) for one in (config.latents_mean, config.latents_std))
    return z / (1.0 / std) + mean


def without_statistics(vae: Any, latents: Tensor) -> Tensor:
    """The inverse of `with_statistics`."""
    config = config_of(vae)
    mean, std = (latents.new_tensor(one).view(1, -1, 1, 1, 1) for one in (config.latents_mean, config.latents_std))
    return (latents - mean) * (1.0 / std)


def check_length(prompt: str, count: int, max_sequence_length: int, tokenizer: str = "") -> None:
    """Raise PromptTooLongError when `count` tokens do not fit; the message names the prompt and both numbers."""
    if count > max_sequence_length:
        which = f" by the {tokenizer} tokenizer" if tokenizer else ""
        raise PromptTooLongError(
            f"The prompt {prompt!r} has {count} tokens{which}, max_sequence_length is {max_sequence_length}: shorten "
            "it or raise max_sequence_length (prompts are never cropped here)."
        )
