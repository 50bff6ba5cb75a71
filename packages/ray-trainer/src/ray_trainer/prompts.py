"""Prompts from a JSON-lines file: checked when they are loaded, drawn as a function of (seed, step).

Which prompts a step sees depends on nothing but the seed and the step's number, so a resumed run needs no loader state.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from ray_trainer.assets import resolve
from ray_trainer.errors import TrainerError


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file. `uid` names the line, never its text: two lines with one text are two prompts."""

    uid: str
    text: str
    negative: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def load_prompts(location: str) -> list[Prompt]:
    """Read a prompt file.

    Args:
        location: path of a JSON-lines file, or `builtin:NAME`. Each line is an object with a non-empty string `prompt`, and
            optionally `negative_prompt` (string) and `metadata` (object).

    Raises:
        TrainerError: the file is missing or empty, or a line is broken; the message names the file and the line.
    """
    path = resolve("prompts", location)
    if not path.is_file():
        raise TrainerError(f"there is no prompt file {location!r}; give a path to a JSON-lines file as data.train_file")
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TrainerError(f"{where} is not JSON ({error.msg} at column {error.colno}): {line[:80]!r}") from error
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
            raise TrainerError(f'{where} needs a non-empty text under "prompt", got {line[:80]!r}')
        negative, metadata = row.get("negative_prompt"), row.get("metadata", {})
        if not isinstance(negative, str | None) or not isinstance(metadata, dict):
            raise TrainerError(f'{where}: "negative_prompt" must be a text and "metadata" an object, got {line[:80]!r}')
        unknown = set(row) - {"prompt", "negative_prompt", "metadata"}
        if unknown:
            raise TrainerError(f'{where} has unknown fields {sorted(unknown)}; put your own under "metadata"')
        prompts.append(Prompt(uid=f"line{number}", text=row["prompt"], negative=negative, metadata=metadata))
    if not prompts:
        raise TrainerError(f"prompt file {location!r} holds no prompt; write one JSON object a line")
    return prompts


class PromptSampler:
    """Prompts without replacement, epoch after epoch, each epoch in its own order.

    Args:
        prompts: what to draw from.
        per_step: P, prompts of one step.
        seed: of the order.
    """

    def __init__(self, prompts: list[Prompt], per_step: int, seed: int):
        if not 0 < per_step <= len(prompts):
            raise TrainerError(
                f"data.prompts_per_step={per_step} must lie between 1 and the {len(prompts)} prompts of data.train_file"
            )
        self.prompts, self.per_step, self.seed = prompts, per_step, seed

    def at(self, step: int) -> list[Prompt]:
        """The P prompts of training step `step` (0, 1, …). A remainder smaller than P at an epoch's end is left out."""
        epoch, position = divmod(step, len(self.prompts) // self.per_step)
        order = random.Random(f"{self.seed}/{epoch}").sample(range(len(self.prompts)), len(self.prompts))
        return [self.prompts[i] for i in order[position * self.per_step : (position + 1) * self.per_step]]
