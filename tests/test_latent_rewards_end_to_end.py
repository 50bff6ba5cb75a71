"""flowgrpo on real Ray with rewards that read latents: only validation's pictures are decoded."""

import pytest
from flowgrpo.cli import APP
from omni_rollout.diffusers_backend import DiffusersBackend
from ray_trainer.assets import builtin
from ray_trainer.compose import compose
from ray_trainer.prompts import load_prompt_sets
from ray_trainer.rollouts import requests_of
from run_report import load_validations

QUIET = """
def quiet(latents, prompt):
    return -float(abs(latents).mean())
"""
MICRO = [
    *("data.prompts_per_step=2", "data.val_max_prompts=2", "rollout.n=4", "rollout.val_kwargs.n=1"),
    *("rollout.pipeline.num_inference_steps=3", "rollout.val_kwargs.pipeline.num_inference_steps=2"),
    *("actor.ppo_mini_batch_size=8", "trainer.save_every=0", "trainer.val_every=2", "trainer.total_steps=2"),
]


@pytest.fixture
def quiet(hosted):
    (hosted.folder / "quiet_latents_of_a_test.py").write_text(QUIET)
    return "quiet_latents_of_a_test:quiet"


def test_a_run_of_latents_alone_decodes_for_validation_only(hosted, metric_rows, quiet, tmp_path):
    folder = tmp_path / "run"
    done = hosted("flowgrpo", *MICRO, f"reward.name={quiet}", f"trainer.run_dir={folder}")
    assert done.code == 0, done.err[-4000:]
    table = metric_rows(folder)
    for row in table[1:]:
        assert row["actor/grad_norm"] > 0
        assert row["reward/std"] > 0
        assert "rollout/saturation" not in row  # nobody saw a picture
    # Its score is that of the latents of what validation shows.
    first = load_validations(folder)[0]
    config = compose("flowgrpo", APP.recipes / "tiny_grpo_guard.yaml", MICRO)
    prompts = load_prompt_sets(config.data)[1][:2]
    asked = requests_of(config, [(f"val/{p.uid}", p) for p in prompts], 1, step=0, validate=True, inputs=["latents"])
    assert {request.shown for request in asked} == {("latents", "pixels")}
    drawn = DiffusersBackend.from_pretrained(str(builtin("models", "tiny_qwen_image"))).generate(asked)
    scores = -drawn["final_latents"].abs().flatten(1).mean(1)
    assert [record.reward for record in first.records] == pytest.approx(scores.tolist(), abs=1e-4)
    assert len(list(first.folder.rglob("*.png"))) > 0


def test_beside_a_reward_of_pixels_on_replicas_ahead(hosted, metric_rows, quiet, tmp_path):
    folder = tmp_path / "run"
    two = ["reward.combine=gdpo", f"reward.several.quiet.name={quiet}", "reward.several.right.name=shapes"]
    where = ["rollout.num_replicas=1", "trainer.staleness=1"]
    done = hosted("flowgrpo", *MICRO, *two, *where, f"trainer.run_dir={folder}")
    assert done.code == 0, done.err[-4000:]
    for row in metric_rows(folder)[1:]:
        assert row["actor/grad_norm"] > 0
        assert row["reward/quiet_mean"] < 0 <= row["reward/right_mean"] <= 1
        assert row["reward/mean"] == pytest.approx(row["reward/quiet_mean"] + row["reward/right_mean"], abs=1e-5)
        assert row["rollout/saturation"] > 0
