"""Numbers that are none, and memory that is none, on one of two training processes."""

import re

import pytest
from harness import Fault, Run

TWO = ["trainer.num_workers=2", "trainer.val_before_train=false", "trainer.total_steps=3", "trainer.val_every=3"]
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
ENGINE = "fsdp_diffusers_engine.engine:DiffusersFSDPEngine"


def test_a_gradient_that_is_nan_on_one_rank_is_skipped_on_all_alike(start, tmp_path):
    run = Run(start, tmp_path, TWO, Fault(f"{ENGINE}.backward", "nan_in", rank=1))
    done = run.program.wait(600)
    assert done.code == 0, done.err[-3000:]
    rows = run.rows()
    assert rows[1]["actor/skipped_steps"] == 1.0
    assert re.search(
        r"step 1: an update was skipped, the gradient of \S+lora_[AB]\S+ is not finite", done.out + done.err
    )
    assert all(row.get("actor/skipped_steps", 0.0) == 0.0 for step, row in rows.items() if step > 1)
    assert (
        max(row.get("actor/rollout_log_prob_diff_max", 0.0) for row in rows.values()) <= 1e-6
    )  # the ranks stayed equal


def test_a_velocity_that_is_nan_on_one_rank_stops_all_and_is_named(start, tmp_path):
    run = Run(start, tmp_path, TWO, Fault(f"{ENGINE}.velocity", "nan", rank=1))
    done = run.program.wait(600)
    assert done.code == 1, done.err[-3000:]
    assert "step 1, update: NonFiniteError: " in done.err
    assert re.search(r"NaN or inf: velocity of samples \[0, 1\]", done.err)
    assert done.left_over == []


def test_memory_that_runs_out_on_one_rank_ends_all_with_phase_and_remedy(start, tmp_path):
    run = Run(start, tmp_path, TWO, Fault(f"{ENGINE}.backward", "memory", rank=1))
    done = run.program.wait(600)
    assert done.code == 1, done.err[-3000:]
    assert "step 1, update: " in done.err
    assert "CUDA out of memory" in done.err
    assert "less memory: " in done.err
    assert done.left_over == []
