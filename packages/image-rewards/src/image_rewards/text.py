"""Compare the text that was asked for with the text that was read: pure Python, no engine.

targets of a prompt -> normalised -> best matching run of read words for each -> exact and edit components
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import RewardTargetError, require

# Text between a pair of quotes of any script. A mark behind a number is inches or feet (24", 6', 12 " wide); a single quote between
# letters is an apostrophe, and so is one before a clipped word ('n', 'til, '90s): none of these opens a quote.
_NUMBER = r"(?<![\d¼½¾⅓⅔⅛⅜⅝⅞])(?!(?<=[\d\"']\s).\s)"
_CLIPPED = (
    r"(?!(?<!letter\s)(?<!says\s)(?<!reads\s)(?<!word\s)(?<!sign\s)(?<=\w\s).[nN]['’]\s\w)"
    r"(?!.(?:tis|twas|til|till|em|cause|cuz|bout|round|\d\ds?)\b(?!['’]))"
)
_QUOTED = re.compile(
    rf'{_NUMBER}(?!(?<=").\s)"([^"]*)"'
    r"|“([^”]*)”|„([^“”]*)[“”]|«([^»]*)»|「([^」]*)」|『([^』]*)』"
    rf"|{_CLIPPED}‘((?:[^’]|(?<=\w)’(?=\w))*)’(?!\w)"
    rf"|(?<![\w']){_NUMBER}{_CLIPPED}'((?:[^']|(?<=\w)'(?=\w))*)'(?!\w)"
)
_OUTER_PAIRS = (('"', '"'), ("“", "”"), ("„", "“"), ("«", "»"), ("「", "」"), ("『", "』"))
_LOOKALIKES = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "‐": "-", "‑": "-", "–": "-", "—": "-", "−": "-"})


def normalize(text: str, *, ignore_case: bool = True) -> str:
    """NFKC, one form of quotes and dashes, no white space or invisible characters, and (by default) case folded."""
    text = unicodedata.normalize("NFKC", text).translate(_LOOKALIKES)
    text = "".join(c for c in text if not c.isspace() and unicodedata.category(c) not in ("Cf", "Cc"))
    return unicodedata.normalize("NFKC", text.casefold()) if ignore_case else text


def targets_of(prompt: str, metadata: Mapping[str, Any], *, ignore_case: bool = True) -> list[str]:
    """The texts a picture should show, as written.

    metadata["text"] is a string, or a list of strings for several texts; without it, every quoted part of the
    prompt is one. Quotes around a whole metadata text are taken off. Line breaks count as white space. Raises
    `RewardTargetError` where there is no text, or one is empty.
    """
    given = metadata.get("text")
    if given is None:
        found = [next(part for part in match.groups() if part is not None) for match in _QUOTED.finditer(prompt)]
        require(
            bool(found),
            f"ocr: no text to look for. The metadata {dict(metadata)!r} has no 'text', and the prompt {prompt!r} has "
            "no part in quotes. Give metadata text='...', or a list for several.",
            RewardTargetError,
        )
        where = "in quotes in the prompt"
    else:
        found = [given] if isinstance(given, str) else given
        where = "in metadata 'text'"
        fits = isinstance(found, Sequence) and bool(found) and all(isinstance(text, str) for text in found)
        wrong = f"ocr: metadata text={given!r} must be a string or a list of strings, and not empty."
        require(fits, wrong, RewardTargetError)
        found = [_unquote(text) for text in found]
    for text in found:
        empty = f"ocr: the text {text!r} {where} is empty once white space is dropped."
        require(normalize(text, ignore_case=ignore_case) != "", empty, RewardTargetError)
    return list(found)


def _unquote(text: str) -> str:
    stripped = text.strip()
    for left, right in _OUTER_PAIRS:
        inner = stripped[1:-1]
        if len(stripped) > 2 and stripped[0] == left and stripped[-1] == right and left not in inner:
            return inner
    return text


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: fewest insertions, deletions and substitutions of one character."""
    if len(a) < len(b):
        a, b = b, a
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


@dataclass(frozen=True)
class TextMatch:
    """How well the targets were found.

    Args:
        exact: 1.0 when every target was read exactly
        edit: mean over targets of 1 - distance / length, not below 0
        extra: share of the read characters that belong to no target
    """

    exact: float
    edit: float
    extra: float


def match_texts(targets: Sequence[str], words: Sequence[str], *, ignore_case: bool = True) -> TextMatch:
    """Match each target with a run of consecutive read `words` (reading order), longest targets first.

    A run stands for one target only, so a text that is asked for twice must be there twice. White space counts nowhere,
    so it does not matter how the engine cuts words and lines.
    """
    clean = [text for word in words if (text := normalize(word, ignore_case=ignore_case))]
    free = [True] * len(clean)
    total = sum(map(len, clean))
    used, scores = 0, []
    for target in sorted((normalize(t, ignore_case=ignore_case) for t in targets), key=len, reverse=True):
        distance, run = _best_run(target, clean, free)
        scores.append(max(0.0, 1 - distance / len(target)))
        if scores[-1] > 0:
            for i in run:
                free[i] = False
                used += len(clean[i])
    exact = float(all(score == 1 for score in scores))
    return TextMatch(exact, sum(scores) / len(scores), (total - used) / total if total else 0.0)


def _best_run(target: str, words: Sequence[str], free: Sequence[bool]) -> tuple[int, range]:
    best, best_run = len(target), range(0)
    for start in range(len(words)):
        text = ""
        for end in range(start, len(words)):
            # Every character past the target's length costs one deletion, so longer runs cannot beat the best.
            if not free[end] or len(text) - len(target) >= best:
                break
            text += words[end]
            if abs(len(text) - len(target)) < best:
                distance = edit_distance(target, text)
                if distance < best:
                    best, best_run = distance, range(start, end + 1)
    return best, best_run
