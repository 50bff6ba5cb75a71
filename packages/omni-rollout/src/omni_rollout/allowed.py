"""Which values a setting takes. They stand once, in the type of its field, and are read from there.

`Literal["pack", "spread"]` is one of these words, `Annotated[int, Interval(ge=1, le=9)]` a number of that range, and
`Annotated[list[…], Len(2, 2)]` a list of two. Bounds are what the code can use, with room: they catch slips of the pen and
overflows, and do not judge taste. Imports no torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Interval, Len

Count = Annotated[int, Interval(ge=1, le=1_000_000_000)]
CountOrZero = Annotated[int, Interval(ge=0, le=1_000_000_000)]
Seed = Annotated[int, Interval(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Interval(gt=0, le=1e7)]  # some 116 days; more is a slip, and timers overflow


def fault(kind: Any, value: Any) -> str:
    """What is wrong with `value` for a field of type `kind`, to be said after the field's name; empty when nothing is."""
    if _holds(kind, value):
        return ""
    parts, rule, many = list(walk(kind)), _rule(kind), isinstance(value, list)
    if not any(isinstance(part, Interval) for part in parts):
        near = get_close_matches(str(value), rule.split(", "), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"={value!r} must be {'some' if many else 'one'} of {rule}{hint}"
    length = next((part.max_length for part in parts if isinstance(part, Len)), None)
    if length is not None and (not many or len(value) != length):
        return f"={value!r} must be a list of {length} numbers, each {rule}"
    return f"={value!r} is out of range: {'each of its numbers' if many else 'it'} must be {rule}"


@cache
def kinds(schema: type) -> Mapping[str, Any]:
    """The type of every field of a dataclass, with words and bounds."""
    return get_type_hints(schema, include_extras=True)


def walk(kind: Any) -> Iterator[Any]:
    """A type and everything that it is made of: members of a union, elements of a list, bounds."""
    yield kind
    for part in get_args(kind):
        yield from walk(part)


def _holds(kind: Any, value: Any) -> bool:
    """Whether the type allows the value; one without words and bounds allows everything."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in args
    if origin in (Union, UnionType):
        return any(_holds(one, value) for one in args)
    if origin is list:
        return isinstance(value, list) and all(_holds(args[0], one) for one in value)
    if isinstance(kind, Len):
        return kind.min_length <= len(value) <= (kind.max_length or math.inf)
    if isinstance(kind, Interval):
        bounds = ((name, getattr(kind, name)) for name in ("gt", "ge", "lt", "le"))  # the names of Python's operators
        number = isinstance(value, int | float)
        return number and all(bound is None or getattr(operator, name)(value, bound) for name, bound in bounds)
    return all(_holds(one, value) for one in args) if origin is Annotated else kind is not NoneType or value is None


def _rule(kind: Any) -> str:
    """What the type allows, in words."""
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if isinstance(kind, Interval):
        low, high = (
            f"{x:g}" if isinstance(x, float) else str(x) for x in (kind.ge or kind.gt or 0, kind.le or kind.lt)
        )
        return f"{'' if kind.gt is None else 'above '}{low} to {'' if kind.lt is None else 'below '}{high}"
    return " or ".join(filter(None, map(_rule, get_args(kind))))
