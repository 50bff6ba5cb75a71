"""Whole runs of both programs on tiny models of the other architectures, each family of algorithms at least once: two steps in one
process, without Ray. Nightly also with a real engine under Ray; omni-rollout's own tests hold each engine to the embedded
backend."""

import json
import math
import platform
import sys

import dpo_online.cli
import flowgrpo.cli
import numpy as np
import pytest
from model_specs import tiny
from PIL import Image
from ray_trainer.cli import run
from ray_trainer.run_dir import _why_not_ours
from run_report.video import video_size, write_video
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

FLOWGRPO, DPO = flowgrpo.cli.APP, dpo_online.cli.APP
SMALL = [
    "model.lora_rank=4",
    "trainer.total_steps=2",
    "trainer.val_every=2",
    "trainer.val_before_train=false",
    "data.val_max_prompts=1",
    "rollout.val_kwargs.n=1",
    "rollout.n=2",
    "data.prompts_per_step=2",
    "actor.ppo_mini_batch_size=4",
    "actor.ppo_micro_batch_size_per_gpu=4",
    *(
        f"rollout.{which}pipeline.{key}"
        for which in ("", "val_kwargs.")
        for key in ("height=32", "width=32", "num_inference_steps=3", "max_sequence_length=64")
    ),
]
FILM = ["rollout.pipeline.num_frames=5", "rollout.val_kwargs.pipeline.num_frames=5"]
GUIDED = ["rollout.pipeline.guidance_scale=3.5", "rollout.val_kwargs.pipeline.guidance_scale=3.5"]
WINDOW = ["rollout.algo.sde_window_size=1", "rollout.algo.sde_window_range=[0,2]"]
CASES = [
    ("sd35", FLOWGRPO, "tiny_flow_grpo", [*WINDOW, "rollout.pipeline.true_cfg_scale=4.5"]),
    (  # as flow_grpo's: the reference draws, with noise and guidance; several levels of a pair are averaged
        "sd35",
        DPO,
        "tiny_dpo",
        [
            *("rollout.algo.kind=flow_sde", "rollout.algo.noise_level=0.7", "rollout.pipeline.true_cfg_scale=4.5"),
            *("rollout.rollout_adapter=old", "model.policy_state_adapters=[default,old]"),
            *("actor.forward_process.levels=logit_normal", "actor.forward_process.num_levels=5"),
            "actor.forward_process.reference_state=old",
        ],
    ),
    ("flux", FLOWGRPO, "tiny_grpo_guard", [*WINDOW, *GUIDED]),
    ("flux", DPO, "tiny_awm", [*GUIDED, "actor.forward_process.schedule_choice=stratified"]),
    ("z_image", FLOWGRPO, "tiny_gspo", WINDOW),
    ("z_image", DPO, "tiny_nft", []),
    ("wan", FLOWGRPO, "tiny_flow_dppo", [*WINDOW, *FILM]),
    ("wan_5b", DPO, "tiny_nft", FILM),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """`model("flux")` is the folder of that tiny pipeline, made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tiny.build(name, tmp_path_factory.mktemp("models") / name)
        return made[name]

    return get


def rows_of(app, model, recipe, folder, *more):
    arguments = [f"recipe={recipe}", f"model.path={model}", *SMALL, *more, f"trainer.run_dir={folder}"]
    assert run(app, arguments) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor/grad_norm"] > 0
        assert row["sync/tensors_bound"] > 0
    assert (folder / "lora").is_dir()
    return rows


@pytest.mark.parametrize(("name", "app", "recipe", "more"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_two_steps_on_a_tiny_model(name, app, recipe, more, model, one_process, tmp_path):
    rows = rows_of(app, model(name), recipe, tmp_path / "run", *more)
    films = [video_size(file) for file in (tmp_path / "run").rglob("*.mp4")]
    assert films == ([(32, 32, 5)] if name.startswith("wan") else [])
    if app is FLOWGRPO:
        assert max(row["actor/rollout_log_prob_diff_max"] for row in rows) <= 1e-6
        assert rows[0]["actor/on_policy"] == 1
    if recipe == "tiny_dpo":
        assert [row["pairs/pairs"] for row in rows] == [2, 2]
        assert [row["actor/count"] for row in rows] == [10, 10]


def pictures(folder, count):
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


def test_offline_dpo_on_a_tiny_sd35(model, one_process, tmp_path):
    pictures(tmp_path, 4)
    pairs = [{"prompt": f"a picture {i}", "chosen": f"{2 * i}.png", "rejected": f"{2 * i + 1}.png"} for i in range(2)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    files = [f"data.train_file={tmp_path}/pairs.jsonl", "data.val_file=builtin:tiny_shapes_heldout", "rollout.n=1"]
    first, second = rows_of(DPO, model("sd35"), "offline_dpo", tmp_path / "run", *files)
    assert first["actor/dpo_loss"] == pytest.approx(math.log(2))  # the policy is its own reference
    assert second["actor/dpo_loss"] < math.log(2)  # the same two pairs again
    assert first["forwards/rollout"] == 0


def test_sft_on_videos_of_a_tiny_wan(model, one_process, tmp_path):
    frames = np.random.default_rng(0).integers(0, 255, (5, 3, 32, 32), dtype=np.uint8)
    write_video(tmp_path / "film.mp4", frames)
    (tmp_path / "films.jsonl").write_text('{"prompt": "a film", "image": "film.mp4"}\n' * 2)
    files = [f"data.train_file={tmp_path}/films.jsonl", "data.val_file=builtin:tiny_shapes_heldout", "rollout.n=1"]
    more, run_dir = [*files, *FILM, "trainer.trackers=[tensorboard]"], tmp_path / "run"
    rows = rows_of(DPO, model("wan"), "sft", run_dir, *more)
    assert all(math.isfinite(row["actor/sft_loss"]) for row in rows)
    assert video_size(run_dir / "samples" / "step_000002" / "full" / "0000.mp4") == (32, 32, 5)
    assert "data:video/mp4;base64" in (run_dir / "report.html").read_text()
    # It goes on, and its tracker has all of it in one run.
    known = (run_dir / "trackers" / "id").read_text()
    resumed = ["trainer.total_steps=3", "trainer.on_existing=resume", f"trainer.run_dir={run_dir}"]
    assert run(DPO, ["recipe=sft", f"model.path={model('wan')}", *SMALL, *more, *resumed]) == 0
    assert (run_dir / "trackers" / "id").read_text() == known
    events = EventAccumulator(str(run_dir / "trackers" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("actor/sft_loss")] == [1, 2, 3]
    assert [event.step for event in events.Images("samples")] == [2, 3]
    # A run that begins anew may remove all of it.
    assert _why_not_ours(run_dir) == ""


NO_ENGINE = (sys.platform, platform.machine()) != ("linux", "x86_64")


@pytest.mark.nightly
@pytest.mark.skipif(NO_ENGINE, reason="vLLM-Omni has wheels for Linux x86-64 only")
@pytest.mark.parametrize(("name", "app", "recipe", "more"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_two_steps_with_a_real_engine(name, app, recipe, more, model, start, metric_rows, tmp_path):
    folder = tmp_path / "run"
    arguments = [f"recipe={recipe}", f"model.path={model(name)}", *SMALL, *more, "rollout.backend=vllm_omni"]
    # Random models draw noise, which this reward tells apart.
    reward = ["reward.name=jpeg_incompressibility", *(["reward.options.video=mean"] if name.startswith("wan") else [])]
    done = start(app.name, *arguments, *reward, f"trainer.run_dir={folder}").wait(timeout=290)
    assert done.code == 0, done.err[-4000:]
    assert done.left_over == []
    rows = metric_rows(folder)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor/grad_norm"] > 0
        assert row["sync/tensors_bound"] > 0
        if app is FLOWGRPO:
            assert row["actor/rollout_log_prob_diff_max"] <= 1e-4
