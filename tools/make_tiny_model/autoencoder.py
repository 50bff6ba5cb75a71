"""The small `AutoencoderKLQwenImage`: 64 × 64 pictures to latents of 16 channels, 8 × 8.

Loss: L1 + MSE + 3e-4 · KL to a standard normal, with Gaussian noise of 0.1 on the latents before decoding, so that the small
errors of a sampler do not show. Latents: [B, 16, 8, 8]; packed for the transformer: [B, 16 tokens, 64].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .loop import Recipe, TrainingLog, reached, train
from .shapes import CAPTIONS, draw

CHANNELS, LATENT = 16, 8
LATENT_NOISE, KL_WEIGHT = 0.1, 3e-4
RECIPE = Recipe(learning_rate=3e-3, betas=(0.9, 0.98), weight_decay=0.0, warmup=200)


def build() -> Any:
    """1.5 M parameters; residual and attention branches start at zero, which trains faster at this rate."""
    from diffusers import AutoencoderKLQwenImage
    from diffusers.models.autoencoders import autoencoder_kl_qwenimage as blocks
    from model_specs.single_frame import single_frame_convolutions

    vae: Any = AutoencoderKLQwenImage(
        base_dim=12,
        z_dim=CHANNELS,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * CHANNELS,
        latents_std=[1.0] * CHANNELS,
    )
    for module in vae.modules():
        if isinstance(module, blocks.QwenImageResidualBlock):
            _zero(module.conv2)
        elif isinstance(module, blocks.QwenImageAttentionBlock):
            _zero(module.proj)
    return single_frame_convolutions(vae)


def fit(vae: Any, seconds: float, pictures: int, batch: int) -> TrainingLog:
    """Train in place on so many drawn pictures, then put the mean and std of the latents into the config."""
    device = next(vae.parameters()).device
    ids = torch.arange(pictures, device=device) % CAPTIONS
    images = torch.cat([draw(part) for part in ids.split(2048)]).unsqueeze(2)  # [N, 3, 1, H, W]

    def losses() -> Tensor:
        x = images[torch.randint(0, len(images), (batch,), device=device)]
        posterior = vae.encode(x).latent_dist
        z = posterior.sample()
        decoded = vae.decode(z + LATENT_NOISE * torch.randn_like(z)).sample
        l1, mse = F.l1_loss(decoded, x), F.mse_loss(decoded, x)
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        return torch.stack([l1 + mse + KL_WEIGHT * kl, l1, mse, kl])

    log = train("autoencoder", reached(vae.parameters(), losses), losses, RECIPE, seconds)
    with torch.no_grad():
        sample = torch.cat([vae.encode(part).latent_dist.sample()[:, :, 0] for part in images[:4096].split(256)])
    vae.register_to_config(
        latents_mean=[round(value, 5) for value in sample.mean((0, 2, 3)).tolist()],
        latents_std=[round(value, 5) for value in sample.std((0, 2, 3)).tolist()],
    )
    vae.half().float()  # the weights are stored in half precision: from here on, work with what will be stored
    return log


@torch.no_grad()
def encode(vae: Any, images: Tensor) -> Tensor:
    """Packed, normalised latents [B, 16, 64] of pictures [B, 3, 64, 64], sampled from the posterior."""
    z = vae.encode(images.unsqueeze(2)).latent_dist.sample()[:, :, 0]
    return pack((z - _stat(vae.config.latents_mean, z)) / _stat(vae.config.latents_std, z))


@torch.no_grad()
def decode(vae: Any, packed: Tensor) -> Tensor:
    """Pictures [B, 3, 64, 64] in [-1, 1] of packed, normalised latents."""
    z = unpack(packed)
    z = z * _stat(vae.config.latents_std, z) + _stat(vae.config.latents_mean, z)
    return vae.decode(z.unsqueeze(2)).sample[:, :, 0].clamp(-1, 1)


def pack(z: Tensor) -> Tensor:
    """[B, C, H, W] → [B, H/2 · W/2, 4 C]: the pipeline's layout, a token for each 2 × 2 patch."""
    B, C, H, W = z.shape
    return z.view(B, C, H // 2, 2, W // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(B, H * W // 4, 4 * C)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack` for 8 × 8 latents."""
    half = LATENT // 2
    z = packed.view(len(packed), half, half, CHANNELS, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return z.reshape(len(packed), CHANNELS, LATENT, LATENT)


def _stat(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device).view(1, -1, 1, 1)


def _zero(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
