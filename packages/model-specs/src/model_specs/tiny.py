"""Tiny random pipelines of every architecture, for anyone's tests.

`build("flux", folder)` writes a folder that stock diffusers loads with `from_pretrained`: real classes, random weights
from a seed, a megabyte or two, no network. Their pictures are noise with structure, not pictures of anything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch

from . import tiny_text as text
from .errors import SpecError

WIDTH = 64


def names() -> list[str]:
    """What `build` can make: an architecture's short name, or a variant of it ("sd35", "wan_5b", "wan_unipc", "flux_schnell")."""
    return sorted(_BUILDERS)


def build(name: str, folder: str | Path, *, seed: int = 0) -> Path:
    """Write the tiny pipeline `name` into `folder` (made if missing) and return it.

    The random state of the caller is left as it was.

    Raises:
        SpecError: no such name.
    """
    if name not in _BUILDERS:
        raise SpecError(f"There is no tiny pipeline {name!r}. Known: {', '.join(names())}.")
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _BUILDERS[name]()
        _liven(pipeline)
    pipeline.save_pretrained(folder)
    return folder


@torch.no_grad()
def _liven(pipeline: Any) -> None:
    """Give weight to what starts at or near zero, so that a test on these networks can tell right from wrong."""
    for part in ("transformer", "transformer_2"):
        network = getattr(pipeline, part, None)
        if network is None:
            continue
        for name, parameter in network.named_parameters():
            if name.endswith("pad_token"):
                parameter.normal_()
            elif name.rsplit(".", 1)[-1] == "bias":
                parameter.normal_(std=0.1)
    last = pipeline.vae.decoder.conv_out
    last.weight.mul_(3.0)  # pixels from black to white, not grey


_flow_match = diffusers.FlowMatchEulerDiscreteScheduler


def _kl_vae() -> Any:
    """The 16-channel VAE of SD3, FLUX.1 and Z-Image."""
    return diffusers.AutoencoderKL(
        sample_size=32,
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )


def _qwen_image() -> Any:
    from .qwen_image import TEMPLATE, TEMPLATE_TOKENS

    tokenizer = text.qwen_tokenizer([TEMPLATE])
    prefix = len(tokenizer(TEMPLATE.split("{}")[0]).input_ids)
    assert prefix == TEMPLATE_TOKENS, prefix  # the stock pipeline drops that many
    return diffusers.QwenImagePipeline(
        scheduler=_flow_match(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=diffusers.AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1),
        text_encoder=text.qwen2_5_vl(tokenizer, WIDTH),
        tokenizer=tokenizer,
        transformer=diffusers.QwenImageTransformer2DModel(
            num_layers=2,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(8, 12, 12),
        ),
    )


def _sd3(**options: Any) -> Any:
    clip, t5 = text.clip_tokenizer(), text.t5_tokenizer()
    return diffusers.StableDiffusion3Pipeline(
        scheduler=_flow_match(shift=3.0),
        vae=_kl_vae(),
        text_encoder=text.clip_encoder(clip, WIDTH // 2, projection=True),
        tokenizer=clip,
        text_encoder_2=text.clip_encoder(clip, WIDTH // 2, projection=True),
        tokenizer_2=clip,
        text_encoder_3=text.t5_encoder(t5, 2 * WIDTH),
        tokenizer_3=t5,
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=32,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=2 * WIDTH,
            caption_projection_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            pos_embed_max_size=32,
            **options,
        ),
    )


def _flux(guidance: bool = True) -> Any:
    clip, t5 = text.clip_tokenizer(), text.t5_tokenizer()
    return diffusers.FluxPipeline(
        scheduler=_flow_match(use_dynamic_shifting=guidance, shift=3.0 if guidance else 1.0),
        vae=_kl_vae(),
        text_encoder=text.clip_encoder(clip, WIDTH // 2, projection=False),
        tokenizer=clip,
        text_encoder_2=text.t5_encoder(t5, WIDTH),
        tokenizer_2=t5,
        transformer=diffusers.FluxTransformer2DModel(
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH // 2,
            guidance_embeds=guidance,
            axes_dims_rope=(4, 6, 6),
        ),
    )


def _z_image() -> Any:
    tokenizer = text.qwen_tokenizer([text.CHAT_TEMPLATE, "user\n", "assistant\n", "system\n"])
    return diffusers.ZImagePipeline(
        scheduler=_flow_match(shift=3.0),
        vae=_kl_vae(),
        text_encoder=text.qwen3(tokenizer, WIDTH),
        tokenizer=tokenizer,
        transformer=diffusers.ZImageTransformer2DModel(
            dim=WIDTH,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=4,
            n_kv_heads=4,
            cap_feat_dim=WIDTH,
            axes_dims=[4, 6, 6],
            axes_lens=[1100, 64, 64],
        ),
    )


def _wan_transformer(channels: int) -> Any:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=channels,
        out_channels=channels,
        text_dim=WIDTH,
        freq_dim=64,
        ffn_dim=96,
        num_layers=2,
    )


def _wan(scheduler: Any = None) -> Any:
    tokenizer = text.t5_tokenizer()
    return diffusers.WanPipeline(
        scheduler=scheduler or _flow_match(shift=5.0),
        vae=diffusers.AutoencoderKLWan(base_dim=8, num_res_blocks=1),
        text_encoder=text.t5_encoder(tokenizer, WIDTH, umt5=True),
        tokenizer=tokenizer,
        transformer=_wan_transformer(16),
        transformer_2=_wan_transformer(16),
        boundary_ratio=0.875,
    )


def _wan_5b() -> Any:
    tokenizer = text.t5_tokenizer()
    vae = diffusers.AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=48,
        num_res_blocks=1,
        latents_mean=[0.02 * (i % 7 - 3) for i in range(48)],
        latents_std=[0.5 + 0.02 * (i % 5) for i in range(48)],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    return diffusers.WanPipeline(
        scheduler=_flow_match(shift=5.0),
        vae=vae,
        text_encoder=text.t5_encoder(tokenizer, WIDTH, umt5=True),
        tokenizer=tokenizer,
        transformer=_wan_transformer(48),
        expand_timesteps=True,
    )


_BUILDERS: dict[str, Callable[[], Any]] = {
    "flux": _flux,
    "flux_schnell": lambda: _flux(guidance=False),
    "qwen_image": _qwen_image,
    "sd3": _sd3,
    "sd35": lambda: _sd3(dual_attention_layers=(0,), qk_norm="rms_norm"),
    "wan": _wan,
    "wan_5b": _wan_5b,
    "wan_unipc": lambda: _wan(  # with the scheduler that the published folders name
        diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    ),
    "z_image": _z_image,
}
