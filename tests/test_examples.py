"""The reading road runs: one update on the tiny policy, with the packages alone."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_one_step_makes_better_samples_likelier(capsys):
    said = runpy.run_path(str(ROOT / "examples" / "one_step.py"))["main"](prompts_per_step=3, group=8)
    assert said["largest |log ratio|, step 0"] == said["largest |log ratio|, step 1"] == 0  # one process, one shape
    assert said["gradient norm"] > 0
    assert said["advantage x log ratio"] > 0
    assert said["latents moved by"] > 0.01
    assert 0 <= said["reward before"] <= 1
    assert "reward after" in capsys.readouterr().out


def test_the_reading_road_stays_short():
    source = (ROOT / "examples" / "one_step.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 150
    assert "import ray\n" not in source
