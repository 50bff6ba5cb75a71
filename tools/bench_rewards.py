"""Processor time per picture of the rewards that need no model files, on one core. Prints the table of MEASURED.md.

OMP_NUM_THREADS=1 python tools/bench_rewards.py
"""

from __future__ import annotations

import time

import numpy as np
from image_rewards import MissingExtraError, Reward, RewardSample, load
from PIL import Image, ImageDraw, ImageFont

SIZES = (64, 256, 512, 1024)
TARGET = {"count": 1, "color": "red", "shape": "circle", "background": "white", "text": "OPEN"}


def picture(size: int) -> np.ndarray:
    """A red disc and a word on a soft gradient, with a little noise: uint8 [3,size,size]."""
    ramp = np.linspace(225, 255, size).astype(np.uint8)
    image = Image.fromarray(np.broadcast_to(ramp[:, None, None], (size, size, 3)).copy())
    pen = ImageDraw.Draw(image)
    pen.ellipse([size * 0.35, size * 0.55, size * 0.6, size * 0.8], fill=(220, 40, 40))
    pen.text((size * 0.1, size * 0.1), "OPEN", fill=(20, 20, 20), font=ImageFont.load_default(max(12, size // 5)))
    noise = np.random.default_rng(0).integers(-3, 4, (size, size, 3))
    return np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8).transpose(2, 0, 1).copy()


def milliseconds(reward: Reward, sample: RewardSample, budget_s: float = 1.5) -> float:
    """Median processor time of one score: unlike wall time, it hardly moves with what else the machine does."""
    reward(sample)
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 300):
        start = time.process_time()
        result = reward(sample)
        times.append(time.process_time() - start)
        result.unwrap()
    return float(np.median(times)) * 1e3


def main() -> None:
    """Print the table."""
    print("| reward | " + " | ".join(f"{size} px" for size in SIZES) + " |")
    print("|---|" + "---:|" * len(SIZES))
    for name in ("shapes", "jpeg_compressibility", "sharpness", "ocr"):
        cells = []
        for size in SIZES:
            try:
                ms = milliseconds(load(name), RewardSample(picture(size), "", TARGET))
            except MissingExtraError as error:
                cells.append(str(error))
                break
            cells.append(f"{ms:.2f} ms ({1000 / ms:,.0f}/s)" if ms < 10 else f"{ms:.0f} ms ({1000 / ms:,.1f}/s)")
        print(f"| `{name}` | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
