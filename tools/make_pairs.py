"""Let a policy draw, score what it drew, and write pairs (or the best pictures) that offline DPO (or SFT) trains on.

    uv run python tools/make_pairs.py pairs --rounds 6
    uv run apps/dpo-online recipe=offline_dpo data.train_file=pairs/pairs.jsonl
    uv run apps/dpo-online recipe=sft data.train_file=pairs/best.jsonl

`pairs.jsonl` has, of every prompt and round, the best picture with the worst, the second best with the second worst and so on, as
long as their scores differ: no picture is in two pairs. `best.jsonl` has the best one where its score is at least `--good`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from image_rewards import RewardSample, load
from omni_rollout import DiffusersBackend, GenerationRequest
from PIL import Image
from ray_trainer.assets import resolve
from ray_trainer.prompts import load_prompts
from sde_samplers import SamplerSettings


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--model", default="builtin:tiny_qwen_image", help="folder of a pipeline")
    parser.add_argument("--prompts", default="builtin:tiny_shapes_train", help="prompt file")
    parser.add_argument("--limit", type=int, default=None, help="only the first so many prompts")
    parser.add_argument("--reward", default="shapes", help="any of image_rewards")
    parser.add_argument(
        "--samples", type=int, default=8, help="pictures of a prompt and round, which make at most half as many pairs"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--size", type=int, default=64, help="pixels, both ways")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--good", type=float, default=1.0, help="least score of what best.jsonl names")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    given.out.mkdir(parents=True)
    backend = DiffusersBackend.from_pretrained(str(resolve("models", given.model)), max_batch_size=48)
    reward, prompts = load(given.reward), load_prompts(given.prompts)[: given.limit]
    settings = SamplerSettings(given.size, given.size, num_inference_steps=given.steps)
    pairs: list[dict[str, Any]] = []
    best: list[dict[str, Any]] = []
    for turn in range(given.rounds):
        requests = [
            GenerationRequest(
                f"{turn}/{prompt.uid}/{i}", f"{turn}/{prompt.uid}", i, prompt.text, given.seed, settings,
                metadata=prompt.metadata, return_trajectory=False,
            )
            for prompt in prompts
            for i in range(given.samples)
        ]  # fmt: skip
        drawn = backend.generate(requests)["responses"].numpy()
        scores = [
            result.unwrap()
            for result in reward.score(
                [RewardSample(p, r.prompt, r.metadata, r.uid, r.index) for p, r in zip(drawn, requests, strict=True)]
            )
        ]
        for first in range(0, len(requests), given.samples):  # of each prompt
            row = {"prompt": requests[first].prompt, "metadata": requests[first].metadata}
            order = sorted(range(first, first + given.samples), key=lambda i: -scores[i])
            for place, winner in enumerate(order[: given.samples // 2]):
                loser = order[-1 - place]
                if scores[winner] == scores[loser]:
                    break
                names = [_write(given.out, requests[i].request_id, drawn[i]) for i in (winner, loser)]
                pairs.append({**row, "chosen": names[0], "rejected": names[1]})
                if not place and scores[winner] >= given.good:
                    best.append({**row, "image": names[0]})
        print(f"round {turn + 1}: mean score {sum(scores) / len(scores):.3f}, {len(pairs)} pairs so far", flush=True)
    for name, rows in (("pairs", pairs), ("best", best)):
        (given.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


def _write(folder: Path, name: str, picture: Any) -> str:
    file = f"{name.replace('/', '_')}.png"
    Image.fromarray(picture.transpose(1, 2, 0)).save(folder / file)
    return file


if __name__ == "__main__":
    raise SystemExit(main())
