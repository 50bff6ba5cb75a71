"""`report RUN`: write RUN/report.html again from the files of the run, while it runs or at any time after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..compose import compose
from ..config import RunConfig
from ..errors import TrainerError
from ..report import rebuild
from ..values import free, read_yaml

if TYPE_CHECKING:
    from ..app import App


def main(app: App, arguments: list[str]) -> int:
    """Write the report and print where it is."""
    if arguments in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    from run_report import ReportError

    run = run_folder(arguments)
    try:
        print(rebuild(run))
    except ReportError as error:
        raise TrainerError(f"{run}: {error}") from error
    return 0


def run_folder(arguments: list[str]) -> Path:
    """The one folder that a command is given, which must be of a run."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise TrainerError(f"give one run folder, not {' '.join(arguments) or 'nothing'}; runs lie in runs/ by default")
    run = Path(arguments[0]).expanduser()
    if not (run / "config.yaml").is_file():
        raise TrainerError(
            f"{arguments[0]!r} is no folder of a run (no config.yaml in it); give the run's trainer.run_dir"
        )
    return run


def run_config(app: App, run: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a run folder, under the name of its recipe."""
    config = compose(app.name, run / "config.yaml", list(overrides))
    written = free(read_yaml(run / "config.yaml", "config.yaml"), "config.yaml", "the run folder")
    config.recipe = str(written.get("recipe", config.recipe))
    return config
