"""The folder of a run: who may write into it, and what lies where.

config.yaml      resolved config          metrics.jsonl   one row per step
samples/         pictures of each validation               report.html     the whole run on one page
checkpoints/     step_000040/ …           lora/           what diffusers' load_lora_weights loads; lora_ema/ its average
transformer/     in place of lora/ where all weights were trained (and transformer_ema/)
failures/        a step that failed, or error.txt            inputs.json     hashes of its prompts
trackers/        what tensorboard, wandb and mlflow keep
changes.jsonl    what a resumed run does otherwise           watchdog.jsonl  alarms; environment.json
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from yaml import MappingNode, Node

from .errors import TrainerError
from .values import read_yaml, section

_STEP = r"\.?step_\d+(\.\w+)?"
_OURS = re.compile(
    r"(config\.yaml|(metrics|changes|watchdog)\.jsonl|report\.html|inputs\.json)(\.tmp)?|environment\.json"
    rf"|samples/{_STEP}/(grid\.png|index\.json|full/\d+\.(png|mp4))"
    rf"|checkpoints/(latest\.(json|tmp)|{_STEP}/([\w.-]+/)*[\w.-]+\.(safetensors|json|metadata|distcp|tmp))"
    r"|lora(_ema)?/(transformer_2/)?\.?pytorch_lora_weights\.safetensors(\.\d+\.tmp)?"
    r"|transformer(_ema)?/(transformer_2/|transformer/)?[\w.-]+\.(safetensors|json)"
    r"|trackers/(id|tensorboard/events\.out\.tfevents\.[\w.-]+|(wandb|mlruns)/.+)"
    r"|failures/(error\.txt|step_\d+/[\w.-]+\.(txt|json|safetensors))"
)
"""Every file that a run writes, by its path inside the folder: what `delete` may remove."""


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
        TrainerError: a folder that exists under `raise`, that is not a run under `resume` or `delete`,
            or that cannot be written.
    """
    folder = Path(path)
    try:
        exists = folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir())))
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise TrainerError(f"trainer.run_dir={path!r} cannot be a folder: {error.strerror}") from error
    if exists and not (folder / "config.yaml").is_file():
        raise TrainerError(
            f"trainer.run_dir={path!r} exists and is no run folder (it has no config.yaml); choose another trainer.run_dir"
        )
    if exists and on_existing == "raise":
        raise TrainerError(
            f"run folder {path!r} exists; add trainer.on_existing=resume to go on with it, trainer.on_existing=delete to "
            "start over, or choose another trainer.run_dir"
        )
    if exists and on_existing == "delete":
        _check_ours(folder)
    # The nearest existing ancestor must let us in. Asking the file system beats reading permission bits: root passes those.
    parent = folder
    while not parent.exists():
        parent = parent.parent
    try:
        probe = parent / f".write-probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise TrainerError(
            f"cannot write into {str(parent)!r} ({error.strerror}), where run folder {path!r} would be; "
            "choose another place with trainer.run_dir=FOLDER"
        ) from error


def is_config(node: Node) -> bool:
    """Whether a document is a `config.yaml` as runs write it."""
    return isinstance(node, MappingNode) and {"app", "model", "actor", "rollout", "trainer"} <= set(section(node))


def _why_not_ours(folder: Path) -> str:
    """Why the folder may not be deleted; empty when it is a run of this program and holds nothing else."""
    whole, here = folder.resolve(), Path.cwd().resolve()
    if folder.is_symlink():
        return f"it is a link to {str(whole)!r}; give that folder itself, or another trainer.run_dir"
    if whole in (here, *here.parents) or os.path.ismount(folder):
        return "it holds the working folder, or is a disk of its own; choose another trainer.run_dir"
    if not is_config(read_yaml(folder / "config.yaml", str(folder / "config.yaml"))):
        return "its config.yaml is not one that a run wrote; move it away, or choose another trainer.run_dir"
    for place, folders, files in os.walk(folder):
        for name in files + [name for name in folders if os.path.islink(os.path.join(place, name))]:
            inside = Path(place, name).relative_to(folder).as_posix()
            linked = os.path.islink(folder / inside) and not inside.startswith("trackers/wandb/")  # to its own log
            if linked or not _OURS.fullmatch(inside):
                return f"{inside!r} in it was not written by a run; move it away, or choose another trainer.run_dir"
    return ""


def _check_ours(folder: Path) -> None:
    if why := _why_not_ours(folder):
        raise TrainerError(f"trainer.on_existing=delete does not remove {str(folder)!r}: {why}")


def open_run_dir(path: str, on_existing: str) -> RunDir:
    """Create, clear or reopen the folder; `resume.begin` then writes what the run is made of. Call `check_run_dir` first."""
    folder = Path(path)
    if on_existing == "delete" and (folder / "config.yaml").is_file():
        _check_ours(folder)  # again: time has passed since the first look
        shutil.rmtree(folder)
    resuming = on_existing == "resume" and (folder / "config.yaml").is_file()
    folder.mkdir(parents=True, exist_ok=True)
    return RunDir(folder, resuming)
