"""`prompts check` and `prompts split`: look at prompt files before training, and hold prompts out for validation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from .base import Reward
from .errors import PromptFileError, RewardTargetError, require
from .prompt_files import PromptRow, held_out, prompt_files, read_prompts, rows_and_problems

SHOWN = 3
"""First prompts, repeated texts, and targets that are printed; of problems ten times as many."""
FILES = ("chosen", "rejected", "image", "file_name")
"""Fields that name files by paths in the prompt file's own folder."""


def check_lines(paths: Sequence[Path], rewards: Sequence[Reward]) -> tuple[list[str], int]:
    """What is in the files, what each reward will look for, and every problem with its line.

    Returns:
        Lines to print, and how many problems there are.
    """
    said, problems, rows = list[str](), list[str](), list[PromptRow]()
    for file in prompt_files(paths):
        found, wrong = rows_and_problems(file)
        said += _of_file(file, found)
        rows += found
        problems += wrong
    said += _repeated(rows)
    for reward in rewards:
        targets, wrong = _targets(reward, rows)
        problems += wrong
        said += [f"{reward.name}: {len(rows) - len(wrong)} of {len(rows)} prompts have what it needs", *targets]
    limit = 10 * SHOWN
    said += [f"problem: {one}" for one in problems[:limit]]
    said += [f"... and {len(problems) - limit} more problems"] if len(problems) > limit else []
    return said, len(problems)


def _of_file(file: Path, rows: Sequence[PromptRow]) -> Iterator[str]:
    """Counts and the first prompts."""
    if not rows:
        yield f"{file}: no prompt that can be read"
        return
    letters = sorted(len(row.prompt) for row in rows)
    keys = Counter(key for row in rows for key in row.metadata)
    negative = sum(row.negative_prompt is not None for row in rows)
    yield (
        f"{file}: {len(rows)} prompts, {len({row.prompt for row in rows})} different texts of {letters[0]} to {letters[-1]} letters"
        + (f", {negative} with a negative prompt" if negative else "")
    )
    if keys:
        yield f"  metadata: {', '.join(f'{key} in {count}' for key, count in keys.most_common())}"
    for row in rows[:SHOWN]:
        shown = f" {json.dumps(row.metadata, ensure_ascii=False)}"[:100] if row.metadata else ""
        yield f"  {row.unit} {row.number}: {row.prompt[:100]!r}{shown}"


def _repeated(rows: Sequence[PromptRow]) -> Iterator[str]:
    """Texts that stand more than once. They are allowed: each line is a prompt of its own."""
    places: dict[str, list[str]] = {}
    for row in rows:
        places.setdefault(row.prompt, []).append(row.where)
    repeated = {text: where for text, where in places.items() if len(where) > 1}
    if not repeated:
        yield "no text stands twice"
        return
    yield f"repeated texts: {len(repeated)}; each line counts as a prompt:"
    for text, where in list(repeated.items())[:SHOWN]:
        more = f" and {len(where) - SHOWN} more" if len(where) > SHOWN else ""
        yield f"  {text[:100]!r}: {'; '.join(where[:SHOWN])}{more}"
    if len(repeated) > SHOWN:
        yield f"  ... and {len(repeated) - SHOWN} more texts"


def _targets(reward: Reward, rows: Sequence[PromptRow]) -> tuple[list[str], list[str]]:
    """The first targets, and what is wrong with the others."""
    shown, wrong = list[str](), list[str]()
    for row in rows:
        try:
            reward.check_target(row.prompt, row.metadata)
            target = reward.target_of(row.prompt, row.metadata)
        except RewardTargetError as error:
            wrong.append(f"{row.where}: {error}")
            continue
        if len(shown) < SHOWN:
            shown.append(f"  {row.where}: {'the prompt itself' if target is None else repr(target)[:120]}")
    return shown, wrong


def split(file: Path, share: float, out: Path | None) -> tuple[Path, int, Path, int]:
    """Write the prompts of a file as two files of JSON lines: those to train on, and those to validate with.

    Args:
        file: a prompt file, or a folder of them.
        share: of the different texts that is held out, see `held_out`.
        out: folder of `NAME_train.jsonl` and `NAME_held_out.jsonl`; None for the file's own.

    Returns:
        Each file and its number of prompts.

    Raises:
        PromptFileError: the file cannot be read or divided, one of the two is there already, or `out` is another folder and
            the prompts name files by paths in their own.
    """
    rows = read_prompts(file)
    try:
        apart = held_out((row.prompt for row in rows), share)
    except PromptFileError as error:
        raise PromptFileError(f"{file}: {error}") from error
    own = file if file.is_dir() else file.parent
    folder = own if out is None else out
    for row in rows if folder.resolve() != own.resolve() else ():
        named = f"{row.where} names files by paths in {own}; leave --out away, so that the parts lie there too"
        require(not set(FILES) & set(row.metadata), named, PromptFileError)
    targets = [folder / f"{file.stem}_{part}.jsonl" for part in ("train", "held_out")]
    for target in targets:
        require(not target.exists(), f"{target} is there already; remove it, or give another --out", PromptFileError)
    folder.mkdir(parents=True, exist_ok=True)
    counts = []
    for target, wanted in zip(targets, (False, True), strict=True):
        part = [row for row in rows if (row.prompt in apart) is wanted]
        target.write_text("".join(_line(row) for row in part), encoding="utf-8")
        counts.append(len(part))
    return targets[0], counts[0], targets[1], counts[1]


def _line(row: PromptRow) -> str:
    given = {"prompt": row.prompt, "negative_prompt": row.negative_prompt, "metadata": row.metadata or None}
    return json.dumps({key: value for key, value in given.items() if value is not None}, ensure_ascii=False) + "\n"
