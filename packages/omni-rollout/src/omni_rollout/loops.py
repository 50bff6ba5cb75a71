"""Agent loops by name. Imports without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import RolloutConfigError

if TYPE_CHECKING:
    from .loop_base import DiffusionAgentLoop

LOOPS = {
    "diffusion_single_turn_agent": "omni_rollout.agent_loop:DiffusionSingleTurnAgentLoop",
    "diffusion_judge_edit_agent": "omni_rollout.edit_loop:DiffusionJudgeEditAgentLoop",
}


def get_agent_loop(name: str) -> type[DiffusionAgentLoop]:
    """The agent loop of that name in `LOOPS`, or of a `module:Class`.

    Raises:
        RolloutConfigError: there is none, or it is no `DiffusionAgentLoop`.
    """
    from .loop_base import DiffusionAgentLoop

    module, _, attribute = LOOPS.get(name, name).partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # TypeError: a name that begins with a dot
        raise RolloutConfigError(
            f"agent loop {name!r} is neither one of {', '.join(LOOPS)} nor a module:Class that can be imported: {error}."
        ) from error
    if not (isinstance(found, type) and issubclass(found, DiffusionAgentLoop)):
        raise RolloutConfigError(f"agent loop {name!r} is {found!r}, which is no subclass of DiffusionAgentLoop.")
    return found
