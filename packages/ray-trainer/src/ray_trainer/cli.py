"""The command line that both apps share: `APP [COMMAND] [recipe=NAME] [key=value …] [--dry-run] [--help]`; no command trains."""

from __future__ import annotations

import difflib
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion_losses.specs import find_loss, known_losses

from . import commands
from .app import App, parse
from .cluster import cluster_address, prepare_environment, ray_session
from .config import RunConfig, to_yaml
from .errors import Interrupted, TrainerError, TrainingFailed
from .interrupt import sigterm_interrupts
from .machines import check_machines
from .output import safe_output
from .placement import foresee
from .validate import validate_config

if TYPE_CHECKING:
    from .trainer import RayDiffusionTrainer


MAIN_KEYS = """\
  trainer.total_steps=100          length of the run            rollout.n=16              samples per prompt
  trainer.run_dir=FOLDER           where everything is written  data.prompts_per_step=6   prompts per step
  trainer.on_existing=resume       or delete, or raise          actor.optim.lr=1e-3       learning rate
  trainer.seed=0                   of everything random         model.lora_rank=16        size of the adapter
  model.path=FOLDER                or a Hugging Face Hub id     reward.name=ocr           any reward of image_rewards
  data.train_file=FILE             or a folder, or [a,b]        ray.address=auto          join a running Ray cluster"""


def _summary(recipe: Path) -> str:
    """A recipe's first comment line."""
    first = recipe.read_text(encoding="utf-8").splitlines()[:1]
    return first[0].removeprefix("#").strip() if first and first[0].startswith("#") else ""


def help_text(app: App) -> str:
    """What `--help` prints."""
    files = sorted(app.recipes.glob("*.yaml"))
    width = max(len(path.stem) for path in files)
    recipes = "\n".join(f"  {path.stem:<{width}}  {_summary(path)}" for path in files)
    told = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in commands.COMMANDS.items())
    return (
        f"{app.name}: {app.summary}\n\n"
        f"usage: {app.name} [recipe=NAME|FILE.yaml] [key=value …] [--dry-run|--quiet|--debug]   train\n"
        f"       {app.name} COMMAND …                                   one of those below; each has --help\n\n"
        f"commands:\n{told}\n\n"
        f"recipes (default {app.default}):\n{recipes}\n\n"
        f"keys that people change most (--dry-run prints them all):\n{MAIN_KEYS}\n\n"
        "--quiet says nothing but warnings, errors and the table at the end; --debug prints the traceback of an error\n\n"
        "exit codes: 0 done, 1 a step failed, 2 the input cannot be used, 130 interrupted (resumable)\n"
    )


def _no_command(name: str) -> str:
    known = ["train", *commands.COMMANDS]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"commands are {', '.join(known)}, and config keys are key=value"
    return f"{name!r} is no command; {hint}"


def _algorithm(app: App, config: RunConfig) -> type[RayDiffusionTrainer]:
    from .algorithms import find_algorithm

    return find_algorithm(config, app.trainer)


def _check_family(app: App, config: RunConfig) -> None:
    loss = config.actor.diffusion_loss
    if loss.family != app.family:
        own = [name for name in known_losses() if find_loss(name).family == app.family]
        raise TrainerError(
            f"actor.diffusion_loss.loss_mode={loss.loss_mode!r} is a {loss.family} loss and none of {app.name}'s: {', '.join(own)}"
        )


def run(app: App, argv: list[str] | None = None) -> int:
    """The program: returns its exit code. Bad input is one line on stderr and exit code 2, with nothing written."""
    prepare_environment()
    with safe_output():
        return _run(app, sys.argv[1:] if argv is None else argv)


def _run(app: App, argv: list[str]) -> int:
    quiet, debug = "--quiet" in argv, "--debug" in argv
    argv = [a for a in argv if a not in ("--quiet", "--debug")]
    try:
        if argv and not argv[0].startswith("-") and "=" not in argv[0]:
            name, argv = argv[0], argv[1:]
            if name in commands.COMMANDS:
                return commands.find(name)(app, argv)
            if name != "train":
                raise TrainerError(_no_command(name))
        config, dry_run = parse(app, argv)
        if config is None:
            print(help_text(app), end="")
            return 0
        _check_family(app, config)
        plan = validate_config(config)
        if config.trainer.algorithm or config.algorithm.options:
            _algorithm(app, config)  # the program's own is not imported for a check: it needs torch
        if dry_run:
            print(to_yaml(config) + "".join(f"# {line}\n" for line in [*plan, *foresee(config)]), end="")
            return 0
        shown = [line for line in plan if not quiet or line.startswith("warning")]
        print("".join(f"{line}\n" for line in shown), end="", flush=True)
        with sigterm_interrupts(), ray_session(config.ray), sigterm_interrupts():
            if cluster_address(config.ray):
                check_machines(config)
            trainer = _algorithm(app, config)(config)
            trainer.quiet = quiet
            trainer.fit()
        return 0
    except (TrainerError, OSError) as error:
        if debug:
            traceback.print_exception(error, file=sys.stderr)
        print(f"{app.name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print(f"{app.name}: {stop}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print(
            f"{app.name}: stopped at once; trainer.on_existing=resume goes on from the last checkpoint, if there is one",
            file=sys.stderr,
        )
        return 130
    except TrainingFailed as failure:
        if debug:
            traceback.print_exception(failure, file=sys.stderr)
        print(f"{app.name}: failed: {failure}", file=sys.stderr)
        return 1
    except Exception as error:  # nobody foresaw it
        from .failure import words

        if debug:
            traceback.print_exception(error, file=sys.stderr)
        hint = "" if debug else "; --debug prints its traceback"
        print(f"{app.name}: failed: {words(error)}{hint}", file=sys.stderr)
        return 1
