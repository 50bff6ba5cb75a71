"""Other recipes for a few steps, and the other rollout backend as a person would run it, on real Ray.

What an algorithm costs is counted by hooks on the transformer, and must be what its maths needs.
"""

import dpo_online.cli
import flowgrpo.cli
import pytest
from ray_trainer.cli import run

FEW = ["rollout.n=4", "data.val_max_prompts=1", "rollout.val_kwargs.n=1"]
FORWARDS = ("forwards/rollout", "forwards/log_prob", "forwards/train", "forwards/no_grad")


def forwards(table):
    """(rollout, old and reference scores, with gradient, without gradient in the update) of every step; equal ones once."""
    return {tuple(row.get(key, 0.0) for key in FORWARDS) for row in table[1:]}


def test_flow_grpo_spends_no_forward_too_many(finished_run, metric_rows):
    folder, _ = finished_run
    # six steps; the base policy on the two trained ones; those two with gradient; old log-probs are the rollout's own
    assert forwards(metric_rows(folder)) == {(6.0, 2.0, 2.0, 0.0)}
    assert {row["forwards/per_sample"] for row in metric_rows(folder)[1:]} == {10.0}


@pytest.mark.nightly  # with every change, test_own_parts_end_to_end.py trains with an engine
def test_vllm_omni_draws_the_same_and_trains_the_same(finished_run, hosted, small, metric_rows, tmp_path):
    reference, _ = finished_run
    folder = tmp_path / "run"
    done = hosted("flowgrpo", *small, "rollout.backend=vllm_omni", f"trainer.run_dir={folder}", timeout=290)
    assert done.code == 0, done.err[-4000:]
    assert done.left_over == []
    ours, theirs = metric_rows(folder), metric_rows(reference)
    assert len(ours) == len(theirs) == 5
    # A real engine in a process of its own, a LoRA sent to it after every step, and yet the run of the other backend.
    for mine, his in zip(ours, theirs, strict=True):
        for key in ("reward/mean", "val/reward_mean"):
            assert mine.get(key) == pytest.approx(his.get(key), abs=0.02), (key, mine["step"])
    for row in ours[1:]:
        assert row["actor/rollout_log_prob_diff_max"] <= 1e-6
        assert row["sync/tensors_bound"] == 96
        assert row["rollout/failed"] == row["rollout/retried"] == 0
    assert forwards(ours) == {(6.0, 2.0, 2.0, 0.0)}


def test_mix_grpo_flash_saves_the_steps_after_its_window(one_process, small, metric_rows, tmp_path):
    folder = tmp_path / "run"
    changes = ["trainer.total_steps=2", "rollout.algo.iters_per_group=1", "rollout.algo.sde_window_range=[0,4]"]
    changes += [*FEW, "actor.ppo_mini_batch_size=6"]
    assert run(flowgrpo.cli.APP, ["recipe=tiny_mix_grpo_flash", *small, *changes, f"trainer.run_dir={folder}"]) == 0
    table = metric_rows(folder)
    steps = [tuple(row.get(key, 0.0) for key in FORWARDS) for row in table[1:]]
    # neither a reference nor an old policy is asked
    assert [row[1:] for row in steps] == [(0.0, 2.0, 0.0)] * 2
    # ten steps without Flash; with it, window 0-1 and two more, then 2-3 and the one that is left after it
    assert [row[0] for row in steps] == [4.0, 5.0]
    for row in table[1:]:
        assert row["actor/rollout_log_prob_diff_max"] <= 1e-6
        assert row["actor/grad_norm"] > 0


def test_nft_samples_with_its_old_policy(one_process, small, metric_rows, tmp_path):
    folder = tmp_path / "run"
    arguments = ["recipe=tiny_nft", *small, *FEW, "actor.ppo_mini_batch_size=12", "trainer.total_steps=3"]
    schedule = ["algorithm.old_policy={decay_rate: 0.5, decay_max: 0.5}", "actor.forward_process.num_levels=2"]
    assert run(dpo_online.cli.APP, [*arguments, *schedule, f"trainer.run_dir={folder}"]) == 0
    table = metric_rows(folder)
    assert [row["actor/old_policy_decay"] for row in table[1:]] == [0.5, 0.5, 0.5]
    assert table[1]["actor/nft_old_deviation"] <= 1e-10  # old and trained start as one
    assert table[3]["actor/nft_old_deviation"] > 1e-8  # and part: old is halfway behind
    for row in table[1:]:
        steps = row["forwards/rollout"]
        assert (row["forwards/train"], row["forwards/no_grad"]) == (2.0, 4.0)  # two levels; old and base policy on each
        assert row["forwards/per_sample"] <= steps + 6.0  # groups whose rewards are all equal are left out
