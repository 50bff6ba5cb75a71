"""The folder of a run: who may write into it, and what lies where.

config.yaml      resolved config          metrics.jsonl   one row per step
samples/         pictures of each validation               report.html     the whole run on one page
checkpoints/     step_000040/ …           lora/           what diffusers' load_lora_weights loads
failures/        the state of a step that failed
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ray_trainer.errors import TrainerError

POLICIES = ("raise", "resume", "delete")


class RunDir:
    """An opened run folder. `resuming` says whether it held a run before."""

    def __init__(self, path: Path, resuming: bool):
        self.path, self.resuming = path, resuming

    config = property(lambda self: self.path / "config.yaml")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    checkpoints = property(lambda self: self.path / "checkpoints")
    lora = property(lambda self: self.path / "lora")
    report = property(lambda self: self.path / "report.html")
    failures = property(lambda self: self.path / "failures")


def check_run_dir(path: str, on_existing: str) -> None:
    """Everything about the folder that can be refused without writing anything.

    Raises:
        TrainerError: an unknown policy, a folder that exists under `raise`, that is not a run under `resume` or `delete`,
            or that cannot be written.
    """
    if on_existing not in POLICIES:
        raise TrainerError(f"trainer.on_existing={on_existing!r} must be one of {', '.join(POLICIES)}")
    folder = Path(path)
    exists = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if exists and on_existing == "raise":
        raise TrainerError(
            f"run folder {path!r} exists; add trainer.on_existing=resume to go on with it, trainer.on_existing=delete to "
            "start over, or choose another trainer.run_dir"
        )
    if exists and not (folder / "config.yaml").is_file():
        raise TrainerError(
            f"{path!r} exists and is no run folder (it has no config.yaml); choose another trainer.run_dir"
        )
    # The nearest existing ancestor must let us in. Asking the file system beats reading permission bits: root passes those.
    parent = folder
    while not parent.exists():
        parent = parent.parent
    try:
        probe = parent / f".write-probe-{folder.name}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise TrainerError(
            f"cannot write into {str(parent)!r} ({error.strerror}), where run folder {path!r} would be; "
            "choose another place with trainer.run_dir=FOLDER"
        ) from error


def open_run_dir(path: str, on_existing: str, config_yaml: str) -> RunDir:
    """Create, clear or reopen the folder and write `config.yaml` into it. Call `check_run_dir` first."""
    folder = Path(path)
    if on_existing == "delete" and folder.exists():
        shutil.rmtree(folder)
    resuming = on_existing == "resume" and (folder / "config.yaml").is_file()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config_yaml, encoding="utf-8")
    return RunDir(folder, resuming)
