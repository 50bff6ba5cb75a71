"""A full disk: the file, what is free and what is needed are named, the row of the step is kept, and a resume finds it."""

import errno

import pytest
from ray_trainer.failure import disk_full
from run_report import MetricsWriter, read_metrics


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/run/checkpoints/step_000004/x.safetensors"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_file_free_space_and_need_are_named(tmp_path, error):
    shard = tmp_path / "checkpoints" / "step_000002" / "weights" / "shard.safetensors"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"0" * 3 * 2**20)
    text = disk_full(error, tmp_path)
    assert f"the disk of {getattr(error, 'filename', None) or tmp_path} is full" in text
    assert "MiB are free, and a checkpoint of this run takes 3 MiB or more; make room, then resume" in text
    assert disk_full(ValueError("x"), tmp_path) == ""
    assert disk_full(OSError(errno.EACCES, "Permission denied"), tmp_path) == ""


def test_a_row_that_the_disk_cut_short_does_not_spoil_the_file(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.append(1, {"a": 1.0})
    with writer.path.open("a") as file:
        file.write('{"step": 2, "a"')
    with MetricsWriter(tmp_path) as again:
        again.append(2, {"a": 2.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
