"""The real command on real Ray with fewer steps: what it prints, what it writes, how it stops and goes on."""

import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def test_it_prints_before_and_after_and_leaves_no_process(finished_run):
    folder, done = finished_run
    assert "step 4/4" in done.out
    assert "strict" in done.out
    assert "→" in done.out
    assert str(folder / "report.html") in done.out
    assert done.left_over == []


def test_its_ray_leaves_no_token_behind(finished_run):
    folder, _ = finished_run
    assert not (folder.parent / "home" / ".ray").exists()


def test_the_run_folder_is_complete(finished_run, metric_rows):
    folder, _ = finished_run
    assert {p.name for p in folder.iterdir()} >= {
        "config.yaml", "metrics.jsonl", "samples", "report.html", "checkpoints", "lora",
    }  # fmt: skip
    table = metric_rows(folder)
    assert [row["step"] for row in table] == [0, 1, 2, 3, 4]
    for key in ("val/reward_mean", "val/reward_stderr", "val/strict_mean", "val/strict_stderr"):
        assert key in table[0]
        assert key in table[4]
    full = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert {k for k in full if k.startswith("time/")} >= {"time/rollout", "time/update", "time/sync", "time/step"}
    assert full["perf/images_per_s"] > 0
    # two optimizer steps: the first starts on policy, the second has moved
    assert 0 < full["actor/ratio_std"] < 0.01
    assert full["actor/kl_loss"] > 0
    assert full["sync/tensors_bound"] == 96
    html = (folder / "report.html").read_text()
    assert len(html) < 3_000_000
    assert "http" not in html.replace("http://www.w3.org", "")  # self-contained


def test_rollout_and_trainer_agree_on_every_step(finished_run, metric_rows):
    folder, _ = finished_run
    gaps = [row["actor/rollout_log_prob_diff_max"] for row in metric_rows(folder)[1:]]
    assert len(gaps) == 4
    assert max(gaps) <= 1e-6


def test_held_out_prompts_are_never_trained_on(finished_run):
    folder, _ = finished_run
    from ray_trainer.prompts import load_prompts

    train = {p.text for p in load_prompts("builtin:tiny_shapes_train")}
    for index in folder.glob("samples/step_*/index.json"):
        assert not {r["prompt"] for r in json.loads(index.read_text())["records"]} & train


def test_stock_diffusers_with_the_saved_lora_draws_the_same_pictures(finished_run, forked, tmp_path):
    folder, _ = finished_run
    code = f"""
import json, sys, numpy as np, torch
from diffusers import QwenImagePipeline
from ray_trainer.assets import builtin
from sde_samplers import initial_noise, sample_generator
index = json.load(open({str(folder / "samples" / "step_000004" / "index.json")!r}))
pipe = QwenImagePipeline.from_pretrained(builtin("models", "tiny_qwen_image")).to(torch.float32)
pipe.set_progress_bar_config(disable=True)
records = index["records"]
noise = initial_noise([sample_generator(1234, r["uid"], r["seed"]) for r in records], (16, 64))
for state in ("base", "tuned"):
    if state == "tuned":
        pipe.load_lora_weights({str(folder / "lora")!r})
    images = pipe([r["prompt"] for r in records], height=64, width=64, num_inference_steps=10, true_cfg_scale=1.0,
                  latents=noise, output_type="np").images
    np.save(f"{{sys.argv[1]}}/{{state}}.npy", (images * 255).round().astype(np.uint8))
"""
    index = json.loads((folder / "samples" / "step_000004" / "index.json").read_text())
    grid = np.asarray(Image.open(folder / "samples" / "step_000004" / "grid.png").convert("RGB")).astype(int)
    width, height = index["tile"]
    ours = np.stack(
        [
            grid[r["row"] * height : (r["row"] + 1) * height, r["column"] * width : (r["column"] + 1) * width]
            for r in index["records"]
        ]
    )
    (tmp_path / "draw.py").write_text(code)
    drawing = forked([tmp_path / "draw.py", tmp_path])
    assert drawing.wait(200) == 0, drawing.communicate()[1][-3000:]
    worst = {state: np.abs(np.load(tmp_path / f"{state}.npy").astype(int) - ours).max() for state in ("tuned", "base")}
    assert worst["tuned"] <= 1
    assert worst["base"] > 1  # so the adapter does something


def test_stopped_then_killed_and_resumed_each_time_it_is_the_same_run(
    finished_run, start_forked, hosted, small, metric_rows, tmp_path
):
    reference, _ = finished_run
    folder = tmp_path / "run"
    program = start_forked("flowgrpo", *small, f"trainer.run_dir={folder}")
    program.until(lambda: (folder / "metrics.jsonl").exists() and len(metric_rows(folder)) >= 2)
    program.signal(signal.SIGINT)
    stopped = program.wait()
    assert stopped.code == 130, stopped.err[-3000:]
    assert "trainer.on_existing=resume" in stopped.err
    assert stopped.left_over == []
    assert len(metric_rows(folder)) < 4
    resume = [*small, f"trainer.run_dir={folder}", "trainer.on_existing=resume"]
    program = start_forked("flowgrpo", *resume)
    program.until(lambda: len(metric_rows(folder)) >= 4)
    program.signal(signal.SIGKILL)
    # Ray's own agents look for their dead parent only about once a minute; nothing that holds memory may stay.
    assert [p for p in program.wait().left_over if "Agent" not in p] == []
    again = hosted("flowgrpo", *resume)
    assert again.code == 0, again.err[-3000:]
    assert "after step 2" in again.out
    # The same seed gives the same rows, to the last bit, whether or not the run was interrupted.
    assert metric_rows(folder) == metric_rows(reference)


REWARDS = '''
import json, os, sys
from image_rewards import Reward, RewardResult

class Probe(Reward):
    """Says where it runs, and fails on request."""

    def __init__(self, note, fail_at=10**9):
        super().__init__()
        self.note, self.fail_at, self.count = note, fail_at, 0

    def score_valid(self, samples):
        import ray
        env = ray.get_runtime_context().runtime_env
        json.dump({"python": sys.executable, "working_dir": env.get("working_dir"), "cwd": os.getcwd()}, open(self.note, "w"))
        results = []
        for sample in samples:
            self.count += 1
            if self.count > self.fail_at:
                raise ZeroDivisionError("the reward is upset about " + sample.prompt)
            results.append(RewardResult(float(sample.image.mean()) / 255, {}, None))
        return results
'''


@pytest.fixture(scope="module")
def failed_run(hosted, small, tmp_path_factory):
    """A run whose reward is a person's own class, and fails in the second step: its folder, its end, the reward's note."""
    place = tmp_path_factory.mktemp("failed")
    (hosted.folder / "probe_reward.py").write_text(REWARDS)
    folder, note = place / "run", place / "note.json"
    reward = f"{{note: {note}, fail_at: 50}}"  # 12 of the validation, 24 of each step
    arguments = ["reward.name=probe_reward:Probe", f"reward.options={reward}", "reward.max_retries=0"]
    done = hosted("flowgrpo", *small, *arguments, f"trainer.run_dir={folder}")
    return folder, done, note


def test_workers_run_the_drivers_interpreter_and_upload_nothing(failed_run):
    said = json.loads(failed_run[2].read_text())
    assert Path(said["python"]) == Path(sys.executable)
    assert said["working_dir"] is None


def test_a_failing_reward_stops_with_its_traceback_and_the_steps_state(failed_run, metric_rows):
    folder, done, _ = failed_run
    assert done.code == 1
    assert "step 2" in done.err
    assert "the reward is upset" in done.err
    assert done.left_over == []
    failure = folder / "failures" / "step_000002"
    text = (failure / "error.txt").read_text()
    assert "ZeroDivisionError" in text
    assert "probe_reward.py" in text  # the traceback of the reward itself
    assert len(json.loads((failure / "prompts.json").read_text())) == 3
    assert [row["step"] for row in metric_rows(folder)] == [0, 1]
    assert json.loads((folder / "checkpoints" / "latest.json").read_text()) == {"step": 1}


@pytest.mark.nightly  # with every change, two shards are held to one process more closely in test_equal_ranks.py
def test_two_processes_with_one_sharded_module_sample_the_same_and_train(
    finished_run, start, small, metric_rows, tmp_path
):
    reference, _ = finished_run
    folder = tmp_path / "run"
    two = ["trainer.num_workers=2", "actor.fsdp_config.device=cpu", "trainer.total_steps=2"]
    done = start("flowgrpo", *small, *two, f"trainer.run_dir={folder}").wait()
    assert done.code == 0, done.err[-4000:]
    assert done.left_over == []
    one, both = metric_rows(reference), metric_rows(folder)
    # Before the first update nothing can differ but rounding: the pictures are the same within one level, and a reward
    # that counts pixels within what a few such pixels can do.
    grids = [Image.open(run / "samples" / "step_000000" / "grid.png").convert("RGB") for run in (reference, folder)]
    assert np.abs(np.subtract(*(np.asarray(grid).astype(int) for grid in grids))).max() <= 1
    assert both[0]["val/reward_mean"] == pytest.approx(one[0]["val/reward_mean"], abs=0.01)
    assert both[1]["reward/mean"] == pytest.approx(one[1]["reward/mean"], abs=0.01)
    for row in both[1:]:
        assert row["actor/rollout_log_prob_diff_max"] <= 1e-6
        assert row["actor/grad_norm"] > 0


def test_pictures_that_are_edited_are_validated_and_trained_beside_those_that_are_not(
    hosted, small, metric_rows, tmp_path
):
    folder = tmp_path / "run"
    loop = ["rollout.agent.default_agent_loop=diffusion_judge_edit_agent", "rollout.agent.num_turns=2"]
    steps = ["trainer.total_steps=1", "trainer.val_every=1", "rollout.pipeline.num_inference_steps=6"]
    steps += ["rollout.val_kwargs.pipeline.num_inference_steps=6", "rollout.algo.sde_window_size=2"]
    steps += ["rollout.n=4", "actor.ppo_mini_batch_size=6", "data.val_max_prompts=2", "rollout.val_kwargs.n=1"]
    sharded = ["trainer.num_workers=2", "actor.fsdp_config.sharding=shard", "actor.fsdp_config.device=cpu"]
    done = hosted("flowgrpo", *small, *loop, *steps, *sharded, f"trainer.run_dir={folder}")
    assert done.code == 0, done.err[-4000:]
    assert done.left_over == []
    row = metric_rows(folder)[1]
    assert 3 < row["forwards/rollout"] < 6  # an edit runs three of the six steps: there are edited ones and others
    assert row["actor/rollout_log_prob_diff_max"] <= 1e-6
    assert row["actor/grad_norm"] > 0
