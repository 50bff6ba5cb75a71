"""Every architecture computes what its stock diffusers pipeline computes: at each step, and in the final pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_specs import get_spec, get_spec_for
from model_specs.common import whole_timestep_of

PROMPTS = ["three red circles on a black background", "one green square"]
NEGATIVES = ["a bad picture", "blurry, dark and with much noise in all of it"]
STEPS = 4
SHIPPED = Path(__file__).parents[2] / "ray-trainer" / "src" / "ray_trainer" / "assets" / "tiny_qwen_image"

# name of the tiny pipeline, arguments of velocity, arguments of the stock pipeline
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen_image", {}, {"true_cfg_scale": 1.0}),
    ("qwen_image", {"true_cfg_scale": 4.0}, {"true_cfg_scale": 4.0}),
    ("sd3", {}, {"guidance_scale": 1.0}),
    ("sd3", {"true_cfg_scale": 4.5}, {"guidance_scale": 4.5}),
    ("sd35", {"true_cfg_scale": 4.5}, {"guidance_scale": 4.5}),
    ("flux", {"guidance_scale": 3.5}, {"guidance_scale": 3.5}),
    ("flux", {"guidance_scale": 3.5, "true_cfg_scale": 2.0}, {"guidance_scale": 3.5, "true_cfg_scale": 2.0}),
    ("flux_schnell", {}, {"guidance_scale": 0.0}),
    ("z_image", {}, {"guidance_scale": 0.0}),
    ("z_image", {"true_cfg_scale": 6.0}, {"guidance_scale": 5.0}),
    ("wan", {}, {"guidance_scale": 1.0}),
    ("wan", {"true_cfg_scale": (4.0, 3.0)}, {"guidance_scale": 4.0, "guidance_scale_2": 3.0}),
    ("wan_unipc", {"true_cfg_scale": (4.0, 3.0)}, {"guidance_scale": 4.0, "guidance_scale_2": 3.0}),
    ("wan_5b", {"true_cfg_scale": 5.0}, {"guidance_scale": 5.0}),
]


def run(loaded: Any, ours: dict[str, Any], theirs: dict[str, Any], height: int, width: int, frames: int) -> None:
    size = {"height": height, "width": width}
    is_video = loaded.spec.name == "wan"
    extra = {"num_frames": frames} if is_video else {}
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(PROMPTS), *loaded.spec.latent_shape(**size, num_frames=frames), generator=generator)
    picture = loaded.record(
        prompt=list(PROMPTS),
        negative_prompt=list(NEGATIVES),
        num_inference_steps=STEPS,
        latents=noise,
        max_sequence_length=64,
        **size,
        **extra,
        **theirs,
    )
    assert len(loaded.steps) == STEPS

    cond, negative = loaded.encoder.encode(PROMPTS, 64), loaded.encoder.encode(NEGATIVES, 64)
    options = loaded.spec.schedule_kwargs(loaded.scheduler, STEPS, height, width, frames)
    if options.get("sigmas") is None:
        loaded.scheduler.set_timesteps(STEPS, **options)
    else:
        loaded.scheduler.set_timesteps(**options)
    sigmas = loaded.scheduler.sigmas
    assert torch.equal(loaded.steps[0].latents, noise)
    for i, step in enumerate(loaded.steps):
        assert sigmas[i] == step.sigma
        with torch.no_grad():
            velocity = loaded.velocity(
                loaded.transformer,
                step.latents,
                sigmas[i].expand(len(noise)),
                cond,
                negative=negative,
                num_frames=frames,
                **size,
                **ours,
            )
        assert velocity.dtype == torch.float32
        assert velocity.std() > 0.05  # the network says something
        torch.testing.assert_close(velocity, step.velocity, rtol=0, atol=3e-5)
        if not loaded.multistep:
            stepped = step.latents + (sigmas[i + 1] - sigmas[i]) * velocity
            torch.testing.assert_close(stepped, step.next_latents, rtol=0, atol=3e-5)

    pixels = loaded.spec.decode(loaded.vae, loaded.steps[-1].next_latents, num_frames=frames, **size)
    expected = torch.from_numpy((picture * 255).round().astype(np.uint8)).movedim(-1, -3)
    if is_video and frames == 1:
        expected = expected[:, 0]
    assert pixels.dtype == torch.uint8
    assert pixels.shape == expected.shape
    assert pixels.float().std() > 20
    apart = (pixels.int() - expected.int()).abs()
    # 2-D convolutions, or a smaller batch, add in another order: a value between two levels can round otherwise.
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < (2e-4 if loaded.spec.vae_class == "AutoencoderKL" else 2e-3)


@pytest.mark.parametrize(("name", "ours", "theirs"), CASES, ids=[f"{c[0]}-{'-'.join(c[1]) or 'plain'}" for c in CASES])
def test_equals_stock_pipeline(
    load: Callable[[str | Path], Any], name: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    run(load(name), ours, theirs, 64, 96, 5 if name.startswith("wan") else 1)


@pytest.mark.parametrize(("name", "ours", "theirs"), CASES)
def test_guidance_by_the_stock_name(name: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    spec = get_spec({"sd35": "sd3", "flux_schnell": "flux"}.get(name, name.removesuffix("_unipc").removesuffix("_5b")))
    asked = spec.stock_guidance(SimpleNamespace(**{"true_cfg_scale": 1.0, "guidance_scale": None} | ours))
    pair = theirs.get("guidance_scale", 0.0), theirs.get("guidance_scale_2")
    assert (asked if isinstance(asked, tuple) else (asked or 0.0, None)) == pair


def test_wan_makes_single_frames(load: Callable[[str | Path], Any]) -> None:
    run(load("wan"), {}, {"guidance_scale": 1.0}, 64, 64, 1)


def test_wan_asks_at_the_times_of_the_published_scheduler(load: Callable[[str | Path], Any], tiny_folder: Any) -> None:
    """The schedule's first entry is exactly 1, where the stock one is just below: both mean timestep 999."""
    published, plain = load("wan_unipc"), get_spec_for(tiny_folder("wan"))
    assert (published.spec.whole_timesteps, plain.whole_timesteps) == (True, False)
    for steps in (3, 10, 50):
        published.scheduler.set_timesteps(steps)
        sigmas = published.scheduler.sigmas[:-1].clone()
        assert torch.equal(whole_timestep_of(sigmas), published.scheduler.timesteps.float())
        assert sigmas[0] < 1.0
        sigmas[0] = 1.0
        assert torch.equal(whole_timestep_of(sigmas), published.scheduler.timesteps.float())
        assert float(whole_timestep_of(sigmas)[0]) == 999.0


@pytest.mark.skipif(not SHIPPED.is_dir(), reason="the shipped tiny policy is not beside this package")
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_shipped_policy_equals_stock_pipeline(load: Callable[[str | Path], Any], scale: float) -> None:
    run(load(SHIPPED), {"true_cfg_scale": scale}, {"true_cfg_scale": scale}, 64, 64, 1)


@pytest.mark.parametrize(
    ("name", "frames"),
    [("sd3", 1), ("flux", 1), ("z_image", 1), ("qwen_image", 1), ("wan", 1), ("wan", 5), ("wan_5b", 5)],
)
def test_pictures_are_encoded_as_the_stock_pipelines_encode_them(
    load: Callable[[str | Path], Any], monkeypatch: pytest.MonkeyPatch, name: str, frames: int
) -> None:
    import diffusers
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    loaded = load(name)
    video = loaded.spec.vae_class != "AutoencoderKL"
    pixels = torch.randint(0, 256, (2, frames, 3, 64, 96), generator=torch.Generator().manual_seed(0)).byte()
    ours = loaded.spec.encode(loaded.vae, pixels if frames > 1 else pixels[:, 0])
    assert ours.dtype == torch.float32
    assert ours.shape[1:] == loaded.spec.latent_shape(64, 96, frames)
    # They draw from the posterior where we take its mode.
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    stock = diffusers.QwenImageImg2ImgPipeline if video else diffusers.FluxImg2ImgPipeline
    given = (pixels.float() / 127.5 - 1).transpose(1, 2)
    with torch.no_grad():
        theirs = stock._encode_vae_image(SimpleNamespace(vae=loaded.vae), given if video else given[:, :, 0], None)
    if loaded.spec.packed:
        theirs = diffusers.FluxImg2ImgPipeline._pack_latents(theirs, 2, theirs.shape[1], 8, 12)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.skipif(not SHIPPED.is_dir(), reason="the shipped tiny policy is not beside this package")
def test_the_shipped_autoencoder_takes_back_what_it_drew(load: Callable[[str | Path], Any]) -> None:
    loaded = load(SHIPPED)
    loaded.record(prompt=PROMPTS, num_inference_steps=10, height=64, width=64, true_cfg_scale=1.0)
    drawn = loaded.spec.decode(loaded.vae, loaded.steps[-1].next_latents, height=64, width=64)
    again = loaded.spec.decode(loaded.vae, loaded.spec.encode(loaded.vae, drawn), height=64, width=64)
    assert (drawn.float() - again.float()).abs().mean() < 6
