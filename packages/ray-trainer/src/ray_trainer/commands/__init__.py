"""Commands beside training: `PROGRAM COMMAND …`. Each is a module here with a `main(app, arguments)` that returns the exit code.

A module is imported when its command is typed, so none of them makes another one slow.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..app import App

COMMANDS = {
    "doctor": "check machine, model, prompts, reward and config: ok, warn or fail, with remedies; exit code 0, 1 or 2",
    "plan": "memory per GPU, seconds of each phase, images/s and dollars of a run that has not begun; what would not fit",
    "report": "write RUN/report.html again from its files, during a run or after",
    "export": "RUN --to diffusers|peft|comfyui|merged: what was trained, loaded again by that library and compared",
    "compare": "A B: two adapters (or base) on the same prompts and seeds: paired scores, a page of pictures with a slider",
}
"""Name of each and what it does, in a line."""


def find(name: str) -> Callable[[App, list[str]], int]:
    """The function behind a name of `COMMANDS`."""
    main: Any = import_module(f"{__name__}.{name}").main
    return main  # type: ignore[no-any-return]
