"""metrics.jsonl: what is written, what survives a kill, what a resume drops."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
from run_report import MetricsWriter, ReportError, read_metrics


def test_rows_come_back_in_order_with_their_numbers(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        writer.append(0, {"val/strict_mean": 0.419})
        writer.append(1, {"reward/mean": np.float32(0.5), "count": 3, "flag": True})
    rows = read_metrics(tmp_path / "run")
    assert rows == [{"step": 0, "val/strict_mean": 0.419}, {"step": 1, "reward/mean": 0.5, "count": 3, "flag": 1.0}]
    assert list(rows[1]) == ["step", "reward/mean", "count", "flag"]


def test_same_rows_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        with MetricsWriter(tmp_path / name) as writer:
            writer.append(1, {"x": 1 / 3, "y": 2e-9})
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()


def test_a_row_is_on_disk_before_append_returns(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.append(1, {"x": 1.0})
    assert len(read_metrics(tmp_path)) == 1  # read through another handle, the writer still open
    writer.close()


def test_non_finite_values_become_null_and_are_counted(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        row = writer.append(1, {"a": math.nan, "b": math.inf, "c": 1.0})
        assert writer.non_finite == 2
    assert row == {"step": 1, "a": None, "b": None, "c": 1.0, "metrics/non_finite": 2}
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    (back,) = read_metrics(tmp_path)
    assert math.isnan(back["a"])
    assert math.isnan(back["b"])
    assert back["c"] == 1.0


@pytest.mark.parametrize("value", ["0.5", None, [1.0, 2.0], object()])
def test_what_is_no_number_is_refused_by_name(tmp_path, value):
    with MetricsWriter(tmp_path) as writer, pytest.raises(ReportError, match="'actor/loss'"):
        writer.append(1, {"actor/loss": value})
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("step", [3, 2])
def test_a_step_is_written_once(tmp_path, step):
    with MetricsWriter(tmp_path) as writer:
        writer.append(3, {"x": 1.0})
        with pytest.raises(ReportError, match="steps must increase"):
            writer.append(step, {"x": 2.0})


def test_truncate_then_append_gives_the_rows_of_an_uninterrupted_run(tmp_path):
    with MetricsWriter(tmp_path / "straight") as writer:
        for step in range(6):
            writer.append(step, {"x": step * 0.1})
    with MetricsWriter(tmp_path / "resumed") as writer:
        for step in range(5):
            writer.append(step, {"x": step * 0.1})
    with MetricsWriter(tmp_path / "resumed") as writer:
        assert writer.last_step == 4
        assert writer.truncate_after(2) == 2
        for step in range(3, 6):
            writer.append(step, {"x": step * 0.1})
    straight, resumed = (tmp_path / name / "metrics.jsonl" for name in ("straight", "resumed"))
    assert straight.read_bytes() == resumed.read_bytes()


def test_a_torn_last_row_is_left_out_and_cut_off(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.append(1, {"x": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "x": 0.')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    with MetricsWriter(tmp_path) as writer:
        writer.append(2, {"x": 2.0})
    assert [json.loads(line)["x"] for line in path.read_text().splitlines()] == [1.0, 2.0]


@pytest.mark.parametrize("broken", ["{oops}", "[1, 2]", '{"x": 1.0}', "3"])
def test_a_broken_row_in_the_middle_names_its_line(tmp_path, broken):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{broken}\n{{"step": 3}}\n')
    with pytest.raises(ReportError, match="line 2"):
        read_metrics(tmp_path)


def test_no_file_is_no_rows_and_errors_pickle(tmp_path):
    assert read_metrics(tmp_path / "nowhere") == []
    error = pickle.loads(pickle.dumps(ReportError("what, why, how")))
    assert isinstance(error, ValueError)
    assert str(error) == "what, why, how"
