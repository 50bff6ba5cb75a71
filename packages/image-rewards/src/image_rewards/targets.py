"""Check every target of a prompt file before training spends an hour on the first bad one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from image_rewards.base import Reward
from image_rewards.errors import RewardTargetError

SHOWN = 20  # bad lines listed in one error


def read_prompts(path: str | Path) -> list[tuple[int, str, dict[str, Any]]]:
    """(line number, prompt, metadata) of every line of a JSON-lines file. Raises `RewardTargetError` with file and
    line."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RewardTargetError(f"{path}:{number}: not JSON: {error}") from error
        prompt = row.get("prompt") if isinstance(row, dict) else None
        metadata = row.get("metadata", {}) if isinstance(row, dict) else None
        if not isinstance(prompt, str) or not isinstance(metadata, dict):
            raise RewardTargetError(
                f"{path}:{number}: {line[:80]!r} is not of the form "
                '{"prompt": "...", "metadata": {...}}, with metadata optional.'
            )
        rows.append((number, prompt, metadata))
    return rows


def check_prompt_file(reward: Reward, path: str | Path) -> int:
    """Check each line's target against `reward` and return how many lines there are.

    Raises one `RewardTargetError` that lists the bad lines, each as file:line: reason.
    """
    rows = read_prompts(path)
    check_prompts(reward, ((f"{path}:{number}", prompt, metadata) for number, prompt, metadata in rows))
    return len(rows)


def check_prompts(reward: Reward, prompts: Iterable[tuple[str, str, Mapping[str, Any]]]) -> None:
    """The same for prompts from anywhere: (where, prompt, metadata)."""
    bad = []
    for where, prompt, metadata in prompts:
        try:
            reward.check_target(prompt, metadata)
        except RewardTargetError as error:
            bad.append(f"{where}: {error}")
    if bad:
        more = f"\n... and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise RewardTargetError(f"{len(bad)} prompts have no usable target:\n" + "\n".join(bad[:SHOWN]) + more)
