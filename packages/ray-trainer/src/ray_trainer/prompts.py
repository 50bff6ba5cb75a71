"""Prompts from files: checked when they are loaded, drawn as a function of (seed, step).

Which prompts a step sees depends on nothing but the seed and the step's number, so a resumed run needs no loader state.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

from model_specs.base import ModelSpec
from model_specs.errors import SpecError

from .assets import resolve
from .errors import TrainerError
from .model_folder import read_index

if TYPE_CHECKING:
    from omni_rollout.config import DiffusionPipelineConfig

    from .config import DataConfig


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
    """Read prompts from a file, a folder or `builtin:NAME`, or from a list of them, as `image_rewards.prompt_files` does.

    Raises:
        TrainerError: a file is missing or empty, or a line is broken; the message names the file and the line.
    """
    from image_rewards.errors import RewardError
    from image_rewards.prompt_files import read_prompts

    locations = [location] if isinstance(location, str) else location
    if "" in locations:
        raise TrainerError(
            "data.train_file or data.val_file names an empty file; give a file, a folder or a list of them"
        )
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


HELD_OUT_SHARE = 10
"""One text in this many validates when a training file comes without a validation file."""


def load_prompt_sets(data: DataConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Training prompts, and all held-out ones: of `data.val_file`, or, where it is empty, a tenth of the training file's texts:
    those with the smallest SHA-256, no more than `data.val_max_prompts`. A text that occurs twice is wholly on one side.

    Raises:
        TrainerError: a file cannot be used, or there is nothing to divide.
    """
    prompts = load_prompts(data.train_file)
    if data.val_file:
        return prompts, load_prompts(data.val_file)
    texts = sorted({p.text for p in prompts}, key=lambda text: hashlib.sha256(text.encode()).digest())
    if len(texts) < 2:
        raise TrainerError(
            f"data.train_file={data.train_file!r} holds one text, so none can be held out; give data.val_file=FILE (it may be the "
            "same file)"
        )
    held_out = set(texts[: min(max(len(texts) // HELD_OUT_SHARE, 1), data.val_max_prompts)])
    return [p for p in prompts if p.text not in held_out], [p for p in prompts if p.text in held_out]


class PromptSampler:
    """Prompts without replacement, `per_step` (P) a step, epoch after epoch, each epoch in its own order."""

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


def check_lengths(spec: ModelSpec, folder: Path, prompts: Iterable[Prompt], drawn: DiffusionPipelineConfig) -> None:
    """Refuse a prompt, or a negative one, that the model's encoder would refuse at the first step that draws it.

    No tokenizer here makes more tokens than the text has bytes, so most prompts are known to fit without loading one.

    Raises:
        TrainerError: the first one that is too long.
    """
    without_t5 = read_index(folder).get("text_encoder_3", True) in (None, [None, None])  # an SD3 that was saved so
    limit, check = drawn.max_sequence_length, None
    room = (min(limit, 77) if without_t5 else limit) - ROOM
    texts = [
        pair
        for p in prompts
        for pair in (
            (p.where, p.text),
            (f"{p.where}, negative prompt", drawn.negative_prompt if p.negative is None else p.negative),
        )
    ]
    for where, text in texts:
        if max(len(text.encode()), len(normalize("NFKC", text).encode())) <= room:
            continue
        try:
            check = check or spec.prompt_check(folder)
        except SpecError as error:
            raise TrainerError(f"the prompts' lengths cannot be checked: {error}") from error
        try:
            check(text, limit)
        except SpecError as error:
            raise TrainerError(f"{where}: {error}") from error
