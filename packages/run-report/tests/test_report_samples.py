"""The samples that a report picks, the videos that play in it, its faults, and what differs from the recipe."""

import math

import numpy as np
import pytest
from run_report import MetricsWriter, load_validations, save_validation, write_report
from run_report.faults import record
from run_report.highlights import advantages, highlights

REWARDS = {0: [0.1, 0.2, 0.3], 1: [1.0, 1.0, 1.0], 2: [0.5, math.nan, 0.9], 3: [0.0, 0.4, 0.4]}


def save(run, step, rewards, frames=None):
    rows = [(prompt, seed, value) for prompt, values in rewards.items() for seed, value in enumerate(values)]
    shape = (len(rows), 3, 8, 8) if frames is None else (len(rows), frames, 3, 8, 8)
    images = np.random.default_rng(step).integers(0, 256, shape, dtype=np.uint8)
    records = [
        {"prompt": f"prompt {p}", "seed": s, "uid": f"u{p}", "reward": v, "components": {"part": v}} for p, s, v in rows
    ]
    save_validation(run, step, images, records)


def test_best_worst_and_most_changed_are_one_sample_of_a_prompt_each(tmp_path):
    save(tmp_path, 0, {p: [0.4] * 3 for p in REWARDS})
    save(tmp_path, 5, REWARDS)
    first, last = load_validations(tmp_path)
    best, worst, changed = highlights(first, last)
    assert [(x.record.row, x.record.reward) for x in best.looks] == [(1, 1.0), (2, 0.9), (3, 0.4), (0, 0.3)]
    assert [(x.record.row, x.record.reward) for x in worst.looks] == [(3, 0.0), (0, 0.1), (2, 0.5), (1, 1.0)]
    assert [(x.record.row, x.record.reward) for x in changed.looks] == [(1, 1.0), (2, 0.9), (3, 0.0), (0, 0.1)]
    assert all(x.before.reward == 0.4 for x in changed.looks)
    assert [len(row) for row in changed.strips.rows] == [2] * 4
    found = advantages(last)
    assert found[1, 0] == 0.0  # a prompt whose samples are equal
    assert found[0, 2] == pytest.approx(0.1 / (0.1 + 1e-4))
    assert found[2, 2] == pytest.approx(0.2 / (np.std([0.5, 0.9], ddof=1) + 1e-4))
    page = write_report(tmp_path).read_text()
    assert "<span>reward 0.400 → 1.000</span> · <span>advantage +0.00</span>" in page


def test_videos_play_in_the_page(tmp_path):
    pytest.importorskip("av")
    save(tmp_path, 0, REWARDS, frames=5)
    (validation,) = load_validations(tmp_path)
    film = validation.video(validation.records[0])
    assert film.name == "0000.mp4"
    assert film.read_bytes()[4:8] == b"ftyp"
    page = write_report(tmp_path).read_text()
    assert page.count("data:video/mp4;base64,") == 8  # best and worst of four prompts


def test_faults_are_counted_and_failures_named(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.append(
                step,
                {"sync/tensors_bound": 96, "reward/failed": float(step == 2), "actor/skipped_steps": float(step > 3)},
            )
    failure = tmp_path / "failures" / "step_000006"
    failure.mkdir(parents=True)
    (failure / "error.txt").write_text("Traceback\nValueError: <script>alert(1)</script>\n")
    from run_report import read_metrics

    found = record(tmp_path, read_metrics(tmp_path))
    assert (found.syncs, found.bound) == (5, (96, 96))
    assert {(f.what, f.total, f.last_step) for f in found.faults} == {
        ("rewards that failed", 1, 2),
        ("optimizer steps left out for a gradient that was not finite", 2, 5),
    }
    page = write_report(tmp_path, [("actor.optim.lr", 1e-3, 5e-4)]).read_text()
    assert "Step 6 failed" in page
    assert "<script>alert" not in page
    assert "Other than the recipe" in page
    assert "actor.optim.lr" in page


def test_every_fault_metric_is_explained(request):
    from run_report.faults import FAULTS

    text = (request.config.rootpath / "docs" / "metrics.md").read_text()
    assert [key for key in FAULTS if f"`{key}`" not in text and key != "metrics/non_finite"] == []
