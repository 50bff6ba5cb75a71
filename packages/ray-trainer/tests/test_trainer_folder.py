import json
import os
import shutil
import signal

import pytest
import torch
from ray_trainer import checkpoint
from ray_trainer.config import RunConfig, to_yaml
from ray_trainer.errors import TrainerError, TrainingFailed
from ray_trainer.failure import record_failure
from ray_trainer.interrupt import StopRequest
from ray_trainer.run_dir import check_run_dir, open_run_dir
from ray_trainer.schema import check
from safetensors.torch import load_file
from tensordict import NonTensorStack, TensorDict

OURS = to_yaml(RunConfig())


def a_run(folder):
    """What a run leaves, a file of each kind."""
    folder.mkdir()
    (folder / "config.yaml").write_text(OURS)
    for name in (
        *(
            "metrics.jsonl",
            "report.html",
            "environment.json",
            "inputs.json",
            "changes.jsonl",
            "watchdog.jsonl",
            "samples/step_000004/grid.png",
        ),
        *("samples/step_000004/full/0000.png", "samples/.step_000008.tmp/grid.png", "checkpoints/latest.json"),
        *("checkpoints/step_000002/engine.json", "checkpoints/step_000002/weights/shard-00001.safetensors"),
        *("checkpoints/.step_000004.writing/rng/rank0.safetensors", "lora/pytorch_lora_weights.safetensors"),
        *("failures/step_000003/error.txt", "failures/step_000003/batch.safetensors"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def test_policies_for_an_existing_folder(tmp_path):
    path = str(tmp_path / "run")
    check_run_dir(path, "raise")
    assert not open_run_dir(path, "raise").resuming
    (tmp_path / "run").rmdir()
    a_run(tmp_path / "run")
    with pytest.raises(TrainerError, match="trainer.on_existing=resume"):
        check_run_dir(path, "raise")
    check_run_dir(path, "resume")
    again = open_run_dir(path, "resume")
    assert again.resuming
    assert again.metrics.exists()
    check_run_dir(path, "delete")
    fresh = open_run_dir(path, "delete")
    assert not fresh.resuming
    assert list(fresh.path.iterdir()) == []


def everything(place):
    return sorted(str(p.relative_to(place)) for p in place.rglob("*"))


@pytest.mark.parametrize(
    "foreign",
    [
        *(
            "thesis.txt",
            "samples/mine.png",
            "checkpoints/step_000002/notes.md",
            "lora/readme.md",
            "lora/mine.safetensors",
            "runs/other/config.yaml",
        ),
        *(
            "checkpoints/best/weights.safetensors",
            "failures/step_000003/core",
            ".git/config",
            "samples/step_000004/grid.png.bak",
        ),
    ],
)
def test_a_run_with_anything_else_in_it_is_never_deleted(tmp_path, foreign):
    run = a_run(tmp_path / "run")
    (run / foreign).parent.mkdir(parents=True, exist_ok=True)
    (run / foreign).write_text("years of work")
    before = everything(tmp_path)
    for call in (check_run_dir, open_run_dir):
        with pytest.raises(TrainerError, match="was not written by a run"):
            call(str(run), "delete")
    assert everything(tmp_path) == before


def test_links_parents_and_the_working_folder_are_never_deleted(tmp_path, monkeypatch):
    run = a_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "other").mkdir()
    with pytest.raises(TrainerError, match="it is a link to"):
        check_run_dir(str(tmp_path / "link"), "delete")
    monkeypatch.chdir(run)
    for name in (".", str(run), "checkpoints/.."):
        with pytest.raises(TrainerError, match="holds the working folder"):
            check_run_dir(name, "delete")
    monkeypatch.chdir(run / "samples")
    with pytest.raises(TrainerError, match="holds the working folder"):
        check_run_dir("..", "delete")
    monkeypatch.chdir(tmp_path)
    for name in (".", "..", "run/samples", str(tmp_path)):
        with pytest.raises(TrainerError, match="is no run folder"):
            check_run_dir(name, "delete")
    (run / "trackers" / "wandb" / "run-1" / "logs").mkdir(parents=True)  # which links to a log of its own elsewhere
    (run / "trackers" / "wandb" / "run-1" / "logs" / "core.log").symlink_to(tmp_path / "other" / "core.log")
    check_run_dir(str(run), "delete")
    (run / "samples" / "away").symlink_to(tmp_path / "other")
    with pytest.raises(TrainerError, match="'samples/away' in it was not written by a run"):
        check_run_dir(str(run), "delete")
    assert (run / "report.html").exists()


@pytest.mark.parametrize("text", ["", "a: 1\n", "- 1\n", "app: {", "app: x\nmodel: {}\ntrainer: {}\n"])
def test_a_folder_of_another_program_is_never_deleted(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(text)
    with pytest.raises(TrainerError, match=r"is not one that a run wrote|is no YAML"):
        check_run_dir(str(tmp_path / "run"), "delete")
    assert (tmp_path / "run" / "config.yaml").exists()


def test_a_foreign_folder_is_never_deleted(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(TrainerError, match="is no run folder"):
        check_run_dir(str(tmp_path), "delete")


def test_a_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(TrainerError, match="cannot be a folder"):
        check_run_dir(str(tmp_path / ("x" * 300)), "raise")


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file" / "run", "/proc/run"):
        with pytest.raises(TrainerError, match="cannot write into"):
            check_run_dir(str(bad), "raise")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]  # nothing half-written


def test_latest_checkpoint_is_always_whole(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    for step in (10, 20, 30):
        checkpoint.step_folder(tmp_path, step).mkdir()
        checkpoint.publish(tmp_path, step, keep=2)
    assert checkpoint.latest(tmp_path) == 30
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000020", "step_000030"]
    checkpoint.step_folder(tmp_path, 40).mkdir()  # killed before it was published
    assert checkpoint.latest(tmp_path) == 30
    shutil.rmtree(checkpoint.step_folder(tmp_path, 30))
    with pytest.raises(TrainerError, match="is gone"):
        checkpoint.latest(tmp_path)
    (tmp_path / "latest.json").write_text("{")
    with pytest.raises(TrainerError, match="unreadable"):
        checkpoint.latest(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "a/w.safetensors has 7 bytes and was written with 8"),
        (lambda file: file.write_bytes(b"wEights!"), "a/w.safetensors holds other bytes than were written"),
        (lambda file: file.unlink(), "a/w.safetensors is gone"),
        (lambda file: (file.parent.parent / "files.json").write_text("["), "while reading it"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(tmp_path, spoil, why):
    for step in (10, 20):
        (file := checkpoint.step_folder(tmp_path, step) / "a" / "w.safetensors").parent.mkdir(parents=True)
        file.write_bytes(b"weights!")
        checkpoint.publish(tmp_path, step, keep=2)
    assert checkpoint.latest(tmp_path) == 20
    assert checkpoint.passed_over(tmp_path) == []
    spoil(file)
    assert checkpoint.latest(tmp_path) == 10
    (line,) = checkpoint.passed_over(tmp_path)
    assert "step_000020 is damaged (" in line
    assert why in line
    assert line.endswith("the one of step 10 is taken")
    spoil(checkpoint.step_folder(tmp_path, 10) / "a" / "w.safetensors")
    with pytest.raises(TrainerError, match="step_000020 is damaged .* no older checkpoint is whole"):
        checkpoint.latest(tmp_path)


def test_the_first_signal_asks_and_the_second_insists(capsys):
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        assert "stopping after this step" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_failed_step_leaves_traceback_and_batch(tmp_path):
    batch = TensorDict({"latents": torch.arange(6.0).view(2, 3)}, batch_size=[2])
    batch["uid"] = NonTensorStack("a", "b")
    try:
        raise ValueError("the reward is upset")
    except ValueError as error:
        folder, _ = record_failure(tmp_path, 12, error, batch)
    assert folder.name == "step_000012"
    assert "the reward is upset" in (folder / "error.txt").read_text()
    assert torch.equal(load_file(folder / "batch.safetensors")["latents"], batch["latents"])
    assert json.loads((folder / "batch.json").read_text())["uid"] == ["a", "b"]


def batch_of(**changes):
    tensors = {
        "latents": torch.zeros(4, 2, 16, 64),
        "next_latents": torch.zeros(4, 2, 16, 64),
        "step_index": torch.zeros(4, 2, dtype=torch.long),
    }
    return TensorDict(tensors | changes, batch_size=[4])


def test_the_schema_refuses_rounded_missing_and_misshapen_tensors():
    names = ("latents", "next_latents", "step_index")
    check(batch_of(), names, "rollout")
    with pytest.raises(TrainingFailed, match="'latents' is torch.bfloat16"):
        check(batch_of(latents=torch.zeros(4, 2, 16, 64, dtype=torch.bfloat16)), names, "rollout")
    with pytest.raises(TrainingFailed, match="'step_index' has shape"):
        check(batch_of(step_index=torch.zeros(4, 3, dtype=torch.long)), names, "rollout")
    with pytest.raises(TrainingFailed, match="lacks 'rm_scores'"):
        check(batch_of(), (*names, "rm_scores"), "rollout")
    with pytest.raises(TrainingFailed, match="'rm_scores' has shape"):
        check(batch_of(rm_scores=torch.zeros(4, 2)), ("rm_scores",), "reward")
    for dtype in (torch.float32, torch.bfloat16):  # prompts come in the rollout's type
        check(batch_of(prompt_embeds=torch.zeros(4, 7, 8, dtype=dtype)), ("prompt_embeds",), "rollout")
    with pytest.raises(TrainingFailed, match="'prompt_embeds' is torch.int64, but both engines need a floating-point"):
        check(batch_of(prompt_embeds=torch.zeros(4, 7, 8, dtype=torch.long)), ("prompt_embeds",), "rollout")
