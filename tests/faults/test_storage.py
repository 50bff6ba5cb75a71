"""Disks that are full, may not be written, or hold other bytes than were written: what was good stays good and is found."""

import shutil
import subprocess
from contextlib import contextmanager

import numpy as np
import pytest
import torch


@pytest.fixture
def disk(tmp_path):
    """(folder on a disk of 2 MiB, a function that leaves so many bytes free there)."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {made.stderr.strip()}")

    def leave(free):
        filler = place / "filler"
        filler.unlink(missing_ok=True)
        filler.write_bytes(b"\1" * max(shutil.disk_usage(place).free - free, 0))

    yield place, leave
    subprocess.run(["umount", place], check=True)


FREE = (0, 4096, 12288, 40960)
"""Bytes that are left: a write fails at once, in its middle, or not at all."""


@contextmanager
def may_be_full():
    """A full disk may end this, by an error that says so, and nothing else."""
    try:
        yield
    except Exception as error:  # OSError, and the words of safetensors for one
        if "No space left" not in str(error):
            raise


def validation(step):
    noise = np.random.default_rng(step).integers(0, 256, (2, 3, 64, 64), dtype=np.uint8)
    records = [{"prompt": "a", "uid": "a", "seed": i, "reward": float(step), "components": {}} for i in (0, 1)]
    return noise, records


def test_a_full_disk_leaves_what_was_good(disk):
    from flowgrpo.cli import APP
    from fsdp_diffusers_engine.checkpoint import read_tensors, write_tensors, writing
    from fsdp_diffusers_engine.sharding import Layout
    from ray_trainer import checkpoint, resume
    from ray_trainer.cli import parse
    from ray_trainer.failure import record_failure
    from ray_trainer.run_dir import RunDir
    from run_report import MetricsWriter, load_validations, read_metrics, save_validation, write_report
    from tensordict import TensorDict

    place, leave = disk
    run = place / "run"
    config, _ = parse(APP, [f"trainer.run_dir={run}"])
    folder, inputs = RunDir(run, False), {"data.train_file": [], "data.val_file": []}
    run.mkdir()
    resume.begin(folder, config, inputs)
    begun = folder.config.read_bytes()

    def save(step):
        target = checkpoint.step_folder(folder.checkpoints, step)
        with writing(target, Layout()) as draft:
            write_tensors(draft, {"model.a": torch.full((4000,), float(step))}, Layout())
        checkpoint.publish(folder.checkpoints, step, 2)

    save(1)
    with MetricsWriter(run) as writer:
        writer.append(1, {"reward/mean": 1.0})
    save_validation(run, 1, *validation(1))
    write_report(run)
    page = folder.report.read_bytes()
    for free in FREE:
        leave(free)
        with may_be_full():
            save(2)
        newest = checkpoint.latest(folder.checkpoints)
        found = {"model.a": torch.zeros(4000)}
        read_tensors(checkpoint.step_folder(folder.checkpoints, newest), found, Layout())
        assert newest in (1, 2)
        assert torch.equal(found["model.a"], torch.full((4000,), float(newest)))
        with may_be_full():
            save_validation(run, 1, *validation(1))
        with may_be_full():
            save_validation(run, 2, *validation(2))
        assert [v.step for v in load_validations(run)] in ([1], [1, 2])
        with may_be_full():
            write_report(run)
        assert folder.report.stat().st_size >= len(page) // 2
        assert folder.report.read_text().endswith("</html>")
        with may_be_full():
            resume.begin(folder, config, inputs)
        assert folder.config.read_bytes() == begun
        with may_be_full(), MetricsWriter(run) as writer:
            writer.append(writer.last_step + 1, {"reward/mean": 1.0, "x" * 3000: 1.0})
        assert read_metrics(run)[0]["step"] == 1
        batch = TensorDict({"a": torch.zeros(40_000)}, batch_size=[40_000])
        record_failure(folder.failures, 2, ValueError("why"), batch)  # it may lose files, and raises nothing
    leave(1 << 20)
    save(3)
    assert checkpoint.latest(folder.checkpoints) == 3


def test_a_disk_that_may_not_be_written_is_refused_before_the_start(disk):
    from ray_trainer.errors import TrainerError
    from ray_trainer.run_dir import check_run_dir

    place, _ = disk
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    with pytest.raises(TrainerError, match="cannot write into"):
        check_run_dir(str(place / "run"), "raise")
