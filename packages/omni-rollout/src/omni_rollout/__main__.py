"""`python -m omni_rollout bench --model FOLDER --backend diffusers|vllm_omni`."""

from __future__ import annotations

import argparse
import json
import sys

from sde_samplers.settings import SamplerSettings

from .errors import RolloutError


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 with a message for an error of this package."""
    parser = argparse.ArgumentParser(prog="python -m omni_rollout", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    bench = commands.add_parser("bench", help="pictures per second, batch histogram, time per phase")
    bench.add_argument("--model", required=True, help="diffusers pipeline folder")
    bench.add_argument("--backend", choices=("diffusers", "vllm_omni"), default="diffusers")
    for name, value in (("samples", 96), ("group", 16), ("batch", 64), ("rounds", 3)):
        bench.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("height", 64), ("width", 64), ("steps", 6), ("frames", 1), ("max-tokens", 512)):
        bench.add_argument(f"--{name}", type=int, default=value)
    bench.add_argument("--cfg", type=float, default=1.0, help="true classifier-free guidance; 1 is off")
    bench.add_argument("--guidance", type=float, default=None, help="embedded guidance of distilled models")
    bench.add_argument("--dtype", default="float32")
    bench.add_argument("--device", default="cpu")
    bench.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    from .bench import as_text
    from .bench import bench as run

    try:
        result = run(
            args.model,
            args.backend,
            samples=args.samples,
            group=args.group,
            batch=args.batch,
            rounds=args.rounds,
            dtype=args.dtype,
            device=args.device,
            settings=SamplerSettings(
                height=args.height,
                width=args.width,
                num_frames=args.frames,
                num_inference_steps=args.steps,
                max_sequence_length=args.max_tokens,
                true_cfg_scale=args.cfg,
                guidance_scale=args.guidance,
                kind="flow_sde",
                noise_level=0.7,
                window=tuple(range(min(2, args.steps - 1))),
            ),
        )
    except RolloutError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result) if args.json else as_text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
