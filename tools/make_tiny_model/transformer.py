"""The small `QwenImageTransformer2DModel`, trained with flow matching on latents with noisy captions.

x_t = (1 - t) x_0 + t · noise; the network predicts the velocity noise - x_0. Times are uniform for 30 % of a batch and
logit-normal (0, 1.2) for the rest. The weights that are kept are an exponential moving average.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import autoencoder
from .loop import Recipe, TrainingLog, reached, train
from .shapes import CAPTIONS, add_caption_noise, draw
from .text_side import WIDTH

GRID = [[(1, autoencoder.LATENT // 2, autoencoder.LATENT // 2)]]  # frames, rows and columns of tokens
EMA_DECAY, EMA_START = 0.999, 0.05  # the average starts when this share of the time is over
RECIPE = Recipe(learning_rate=1.5e-3, betas=(0.9, 0.99), weight_decay=0.01, warmup=300)


def build() -> Any:
    """4 layers, 4 heads of 32, 2.5 M parameters; modulation and output start at zero, so the first velocity is zero."""
    from diffusers import QwenImageTransformer2DModel

    model: Any = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * autoencoder.CHANNELS,
        out_channels=autoencoder.CHANNELS,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(8, 12, 12),
    )
    silent = [layer for block in model.transformer_blocks for layer in (block.img_mod[1], block.txt_mod[1])]
    for layer in (*silent, model.norm_out.linear, model.proj_out):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return model


def velocity(model: Any, x: Tensor, t: Tensor, embeds: Tensor) -> Tensor:
    """Predicted noise - x_0 [B, 16, 64] at times t [B]."""
    return model(
        hidden_states=x,
        timestep=t,
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=None,
        img_shapes=GRID * len(x),
        return_dict=False,
    )[0]


def make_latents(vae: Any, count: int) -> tuple[Tensor, Tensor, float]:
    """Latents [N, 16, 64] of fresh pictures, noisy caption ids [N], and the share of captions that stayed right."""
    device = next(vae.parameters()).device
    ids = torch.randint(0, CAPTIONS, (count,), device=device)
    latents = torch.cat([autoencoder.encode(vae, draw(part)) for part in ids.split(1024)])
    noisy = add_caption_noise(ids)
    return latents, noisy, (noisy == ids).float().mean().item()


def fit(
    model: Any, latents: Tensor, captions: Tensor, embeds: Tensor, seconds: float, batch: int
) -> tuple[Any, TrainingLog]:
    """Train `model`; returns the averaged copy, which is the one to keep. `embeds`: [144, S, 64] by caption id."""
    device = latents.device
    average = copy.deepcopy(model).requires_grad_(False)
    _freeze_rotary(model, embeds, batch)

    def losses() -> Tensor:
        pick = torch.randint(0, len(latents), (batch,), device=device)
        x0, condition = latents[pick], embeds[captions[pick]]
        noise = torch.randn_like(x0)
        uniform, normal = torch.rand(batch, device=device), torch.sigmoid(1.2 * torch.randn(batch, device=device))
        t = torch.where(torch.rand(batch, device=device) < 0.3, uniform, normal).clamp(1e-3, 1.0)
        x_t = torch.lerp(x0, noise, t[:, None, None])
        return F.mse_loss(velocity(model, x_t, t, condition), noise - x0).view(1)

    source, target = list(model.parameters()), list(average.parameters())

    @torch.no_grad()
    def follow() -> None:
        torch._foreach_lerp_(target, source, 1 - EMA_DECAY)

    @torch.no_grad()
    def restart() -> None:
        torch._foreach_copy_(target, source)

    trained = reached(model.parameters(), losses)
    log = train("transformer", trained, losses, RECIPE, seconds, follow, {EMA_START: restart})
    return average, log


def _freeze_rotary(model: Any, embeds: Tensor, batch: int) -> None:
    """Compute the rotary table once: it is the same in each step, and making it is host work that no graph can hold."""
    table = model.pos_embed(GRID * batch, max_txt_seq_len=embeds.shape[1], device=embeds.device)
    model.pos_embed.forward = lambda *_args, **_kwargs: table
