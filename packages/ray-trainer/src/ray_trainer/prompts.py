"""Prompts from files: checked when they are loaded, drawn as a function of (seed, step).

Which prompts a step sees depends on nothing but the seed and the step's number, so a resumed run needs no loader state.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unicodedata import normalize

from ray_trainer.assets import resolve
from ray_trainer.errors import TrainerError
from ray_trainer.model_folder import read_index


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file. `uid` names the line, never its text: two lines with one text are two prompts. `where` is the
    file and line for messages."""

    uid: str
    text: str
    negative: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    where: str = ""


def load_prompts(location: str | list[str]) -> list[Prompt]:
    """Read prompt files.

    Args:
        location: a file, a folder or `builtin:NAME`, or a list of them; `image_rewards.prompt_files` says which kinds of files are
            read and what their fields mean.

    Raises:
        TrainerError: a file is missing or empty, or a line is broken; the message names the file and the line.
    """
    from image_rewards.errors import RewardError
    from image_rewards.prompt_files import read_prompts

    locations = [location] if isinstance(location, str) else location
    try:
        rows = read_prompts([resolve("prompts", name) for name in locations])
    except RewardError as error:
        raise TrainerError(str(error)) from error
    files = list(dict.fromkeys(row.file for row in rows))
    # The first file's lines are named as if it were alone, so that adding a file leaves their noise as it was.
    names = {file: f"file{i + 1}-" if i else "" for i, file in enumerate(files)}
    return [
        Prompt(f"{names[row.file]}line{row.number}", row.prompt, row.negative_prompt, row.metadata, row.where)
        for row in rows
    ]


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


ROOM = 32
"""Tokens that templates and end marks may add to a prompt's own."""


def check_lengths(folder: Path, texts: Iterable[tuple[str, str, int]]) -> None:
    """Refuse a prompt that the model's encoder would refuse at the first step that draws it.

    No tokenizer here makes more tokens than the text has bytes, so most prompts are known to fit without loading one.

    Args:
        folder: of the pipeline.
        texts: (where, prompt or negative prompt, max_sequence_length) of each.

    Raises:
        TrainerError: the first one that is too long.
    """
    clip_only = read_index(folder).get("text_encoder_3", True) in (
        None,
        [None, None],
    )  # an SD3 that was saved without its T5
    long = [
        (where, text, limit)
        for where, text, limit in texts
        if max(len(form.encode()) for form in (text, normalize("NFKC", text))) + ROOM
        > (min(limit, 77) if clip_only else limit)
    ]
    if not long:
        return
    from model_specs import get_spec_for
    from model_specs.errors import SpecError

    try:
        check = get_spec_for(folder).prompt_check(folder)
    except SpecError as error:
        raise TrainerError(f"the prompts' lengths cannot be checked: {error}") from error
    for where, text, limit in dict.fromkeys(long):
        try:
            check(text, limit)
        except SpecError as error:
            raise TrainerError(f"{where}: {error}") from error
