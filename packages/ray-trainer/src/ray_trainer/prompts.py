"""Prompts from files: checked when they are loaded, drawn as a function of (seed, step).

Which prompts a step sees depends on nothing but the seed and the step's number, so a resumed run needs no loader state.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
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

    from .config import DataConfig, PromptSource


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file. `uid` names the line, never its text: two lines with one text are two prompts. `where` is the
    file and line for messages, `source` the name in `data.sources`, if it is of one."""

    uid: str
    text: str
    negative: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    source: str = ""
    folder: Path = Path()
    """Of that file (of a saved data set, its own), in which the files that the line names are looked for."""


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
        Prompt(
            f"{names[row.file]}line{row.number}",
            row.prompt,
            row.negative_prompt,
            row.metadata,
            row.where,
            folder=row.file if row.file.is_dir() else row.file.parent,
        )
        for row in rows
    ]


def load_prompt_sets(data: DataConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Training prompts, and all held-out ones: of `data.val_file`, or, where it is empty, a tenth of the training file's texts
    (`image_rewards.prompt_files.held_out`), no more than `data.val_max_prompts`.
    Of several sources the held-out ones come by turns, as far as each has some.

    Raises:
        TrainerError: a file cannot be used, or there is nothing to divide.
    """
    if not data.sources:
        return _prompt_sets("data", data, data)
    train: list[Prompt] = []
    held_out: list[list[Prompt]] = []
    for name, source in data.sources.items():
        # The name begins with a letter and a source's own uids with "line" or "file", so that no two prompts share one.
        both = [
            [replace(p, uid=f"{name}-{p.uid}", source=name) for p in prompts]
            for prompts in _prompt_sets(f"data.sources.{name}", source, data)
        ]
        train += both[0]
        held_out.append(both[1])
    return train, [p for turn in zip_longest(*held_out) for p in turn if p is not None]


def _prompt_sets(key: str, files: DataConfig | PromptSource, data: DataConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts of one source."""
    from image_rewards.prompt_files import held_out

    prompts = load_prompts(files.train_file)
    if files.val_file:
        return prompts, load_prompts(files.val_file)
    if len({p.text for p in prompts}) < 2:
        raise TrainerError(
            f"{key}.train_file={files.train_file!r} holds one text, so none can be held out: a run needs {data.prompts_per_step} "
            "prompts or more to train on (data.prompts_per_step) and others to validate with; add lines, or give "
            f"{key}.val_file=FILE (it may be the same file) and data.prompts_per_step={min(len(prompts), data.prompts_per_step)}"
        )
    chosen = held_out((p.text for p in prompts), most=data.val_max_prompts)
    return [p for p in prompts if p.text not in chosen], [p for p in prompts if p.text in chosen]


def counts(data: DataConfig) -> dict[str, int]:
    """How many of a step's prompts each source gives, the same in every step: its share, rounded by the largest remainder.

    Raises:
        TrainerError: a source would give none.
    """
    shares = {name: source.share for name, source in data.sources.items()} or {"": 1.0}
    exact = {name: data.prompts_per_step * share / sum(shares.values()) for name, share in shares.items()}
    found = {name: int(value) for name, value in exact.items()}
    late = sorted(exact, key=lambda name: found[name] - exact[name])
    for name in late[: data.prompts_per_step - sum(found.values())]:
        found[name] += 1
    for name, count in found.items():
        if not count:
            raise TrainerError(
                f"data.sources.{name}.share={shares[name]:g} of data.prompts_per_step={data.prompts_per_step} prompts is none; "
                "raise one of them"
            )
    return found


class PromptSampler:
    """Prompts without replacement, `data.prompts_per_step` (P) a step, epoch after epoch, each epoch in its own order.

    Several sources are drawn from side by side, each in its own order and epochs, and follow each other within a step.
    """

    def __init__(self, prompts: list[Prompt], data: DataConfig, seed: int):
        self.prompts, self.seed, self.counts = prompts, seed, counts(data)
        self._of = {name: [p for p in prompts if p.source == name] for name in self.counts}
        for name, count in self.counts.items():
            if count > len(self._of[name]):
                files = f"data.sources.{name}" if name else "data.train_file"
                share = f" ({count} of them from {files})" if name else ""
                raise TrainerError(
                    f"data.prompts_per_step={data.prompts_per_step}{share} must lie between 1 and {len(self._of[name])}, as "
                    f"many prompts of {files} are not held out for validation"
                )

    def at(self, step: int) -> list[Prompt]:
        """The P prompts of training step `step` (0, 1, …). A remainder smaller than a step's at an epoch's end is left out."""
        found: list[Prompt] = []
        for name, count in self.counts.items():
            prompts = self._of[name]
            epoch, position = divmod(step, len(prompts) // count)
            random_state = random.Random(f"{self.seed}/{epoch}/{name}" if name else f"{self.seed}/{epoch}")
            order = random_state.sample(range(len(prompts)), len(prompts))
            found += [prompts[i] for i in order[position * count : (position + 1) * count]]
        return found


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
