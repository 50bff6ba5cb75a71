"""The real libraries, offline: what was sent is read back, a run that goes on is the same one, and no key is written anywhere."""

import json
import struct
import time
from contextlib import suppress
from unittest.mock import Mock

import numpy as np
import pytest
from run_report import trackers
from run_report.errors import ReportError
from run_report.gallery import load_validation, save_validation
from run_report.trackers import OPENERS, Trackers

CANARY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder with one validation; every library offline, with a key that must not be seen again."""
    for name in ("MLFLOW_TRACKING_URI", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv(
        "TRACKIO_DIR", str(tmp_path / "trackio")
    )  # it is read when trackio is imported, which only happens here
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", CANARY)
    monkeypatch.setenv("HF_TOKEN", CANARY)
    pictures = np.random.default_rng(0).integers(0, 256, (2, 3, 8, 8), dtype=np.uint8)
    record = {"prompt": "p", "uid": "u", "reward": 1.0, "components": {}}
    folder = tmp_path / "run"
    save_validation(folder, 1, pictures, [{**record, "seed": 0}, {**record, "seed": 1}])
    return folder


def send(run, name, steps, note=print):
    config = {"trainer": {"seed": 3}}
    opened = Trackers(
        [name], run, project="test", config=config, config_text="seed: 3\n", first_step=steps[0], note=note
    )
    for step in steps:
        opened.row(step, {"step": step, "reward/mean": step / 10, "broken": float("nan"), "empty": None})
        if step == 1:
            opened.picture(step, load_validation(run / "samples" / "step_000001").folder / "grid.png")
    opened.close()


def read_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "trackers" / "tensorboard"))
    read.Reload()
    assert read.Tags()["scalars"] == ["reward/mean"]
    assert read.Images("samples")[0].encoded_image_string == (run / "samples" / "step_000001" / "grid.png").read_bytes()
    assert b"seed: 3" in read.Tensors("config")[0].tensor_proto.string_val[0]
    return {(event.step, round(event.value, 6)) for event in read.Scalars("reward/mean")}


def read_mlflow(run):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run / "trackers" / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("test").experiment_id])
    assert found.info.status == "FINISHED"
    assert [one.path for one in client.list_artifacts(found.info.run_id, "samples/step_000001")] == [
        "samples/step_000001/grid.png"
    ]
    assert "config.yaml" in [one.path for one in client.list_artifacts(found.info.run_id)]
    return {(m.step, round(m.value, 6)) for m in client.get_metric_history(found.info.run_id, "reward/mean")}


def read_trackio(run):
    import trackio

    (found,) = trackio.Api().runs("test")
    assert found.config["trainer"] == {"seed": 3}
    values = trackio.SQLiteStorage.get_logs("test", run_id=found.id)
    assert sum("samples" in row for row in values) == 1
    return {(row["step"], round(row["reward/mean"], 6)) for row in values if "reward/mean" in row}


def wandb_records(file):
    """The records of a .wandb file: LevelDB's log, blocks of 32 KiB after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole, place = whole + data[place + 7 : place + 7 + length], place + 7 + length
        if kind in (1, 4):  # full, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def read_wandb(run):
    import wandb

    wandb.teardown()  # its own process writes the last blocks when it ends
    rows, ids, pictures = set(), set(), 0
    for file in (run / "trackers" / "wandb").glob("offline-run-*/*.wandb"):
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                assert config["trainer"] == {"seed": 3}
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            pictures += any(key.split("/")[0] == "samples" for key in items)
            if "reward/mean" in items:
                rows.add((int(items["step"]), round(json.loads(items["reward/mean"]), 6)))
    assert len(ids) == 1  # the same run before and after
    assert pictures == 1
    return rows


@pytest.mark.parametrize("name", OPENERS)
def test_what_was_sent_is_there_and_a_run_that_goes_on_is_the_same(name, run, tmp_path, monkeypatch):
    pytest.importorskip(name)
    send(run, name, [1, 2, 3])
    if name == "wandb":
        time.sleep(1.1)  # it names a folder by the second
    send(run, name, [3, 4])  # the third row was sent before its checkpoint was written: it comes again
    rows = globals()[f"read_{name}"](run)
    assert rows == {(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)}
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [file for file in written if CANARY.encode() in file.read_bytes()]


class Broken:
    def __init__(self, *_):
        self.rows = 0

    def row(self, step, numbers):
        raise OSError("the network is away")

    picture = row

    def close(self, failed):
        pass


def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(run, monkeypatch):
    monkeypatch.setitem(trackers.OPENERS, "wandb", Broken)
    said = []
    send(run, "wandb", [1, 2, 3], said.append)
    assert said == ["warning: tracker wandb failed and gets nothing more (OSError: the network is away)"]


@pytest.mark.parametrize("failed", [False, True])
def test_a_failed_run_is_shown_as_failed(run, monkeypatch, failed):
    wandb, mlflow = (object.__new__(OPENERS[name]) for name in ("wandb", "mlflow"))
    wandb._run, mlflow._run, mlflow._client = Mock(), "id", Mock()
    monkeypatch.setitem(trackers.OPENERS, "wandb", lambda *_: wandb)
    monkeypatch.setitem(trackers.OPENERS, "mlflow", lambda *_: mlflow)
    opened = Trackers(["wandb", "mlflow"], run, project="test", config={}, config_text="", first_step=1)
    with suppress(RuntimeError), opened:
        if failed:
            raise RuntimeError("out of memory")
    wandb._run.finish.assert_called_once_with(exit_code=int(failed))
    mlflow._client.set_terminated.assert_called_once_with("id", "FAILED" if failed else "FINISHED")


def test_a_password_in_an_address_is_not_repeated(run, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{CANARY}@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ReportError, match=r"tracker mlflow cannot be opened .*http://…@127.0.0.1:9") as refused:
        send(run, "mlflow", [1])
    assert CANARY not in str(refused.value)


def test_one_that_cannot_be_opened_is_an_error(run, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no key")

    monkeypatch.setitem(trackers.OPENERS, "wandb", refuse)
    with pytest.raises(ReportError, match="tracker wandb cannot be opened .*no key.*trainer.trackers"):
        send(run, "wandb", [1])
