"""The tool that draws pairs for offline training: every picture is in one pair at most, and the better one is chosen."""

import importlib.util
import json
from pathlib import Path

import numpy as np
from image_rewards import RewardSample, load
from PIL import Image

TOOL = Path(__file__).resolve().parents[3] / "tools" / "make_pairs.py"


def test_no_picture_is_in_two_pairs_and_the_better_one_is_chosen(tmp_path):
    spec = importlib.util.spec_from_file_location("make_pairs_of_a_test", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    out = tmp_path / "pairs"
    given = ["--limit", "2", "--samples", "5", "--rounds", "2", "--steps", "2", "--reward", "sharpness", "--good", "0"]
    assert tool.main([str(out), *given]) == 0
    pairs, best = ([json.loads(row) for row in (out / f"{name}.jsonl").open()] for name in ("pairs", "best"))
    names = [row[field] for row in pairs for field in ("chosen", "rejected")]
    assert len(pairs) == 2 * 2 * 2  # of five pictures two pairs, and sharpness has no ties
    assert len(set(names)) == len(names) == len(list(out.glob("*.png")))
    reward = load("sharpness")

    def score(name):
        return reward(RewardSample(np.asarray(Image.open(out / name)).transpose(2, 0, 1))).unwrap()

    assert all(score(row["chosen"]) > score(row["rejected"]) for row in pairs)
    assert [row["image"] for row in best] == [row["chosen"] for row in pairs[::2]]
