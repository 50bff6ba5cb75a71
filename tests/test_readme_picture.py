"""tools/readme_picture.py: what is right has a green frame; two validations are needed."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from run_report import ReportError, save_validation

GREEN = (24, 154, 82)
before_after_png = runpy.run_path(str(Path(__file__).parent.parent / "tools" / "readme_picture.py"))["before_after_png"]


def validation(run, step, right):
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 16, 16), dtype=np.uint8)
    verdicts = [float(number // 2 < right) for number in range(6)]
    records = [
        {"prompt": f"p{i // 2}", "seed": i % 2, "uid": f"line{i // 2}", "reward": v, "components": {"strict": v}}
        for i, v in enumerate(verdicts)
    ]
    save_validation(run, step, images, records)


def test_the_picture_frames_what_is_right(tmp_path):
    validation(tmp_path, 0, 1)
    with pytest.raises(ReportError, match="1 validation"):
        before_after_png(tmp_path, tmp_path / "picture.png")
    validation(tmp_path, 10, 3)
    with Image.open(before_after_png(tmp_path, tmp_path / "docs" / "picture.png")) as image:
        content = np.asarray(image.convert("RGB")).astype(int)
    green = (np.abs(content - GREEN).sum(-1) < 12).sum(0)
    half = content.shape[1] // 2 + 40
    assert 0 < green[:half].sum() < green[half:].sum()
