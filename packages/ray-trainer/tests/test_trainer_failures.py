"""Whatever fails, in whichever phase: the first cause is what a person reads, with the right exit code."""

import errno
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray_trainer.trainer as loop
import torch
from flowgrpo.cli import APP as FLOWGRPO
from ray.exceptions import RayTaskError
from ray_trainer import checkpoint
from ray_trainer.cli import run
from ray_trainer.errors import TrainerError
from ray_trainer.failure import first_cause, is_out_of_memory, record_failure, words
from ray_trainer.placement import Placement
from ray_trainer.workers import ActorRolloutRefWorker as Worker
from run_report import ReportError
from safetensors.torch import load_file
from tensordict import NonTensorData, NonTensorStack, TensorDict

PHASES = ("load", "sync", "validation", "rollout", "reward", "update", "save", "report")


class Broken(Exception):
    """A second failure."""


class Rude(Exception):
    def __str__(self):
        raise Broken("even its text fails")


def from_worker(cause):
    """As Ray hands over what a worker raised."""
    return RayTaskError(
        "update_actor", f"Traceback (most recent call last):\n  …\n{cause!r}", cause
    ).as_instanceof_cause()


def ray_made_a_string_of_it():
    """An exception that cannot be pickled comes as Ray's text alone."""
    text = "ray::Worker.update_actor()\nTraceback (most recent call last):\n  File …\nBroken: the worker's own words"
    return RuntimeError(text)


def batch_of_every_kind():
    """Storage that is shared, views, other strides, every dtype, nothing at all, objects, numbers that are none."""
    base = torch.arange(24.0).view(4, 6)
    batch = TensorDict(
        {
            "rollout_log_probs": base,
            "old_log_probs": base,
            "view": base[:, 2:4],
            "strided": base.view(4, 3, 2).transpose(1, 2),
            "expanded": torch.ones(4, 1).expand(4, 5),
            "bf16": base.bfloat16(),
            "bool": base > 3,
            "long": base.long(),
            "empty": torch.empty(4, 0, 3),
            "nan": base * float("nan"),
            "gradient": base.clone().requires_grad_(),
            "complex": torch.complex(base, base),
            "sparse": base.to_sparse(),
            "inner": TensorDict({"a": base}, batch_size=[4]),
        },
        batch_size=[4],
    )
    batch["uid"] = NonTensorStack("a", "b", "c", "d")
    batch["object"] = NonTensorStack(*[{(1, 2): Rude("x"), "lambda": lambda: 0} for _ in range(4)])
    batch["once"] = NonTensorData(object(), batch_size=[4])
    return batch


def test_every_kind_of_batch_is_recorded(tmp_path):
    batch = batch_of_every_kind()
    folder, lost = record_failure(tmp_path, 3, ValueError("why"), batch)
    assert lost == []
    tensors = load_file(folder / "batch.safetensors")
    for name in ("rollout_log_probs", "old_log_probs", "view", "strided", "expanded", "bf16", "bool", "long", "empty"):
        assert torch.equal(tensors[name], batch[name]), name
        assert tensors[name].dtype == batch[name].dtype
    assert tensors["nan"].isnan().all()
    rest = json.loads((folder / "batch.json").read_text())
    assert set(tensors) | set(rest) == {str(key) for key in batch.keys()}
    assert "why" in (folder / "error.txt").read_text()


@pytest.mark.parametrize(
    "batch", [None, TensorDict({}, batch_size=[0]), TensorDict({"a": torch.empty(0)}, batch_size=[0])]
)
def test_a_batch_that_holds_nothing_is_recorded(batch, tmp_path):
    folder, lost = record_failure(tmp_path, 1, Rude(), batch)
    assert lost == []
    assert "Rude" in (folder / "error.txt").read_text()


def test_a_full_disk_costs_files_and_not_the_cause(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr("safetensors.torch.save_file", full)
    folder, lost = record_failure(tmp_path, 3, ValueError("why"), batch_of_every_kind())
    assert len(lost) == 4
    assert "error.txt could not be written: OSError: [Errno 28] No space left" in lost[0]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        from_worker(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        ExceptionGroup("all", [from_worker(torch.OutOfMemoryError("CUDA out of memory"))]),
        RuntimeError(
            "update failed on rank 1: Traceback (most recent call last):\n…\ntorch.OutOfMemoryError: CUDA out of memory."
        ),
    ],
)
def test_memory_that_ran_out_is_known_in_every_wrapping(error):
    assert is_out_of_memory(error)
    assert "\n" not in words(error)


def test_what_is_not_memory():
    lost = "The process is killed by SIGKILL by OOM killer due to high memory usage, or ray stop --force is called"
    assert not is_out_of_memory(RuntimeError(lost))  # Ray guesses this for every worker that dies
    assert words(Rude()) == "Rude"


def test_of_a_traceback_in_the_message_the_error_is_told_and_not_the_advice_after_it():
    frame = '  File "engine.py", line 239, in update\n    return self.run(data)\n           ^^^^^^^^^^^^^^\n'
    advice = "\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace.\n"
    inner = (
        f"Traceback (most recent call last):\n{frame}torch._inductor.exc.InductorError: TypeError: CantSplit{advice}"
    )
    outer = f"\n\nThe above exception was the direct cause …\n\nTraceback (most recent call last):\n{frame}"
    told = "RuntimeError: torch._inductor.exc.InductorError: TypeError: CantSplit"
    assert words(RuntimeError(inner)) == told
    assert words(RuntimeError(f"{inner}{outer}RankError: update failed on rank 0: {inner}")) == told
    several = f"Traceback (most recent call last):\n{frame}ValueError: 3 words\nin two lines"
    assert words(RuntimeError(several)) == "RuntimeError: ValueError: 3 words in two lines"
    assert words(ray_made_a_string_of_it()) == "RuntimeError: Broken: the worker's own words"
    loop_of_causes = ValueError("round")
    loop_of_causes.cause = loop_of_causes
    assert first_cause(loop_of_causes) is loop_of_causes


class Fakes:
    """Workers, sampler and rewards that do nothing, and fail in one phase. `ending` says which of them fail to close."""

    def __init__(self, phase, error, *, saves=True, closes=True):
        self.phase, self.error, self.saves, self.closes, self.samples = phase, error, saves, closes, 0
        self.router, self.placement = None, SimpleNamespace(lines=[])

    def fail(self, phase):
        if phase == self.phase:
            raise self.error

    # workers
    placement = Placement("replicate", -1)

    def where(self, error):
        return ""

    def call(self, method, *arguments):
        if method is Worker.save_checkpoint:
            if not self.saves:
                raise Broken("no checkpoint either")
            Path(arguments[0]).mkdir(parents=True, exist_ok=True)
            if self.samples > 1:  # the checkpoint of a whole step, not the one after a failure
                self.fail("save")
        if method is Worker.export:
            self.fail("report")
        return [0.0 if method is Worker.memory_gb else {}]

    def write_rows(self, folder):
        (folder / "rows_rank0.safetensors").touch()

    def update_actor(self, data, step):
        self.fail("update")
        return {}

    # sampler
    async def sync(self, version):
        self.fail("sync")
        return {}

    async def leave_gpu(self):
        pass

    def close(self):
        if not self.closes:
            raise Broken("it does not even close")

    # rollouts
    async def sample(self, rows, n, *, step, validate):
        self.fail("validation" if validate else "rollout")
        count = len(rows) * n
        batch = TensorDict(
            {
                "responses": torch.zeros(count, 3, 8, 8, dtype=torch.uint8),
                "rm_scores": torch.rand(count, 1),
                "final_latents": torch.zeros(count, 2, 3),
                "sigmas": torch.linspace(1, 0, 4).expand(count, 4),
                "prompt_embeds": torch.zeros(count, 2, 3),
                "prompt_embeds_mask": torch.ones(count, 2, dtype=torch.bool),
                "index": torch.arange(count),
                "forwards": torch.ones(count),
                "batch_rows": torch.ones(count),
            },
            batch_size=[count],
        )
        batch["old_sigmas"] = batch["sigmas"]
        for key, values in (("prompt", [p.text for _, p in rows]), ("uid", [uid for uid, _ in rows])):
            batch[key] = NonTensorStack(*[v for v in values for _ in range(n)])
        batch["reward_components"] = NonTensorStack(*[{} for _ in range(count)])
        self.samples += not validate
        return batch

    def score_metrics(self, batch):
        if self.samples:
            self.fail("reward")
        return {"reward/failed": 0.0}

    def fault_metrics(self):
        return {}


class AsyncClose:
    """The sampler's face of the same: its `close` is awaited."""

    def __init__(self, fakes):
        self.fakes, self.router = fakes, None
        self.sync, self.leave_gpu = fakes.sync, fakes.leave_gpu

    async def close(self):
        self.fakes.close()


class Plain(loop.RayDiffusionTrainer):
    def prepare_update(self, batch, step):
        return batch, {}


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Runs the command line over fakes; returns (exit code, run folder)."""

    def start(fakes, *arguments):
        def workers(config):
            fakes.fail("load")
            return fakes

        async def sampler(config, workers, say):
            return AsyncClose(fakes)

        monkeypatch.setattr(loop, "WorkerGroup", workers)
        monkeypatch.setattr(loop, "open_sampler", sampler)
        monkeypatch.setattr(loop, "Rollouts", lambda config, sampler, workers: fakes)

        monkeypatch.setattr("ray_trainer.cli.ray_session", lambda config: nullcontext())
        app = replace(FLOWGRPO, trainer=lambda config: Plain)
        folder = tmp_path / "run"
        small = ["trainer.total_steps=2", "trainer.save_every=1", "data.val_max_prompts=2", f"trainer.run_dir={folder}"]
        return run(app, [*small, *arguments]), folder

    return start


BACKENDS = (["rollout.backend=diffusers"], ["rollout.backend=vllm_omni"])


@pytest.mark.parametrize("backend", BACKENDS, ids=["diffusers", "vllm_omni"])
@pytest.mark.parametrize("phase", PHASES)
def test_the_first_cause_is_read_in_every_phase(phase, backend, program, capsys, monkeypatch):
    monkeypatch.setattr("ray_trainer.rules.find_spec", lambda name: True)
    # Everything else fails as well: the checkpoint after it, and closing.
    fakes = Fakes(
        phase, from_worker(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")), closes=False
    )
    code, _ = program(fakes, *backend)
    said = capsys.readouterr()
    assert code == 1
    last = said.err[said.err.rindex("flowgrpo: failed:") :]
    assert (
        f"{phase}: OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB; less memory: " in last.splitlines()[0]
    )
    assert ("even close" in said.out) == (phase != "load")  # then there is nothing to close yet
    if phase == "update":
        assert "model.enable_gradient_checkpointing=true, actor.ppo_micro_batch_size_per_gpu=24" in last
    if phase == "rollout":
        assert ("max_num_seqs=8" if "vllm" in backend[0] else "rollout.max_batch_size=24") in last


def test_no_key_is_advised_that_is_set_already(program, capsys):
    fakes = Fakes("update", torch.OutOfMemoryError("CUDA out of memory"))
    program(fakes, "model.enable_gradient_checkpointing=true", "actor.ppo_micro_batch_size_per_gpu=1")
    advice = capsys.readouterr().err
    assert "less memory: " in advice
    assert "checkpointing" not in advice
    assert "micro_batch" not in advice


@pytest.mark.parametrize("phase", ["rollout", "reward"])
def test_a_step_that_fails_leaves_its_state_and_a_checkpoint(phase, program, capsys):
    code, folder = program(Fakes(phase, Broken("the reason")))
    assert code == 1
    last = capsys.readouterr().err
    assert f"flowgrpo: failed: step 1, {phase}: Broken: the reason\n" in last
    assert "trainer.on_existing=resume" in last
    assert (folder / "failures" / "step_000001" / "error.txt").is_file()
    assert (folder / "failures" / "step_000001" / "batch.safetensors").is_file() == (phase == "reward")
    assert json.loads((folder / "checkpoints" / "latest.json").read_text()) == {"step": 0}


def test_a_checkpoint_that_fails_as_well_comes_second(program, capsys):
    code, _ = program(Fakes("reward", Broken("the reason"), saves=False))
    lines = capsys.readouterr().err.splitlines()
    first = next(
        i for i, line in enumerate(lines) if line.startswith("flowgrpo: failed: step 1, reward: Broken: the reason")
    )
    assert code == 1
    assert "no checkpoint could be written after it: Broken: no checkpoint either" in lines[first + 2]


def test_a_failure_outside_the_steps_keeps_its_traceback(program, capsys):
    code, folder = program(Fakes("report", Broken("the reason")))
    said = capsys.readouterr().err
    assert code == 1
    assert "Traceback" not in said
    assert "failed: report: Broken: the reason\ntraining itself is done" in said
    file = folder / "failures" / "error.txt"
    assert said.endswith(f"its traceback is in {file}\n")
    assert file.read_text().startswith("Traceback")
    assert "Broken: the reason" in file.read_text()


def test_what_nobody_foresaw_is_one_line_and_its_traceback_needs_debug(monkeypatch, capsys):
    from ray_trainer import cli

    def broken(*_):
        raise KeyError("surprise")

    monkeypatch.setattr(cli, "validate_config", broken)
    assert cli.run(FLOWGRPO, ["--dry-run"]) == 1
    assert capsys.readouterr().err == "flowgrpo: failed: KeyError: 'surprise'; --debug prints its traceback\n"
    assert cli.run(FLOWGRPO, ["--dry-run", "--debug"]) == 1
    assert capsys.readouterr().err.startswith("Traceback")


def test_what_a_worker_refuses_at_the_start_is_input_that_cannot_be_used(program, capsys):
    code, folder = program(Fakes("load", from_worker(TrainerError("model.path=… has no weights; copy them"))))
    assert code == 2
    assert capsys.readouterr().err == "flowgrpo: error: model.path=… has no weights; copy them\n"
    assert not folder.exists()


def test_a_damaged_file_of_the_run_folder_is_input_that_cannot_be_used(program, capsys):
    code, _ = program(
        Fakes("report", ReportError("metrics.jsonl line 2 is not a metrics row; repair or delete that line"))
    )
    assert code == 2
    said = capsys.readouterr().err
    assert said.endswith("flowgrpo: error: metrics.jsonl line 2 is not a metrics row; repair or delete that line\n")
    assert "Traceback" not in said


def test_a_run_whose_hours_are_over_ends_well_and_goes_on_later(program, capsys):
    code, folder = program(Fakes("never", Broken()), "trainer.max_hours=1e-9", "trainer.save_every=0")
    said = capsys.readouterr().out
    assert code == 0
    assert f"trainer.max_hours=1e-09: stopped after step 1 of 2; go on with trainer.run_dir={folder}" in said
    assert checkpoint.latest(folder / "checkpoints") == 1
    assert (folder / "report.html").is_file()
    assert program(Fakes("never", Broken()), "trainer.on_existing=resume", "trainer.max_hours=9")[0] == 0
    assert checkpoint.latest(folder / "checkpoints") == 2
