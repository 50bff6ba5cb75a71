"""GenEval's questions about a scene (Ghosh et al., 2023, arXiv:2310.11513), for any method that finds objects.

Is the object there, so many times, in this colour, in this place relative to another? A detector (`geneval`) or plain
pixels (`shapes`) find the objects; the rules are the same.

    metadata {"include": [{"class": "circle", "count": 2, "color": "red"},
                          {"class": "square", "count": 1, "position": ["left of", 0]}],
              "exclude": [{"class": "circle", "count": 3}]}

`position` relates every matched object to every matched object of the include entry with that number. `exclude`
fails the picture when at least `count` objects of the class are there; this is how "exactly two" is said. GenEval says
right or wrong; here each question also has a share in [0, 1], so that small improvements count.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import RewardTargetError, require

RELATIONS = ("left of", "right of", "above", "below")
POSITION_SLACK = 0.1  # objects may overlap by this share of their summed sizes and still be apart


@dataclass(frozen=True)
class Found:
    """An object in the picture: class, box (left, top, right, bottom) in pixels, confidence, colour where it is
    known."""

    name: str
    box: tuple[float, float, float, float]
    confidence: float = 1.0
    color: str | None = None


@dataclass(frozen=True)
class Asked:
    """One entry of include or exclude."""

    name: str
    count: int
    color: str | None = None
    relation: str | None = None
    to: int = 0


@dataclass(frozen=True)
class Questions:
    """What a picture must and must not show."""

    include: tuple[Asked, ...]
    exclude: tuple[Asked, ...]


def parse_questions(metadata: Mapping[str, Any], names: Container[str], colors: Container[str]) -> Questions:
    """Read include and exclude. Raises `RewardTargetError` for whatever could never be found."""
    include = _entries(metadata.get("include"), "include", names, colors)
    none = f"no 'include' in metadata {dict(metadata)!r}: list at least one object to look for."
    require(len(include) > 0, none, RewardTargetError)
    for number, asked in enumerate(include):
        wrong = f"include[{number}]: position refers to entry {asked.to!r}; it must be one of the entries before it."
        require(asked.relation is None or 0 <= asked.to < number, wrong, RewardTargetError)
    return Questions(include, _entries(metadata.get("exclude", []), "exclude", names, colors))


def _entries(given: Any, where: str, names: Container[str], colors: Container[str]) -> tuple[Asked, ...]:
    if given is None:
        return ()
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    require(listed, f"{where}={given!r} must be a list of objects.", RewardTargetError)
    return tuple(_entry(row, f"{where}[{number}]", names, colors) for number, row in enumerate(given))


def _entry(row: Any, label: str, names: Container[str], colors: Container[str]) -> Asked:
    def must(holds: bool, message: str) -> None:
        require(holds, f"{label}{message}", RewardTargetError)

    fits = isinstance(row, Mapping) and "class" in row
    must(fits, f"={row!r} must be of the form {{'class': NAME, 'count': NUMBER, ...}}.")
    for key in row:
        must(key in ("class", "count", "color", "position"), f" has the unknown key {key!r}.")
    name, count, color, position = row["class"], row.get("count", 1), row.get("color"), row.get("position")
    must(isinstance(name, str) and name in names, f": class={name!r} is not one that can be found.")
    whole = isinstance(count, int) and not isinstance(count, bool) and count >= 1
    must(whole, f": count={count!r} must be a whole number of at least 1.")
    told = color is None or (isinstance(color, str) and color in colors)
    must(told, f": color={color!r} is not one that can be told.")
    if position is None:
        return Asked(name, count, color)
    pair = isinstance(position, Sequence) and len(position) == 2 and isinstance(position[1], int)
    must(pair, f": position={position!r} must be [RELATION, ENTRY NUMBER].")
    relation, to = position
    must(relation in RELATIONS, f": position={relation!r} is unknown. Choose one of {', '.join(RELATIONS)}.")
    return Asked(name, count, color, relation, to)


def relations_between(a: Sequence[float], b: Sequence[float]) -> set[str]:
    """Where box `a` lies as seen from box `b`: none, one or two of `RELATIONS`."""
    left, top, right, bottom = a
    from_left, from_top, from_right, from_bottom = b
    offset = np.array([left + right - from_left - from_right, top + bottom - from_top - from_bottom]) / 2
    sizes = np.array([right - left + from_right - from_left, bottom - top + from_bottom - from_top])
    apart = np.sign(offset) * np.maximum(np.abs(offset) - POSITION_SLACK * sizes, 0)
    if not apart.any():
        return set()
    x, y = apart / np.linalg.norm(offset)
    held = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {relation for relation, holds in held.items() if holds}


def judge(found: Sequence[Found], questions: Questions) -> dict[str, float]:
    """Components in [0, 1].

    strict    1 when GenEval would call the picture right
    count     mean share of the objects asked for that are there (and of the bounds of exclude that are kept)
    color     mean share of matched objects that have the colour asked for; absent when none is asked for
    position  share of the pairs that stand as asked for; absent when none is asked for
    parts     mean of count, color and position, as far as they are asked for
    """
    counts: list[float] = []
    colors: list[float] = []
    positions: list[float] = []
    groups: list[list[Found]] = []
    right = True
    for asked in questions.include:
        group = [f for f in sorted(found, key=lambda f: -f.confidence) if f.name == asked.name]
        if asked.color is not None:  # the most confident, as GenEval does; of equals, the right colour first
            group.sort(key=lambda f: (-f.confidence, f.color != asked.color))
        group = group[: asked.count]
        complete = len(group) == asked.count
        counts.append(len(group) / asked.count)
        if asked.color is not None:
            colors.append(sum(f.color == asked.color for f in group) / asked.count)
            complete = complete and colors[-1] == 1
        if asked.relation is not None:
            pairs = [asked.relation in relations_between(f.box, other.box) for f in group for other in groups[asked.to]]
            positions.append(sum(pairs) / len(pairs) if pairs else 0.0)
            complete = complete and positions[-1] == 1
        right = right and complete
        groups.append(group if complete or asked.relation is None else [])
    for asked in questions.exclude:
        present = sum(f.name == asked.name and asked.color in (None, f.color) for f in found)
        counts.append(float(present < asked.count))
        right = right and present < asked.count
    components = {"strict": float(right), "count": float(np.mean(counts))}
    if colors:
        components["color"] = float(np.mean(colors))
    if positions:
        components["position"] = float(np.mean(positions))
    components["parts"] = float(np.mean([v for k, v in components.items() if k != "strict"]))
    return components
