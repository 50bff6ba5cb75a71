"""The command: options, the order of the work, the record of it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import autoencoder, transformer
from .evaluate import draw_with_pipeline, judge, show
from .shapes import CAPTIONS, caption, draw
from .text_side import build_encoder, build_tokenizer, encode_captions


@dataclass(frozen=True)
class Sizes:
    """How much is drawn and how large batches are: what a GPU takes easily, or a smoke test of the pieces on a CPU."""

    vae_pictures: int
    vae_batch: int
    latents: int
    transformer_batch: int
    evaluation_batch: int
    reconstructions: int


SIZES = {"cuda": Sizes(65_536, 256, 262_144, 512, 384, 288), "cpu": Sizes(288, 8, 288, 16, 96, 48)}


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="make_tiny_model", description="Train a tiny Qwen-Image pipeline on captioned shapes, or measure one."
    )
    what = options.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="make a pipeline and write it here")
    what.add_argument("--evaluate", type=Path, metavar="DIR", help="only measure this pipeline folder")
    options.add_argument("--seconds-vae", type=float, default=110.0, help="training time of the autoencoder (110)")
    options.add_argument(
        "--seconds-transformer", type=float, default=270.0, help="training time of the transformer (270)"
    )
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--prompts", type=Path, metavar="JSONL", help="measure these prompts instead of all 144")
    options.add_argument("--seeds", type=int, default=8, help="pictures per prompt when measuring (8)")
    options.add_argument("--steps", type=int, default=10, help="sampler steps when measuring (10)")
    options.add_argument("--log", type=Path, metavar="JSON", help="write what was done and measured here")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parser().parse_args(arguments)
    start = time.monotonic()
    if options.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    log: dict[str, Any] = {"device": name, "torch": torch.__version__, "seed": options.seed}
    print(f"device {name}, torch {torch.__version__}", flush=True)
    if options.out is not None:
        make(options.out, options.seed, options.device, options.seconds_vae, options.seconds_transformer, log)
    folder = options.out or options.evaluate
    captions = _captions(options.prompts) if options.prompts else list(range(CAPTIONS))
    batch = SIZES[options.device].evaluation_batch
    pictures = draw_with_pipeline(folder, captions, options.seeds, options.steps, options.device, batch)
    summary = judge(pictures, captions, options.seeds)
    log["accuracy"] = {key: {"mean": mean, "stderr": error} for key, (mean, error) in summary.items()}
    log["accuracy"]["prompts"], log["accuracy"]["seeds"], log["accuracy"]["steps"] = (
        len(captions),
        options.seeds,
        options.steps,
    )
    log["seconds"] = time.monotonic() - start
    print(f"{len(captions)} prompts × {options.seeds} seeds, {options.steps} steps\n{show(summary)}", flush=True)
    if options.log is not None:
        options.log.parent.mkdir(parents=True, exist_ok=True)
        options.log.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    return 0


def make(folder: Path, seed: int, device: str, vae_s: float, transformer_s: float, log: dict[str, Any]) -> None:
    """Train both networks and write the pipeline folder; what was measured on the way goes into `log`."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline

    sizes = SIZES[device]
    tokenizer = build_tokenizer()
    encoder = build_encoder(tokenizer, seed)
    embeds = encode_captions(tokenizer, encoder).to(device)
    torch.manual_seed(seed)
    vae = autoencoder.build().to(device)
    log["autoencoder"] = asdict(autoencoder.fit(vae, vae_s, sizes.vae_pictures, sizes.vae_batch))
    log["reconstruction"] = reconstruction(vae, sizes.reconstructions)
    print(f"reconstructions: strict {log['reconstruction']['strict']:.3f}", flush=True)

    model = transformer.build().to(device)
    latents, captions, right = transformer.make_latents(vae, sizes.latents)
    print(f"{len(latents)} latents, std {latents.std().item():.3f}, {right:.3f} of the captions right", flush=True)
    kept, record = transformer.fit(model, latents, captions, embeds, transformer_s, sizes.transformer_batch)
    log["transformer"], log["captions_right"] = asdict(record), right

    pipeline: Any = QwenImagePipeline(
        FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=False),
        vae.cpu().half(),
        encoder,
        tokenizer,
        kept.cpu().half(),
    )
    pipeline.save_pretrained(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    log["megabytes"] = size / 1e6
    print(f"wrote {folder} ({size / 1e6:.2f} MB)", flush=True)


def reconstruction(vae: Any, count: int) -> dict[str, float]:
    """What the reward says of `count` decoded pictures, judged by what was drawn: the most that a transformer could reach."""
    device = next(vae.parameters()).device
    ids = torch.arange(count) * max(1, CAPTIONS // count) % CAPTIONS
    latents = torch.cat([autoencoder.encode(vae, draw(part.to(device))) for part in ids.split(96)])
    decoded = torch.cat([autoencoder.decode(vae, part) for part in latents.split(96)])
    pictures = ((decoded + 1) * 127.5).round().clamp(0, 255).byte().cpu().numpy()
    return {name: mean for name, (mean, _) in judge(pictures, ids.tolist(), 1).items()}


def _captions(path: Path) -> list[int]:
    """Caption ids of a prompt file with a JSON object per line."""
    numbers = {caption(number): number for number in range(CAPTIONS)}
    prompts = [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    unknown = [prompt for prompt in prompts if prompt not in numbers]
    if unknown:
        raise SystemExit(f"{path}: {unknown[0]!r} is not one of the {CAPTIONS} captions this model knows")
    return [numbers[prompt] for prompt in prompts]
