"""Check every target of a prompt file before training spends an hour on the first bad one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .base import Reward
from .errors import RewardTargetError

SHOWN = 20  # bad lines listed in one error


def check_prompts(reward: Reward, prompts: Iterable[tuple[str, str, Mapping[str, Any]]]) -> None:
    """Check each prompt's target against `reward`; prompts are (where, prompt, metadata).

    Raises one `RewardTargetError` that lists the bad ones, each as where: reason.
    """
    bad = []
    for where, prompt, metadata in prompts:
        try:
            reward.check_target(prompt, metadata)
        except RewardTargetError as error:
            bad.append(f"{where}: {error}")
    if bad:
        more = f"\n... and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise RewardTargetError(f"{len(bad)} prompts have no usable target:\n" + "\n".join(bad[:SHOWN]) + more)
