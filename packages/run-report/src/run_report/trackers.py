"""Trackers: where a run's rows, sample pictures and config also go. `metrics.jsonl` has every row whatever they do.

    tensorboard  files in `trackers/tensorboard`: `tensorboard --logdir RUN`
    wandb        as its own environment variables say (WANDB_API_KEY, WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY …)
    trackio      its local database: `trackio show`; TRACKIO_DIR, TRACKIO_SPACE_ID as trackio reads them
    mlflow       MLFLOW_TRACKING_URI, else files in `trackers/mlruns`

Nothing here reads or stores a key: the libraries take theirs from where each always does. A run has one id, `trackers/id`, by which
it is found again when it goes on. Each library is imported only where it is asked for; they are extras of the same names.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from PIL import Image

from .errors import ReportError

FOLDER = "trackers"


class Tracker(Protocol):
    """One opened tracker."""

    def row(self, step: int, numbers: Mapping[str, float]) -> None:
        """The finite numbers of a step."""

    def picture(self, step: int, file: Path) -> None:
        """The grid of a validation's pictures, a PNG."""

    def close(self, failed: bool) -> None:
        """Send what is left, and say how the run ended, where the tracker shows that."""


def missing_trackers(names: Sequence[str]) -> list[str]:
    """Those whose library is not installed."""
    return [name for name in names if find_spec(name) is None]


class Trackers:
    """The trackers of a run. One that fails is named once and left out from then on; the run goes on without it.

    Args:
        names: of `OPENERS`.
        run_dir: folder of the run.
        project: the program.
        config: of the run, resolved.
        config_text: the same as a person reads it.
        first_step: the first whose row will come; later ones that an interrupted run has sent before are sent again.
        note: where a line for a person goes.

    Raises:
        ReportError: a tracker cannot be opened.
    """

    def __init__(
        self,
        names: Sequence[str],
        run_dir: str | os.PathLike[str],
        *,
        project: str,
        config: Mapping[str, Any],
        config_text: str,
        first_step: int,
        note: Callable[[str], None] = print,
    ) -> None:
        self.note = note
        self._open: dict[str, Tracker] = {}
        if not names:
            return
        folder = Path(run_dir) / FOLDER
        folder.mkdir(exist_ok=True)
        known = folder / "id"
        resumed = known.is_file()
        if not resumed:
            known.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        run = known.read_text(encoding="utf-8").strip()
        name = f"{Path(run_dir).resolve().name}-{run}"
        for one in names:
            try:
                self._open[one] = OPENERS[one](folder, project, name, run, config, config_text, first_step)
            except Exception as error:
                self.close(failed=True)
                raise ReportError(
                    f"tracker {one} cannot be opened ({_words(error)}); mend that, or leave it out of trainer.trackers"
                ) from error

    def row(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Send a row; what is not a finite number is left out."""
        numbers = {key: float(v) for key, v in metrics.items() if v is not None and math.isfinite(v) and key != "step"}
        self._each(lambda tracker: tracker.row(step, numbers))

    def picture(self, step: int, file: Path) -> None:
        """Send the grid of a validation."""
        self._each(lambda tracker: tracker.picture(step, file))

    def close(self, failed: bool = False) -> None:
        """Send what is left, and end, as a run that failed or as one that did not."""
        self._each(lambda tracker: tracker.close(failed))
        self._open = {}

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            try:
                act(tracker)
            except Exception as error:
                del self._open[name]
                self.note(f"warning: tracker {name} failed and gets nothing more ({_words(error)})")


def _words(error: Exception) -> str:
    """An error in one line, without the user and password of an address that a library repeats."""
    said = re.sub(r"//[^/@\s]*@", "//…@", " ".join(str(error).split()))
    return f"{type(error).__name__}: {said[:300]}"


class _TensorBoard:
    def __init__(
        self, folder: Path, project: str, name: str, run: str, config: Mapping[str, Any], text: str, first: int
    ) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(folder / "tensorboard"))
        # It lets the reader drop what an interrupted run sent for these steps.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=first, session_log=start))
        kind = summary_pb2.SummaryMetadata(plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text"))
        lines = "".join(f"    {line}\n" for line in text.splitlines())  # indented: a block of code
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[lines.encode()])
        self._add(first, summary_pb2.Summary.Value(tag="config", metadata=kind, tensor=tensor))

    def _add(self, step: int, *values: Any) -> None:
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))

    def row(self, step: int, numbers: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        self._add(step, *(value(tag=key, simple_value=number) for key, number in numbers.items()))
        self._writer.flush()

    def picture(self, step: int, file: Path) -> None:
        with Image.open(file) as image:
            width, height = image.size
        content = self._summaries.Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=file.read_bytes()
        )
        self._add(step, self._summaries.Summary.Value(tag="samples", image=content))

    def close(self, failed: bool) -> None:
        self._writer.close()


class _WandB:
    def __init__(
        self, folder: Path, project: str, name: str, run: str, config: Mapping[str, Any], text: str, first: int
    ) -> None:
        import wandb

        self._wandb = wandb
        settings = wandb.Settings(console="off", silent=True, symlink=False)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or project,
            name=name,
            id=run,
            resume="allow",
            dir=folder,
            config=dict(config),
            settings=settings,
        )
        # Rows that are sent again have a step that wandb's own counter has passed.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def row(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def picture(self, step: int, file: Path) -> None:
        self._run.log({"step": step, "samples": self._wandb.Image(str(file))})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio:
    def __init__(
        self, folder: Path, project: str, name: str, run: str, config: Mapping[str, Any], text: str, first: int
    ) -> None:
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=project, name=name, config=dict(config), resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )  # fmt: skip

    def row(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def picture(self, step: int, file: Path) -> None:
        with Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB"))
        self._run.log({"samples": self._trackio.Image(pixels)}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


class _MLflow:
    MOST = 1000
    """Metrics of one call."""

    def __init__(
        self, folder: Path, project: str, name: str, run: str, config: Mapping[str, Any], text: str, first: int
    ) -> None:
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            address = (folder / "mlruns").resolve().as_uri()
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric, self._client = Metric, MlflowClient(tracking_uri=address)
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        before = self._client.search_runs([experiment], f"tags.run_id_of_folder = '{run}'")
        if before:
            self._run = before[0].info.run_id
            self._client.set_terminated(self._run, "RUNNING")
        else:
            made = self._client.create_run(experiment, run_name=name, tags={"run_id_of_folder": run})
            self._run = made.info.run_id
        self._client.log_text(self._run, text, "config.yaml")

    def row(self, step: int, numbers: Mapping[str, float]) -> None:
        now, items = int(time.time() * 1000), list(numbers.items())
        for start in range(0, len(items), self.MOST):
            part = [self._metric(key, number, now, step) for key, number in items[start : start + self.MOST]]
            self._client.log_batch(self._run, metrics=part)

    def picture(self, step: int, file: Path) -> None:
        self._client.log_artifact(self._run, str(file), f"samples/step_{step:06d}")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


OPENERS: dict[str, Callable[..., Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WandB,
    "trackio": _Trackio,
    "mlflow": _MLflow,
}
"""What a run's config may name."""
