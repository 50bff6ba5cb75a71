"""Two training processes that share one sharded module (gloo on CPUs), through the whole program."""

import pytest


def test_two_processes_sample_the_same_and_train(start, small, metric_rows, tmp_path):
    tables = {}
    for workers in (1, 2):
        folder = tmp_path / f"run{workers}"
        done = start(
            "flowgrpo",
            *small,
            "trainer.total_steps=2",
            f"trainer.num_workers={workers}",
            "actor.fsdp_config.device=cpu",
            f"trainer.run_dir={folder}",
        ).wait(timeout=280)
        assert done.code == 0, done.err[-4000:]
        assert done.left_over == []
        tables[workers] = metric_rows(folder)
    one, two = tables[1], tables[2]
    # Before the first update nothing can differ but rounding: the pictures, and so the rewards, are the same.
    assert two[0]["val/reward_mean"] == pytest.approx(one[0]["val/reward_mean"], abs=1e-6)
    assert two[1]["reward/mean"] == pytest.approx(one[1]["reward/mean"], abs=1e-6)
    for row in two[1:]:
        assert row["actor/rollout_log_prob_diff_max"] <= 1e-6
        assert row["actor/grad_norm"] > 0
    assert two[2]["val/reward_mean"] == pytest.approx(one[2]["val/reward_mean"], abs=0.1)
