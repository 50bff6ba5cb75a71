"""Writes docs/reference/keys.md: every key of a run with its default, what it takes and what it does, from the dataclasses.

    uv run python tools/keys_page.py

A key is one field; its text is the one that stands beside it in the source. A test compares the page with what this makes.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Interval
from omni_rollout.allowed import kinds
from ray_trainer.config import FILLED_IN, RunConfig
from ray_trainer.values import is_section

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "keys.md"

GROUPS = {
    "How long, how often, where": r"trainer\.(?!watchdog|val_|algorithm|staleness|num_workers)",
    "The model": r"model\.(?!lora|target|exclude|policy)",
    "The LoRA, and copies of the policy": r"model\.|actor\.fsdp_config\.ema_",
    "Prompts": r"data\.(?!val_)",
    "Rewards": r"reward\.",
    "Validation": r"(trainer|data)\.val_|rollout\.val_kwargs\.",
    "Pictures: size, steps, guidance": r"rollout\.pipeline\.",
    "Noise, and which steps are trained": r"rollout\.algo\.",
    "Samples: how many, and what draws them": (
        r"rollout\.(n|seed|backend|dtype|fp8|max_batch_size|device|rollout_adapter|agent\..*)$|trainer\.staleness"
    ),
    "The algorithm": r"algorithm\.|trainer\.algorithm",
    "The loss": r"actor\.(diffusion_loss|forward_process)\.",
    "Learning rate and optimizer": r"actor\.optim\.",
    "Batches and epochs": r"actor\.(?!fsdp_config|checkpoint)",
    "Memory, precision, many GPUs": r"actor\.fsdp_config\.|trainer\.num_workers",
    "Replicas and engines": r"rollout\.",
    "The watchdog": r"trainer\.watchdog\.",
    "Checkpoints": r"actor\.checkpoint\.",
    "Machines": r"ray\.",
}
"""What a person wants to change, and the keys of it: a key belongs to the first pattern that its name begins with."""


@cache
def texts(schema: type) -> dict[str, str]:
    """What stands in the source beside each field: the text under it, else the comment above it."""
    source = inspect.getsource(schema)
    lines, body = source.splitlines(), ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign):
            continue
        comment: list[str] = []
        for line in reversed(lines[: node.lineno - 1]):
            if not line.strip().startswith("#"):
                break
            comment.insert(0, line.strip().lstrip("# "))
        under = after.value if isinstance(after, ast.Expr) else None
        text = str(under.value) if isinstance(under, ast.Constant) else " ".join(comment)
        found[ast.unparse(node.target)] = " ".join(text.split())
    return found


def text_of(schema: type, name: str) -> str:
    """The text of a field, also of one that a class above declares."""
    return next((texts(one)[name] for one in schema.__mro__ if name in vars(one).get("__annotations__", {})), "")


def takes(kind: Any) -> str:
    """What a value may be, in words: one of some words, a number and its range, text."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in args)
    if origin in (Union, UnionType):
        return " or ".join(map(takes, args))
    if origin is list:
        return f"list of {takes(args[0])}"
    if origin is Annotated:
        return takes(args[0]) + "".join(_range(one) for one in args[1:] if isinstance(one, Interval))
    return PLAIN.get(origin or kind, "any")


PLAIN = {
    bool: "true, false",
    int: "whole number",
    float: "number",
    str: "text",
    dict: "mapping",
    type(None): "`null`",
}


def _range(one: Any) -> str:
    """Bounds that only catch slips of the pen are left out."""
    low = f" from {one.ge:g}" if one.ge is not None else f" above {one.gt:g}" if one.gt is not None else ""
    high = f" to {one.le:g}" if one.le is not None else f" below {one.lt:g}"
    return ("" if one.ge == -1e9 else low) + ("" if one.le is not None and one.le >= 1e5 else high)


def shown(value: Any) -> str:
    """A default as a person would type it."""
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower().replace('none', 'null')}`"
    if value in ("", "???"):
        return "" if value == "" else "must be given"
    return f"`{value}`"


def rows(schema: type, made: Any, prefix: str = "", above: str = "") -> Iterator[tuple[str, str]]:
    """(key, its row of the table) of every key under a section; a key without a text of its own has the section's, `above`."""
    for field in fields(schema):
        key, kind = prefix + field.name, kinds(schema)[field.name]
        value = getattr(made, field.name, None)
        inner = is_section(kind)
        several = is_section(get_args(kind)[1]) if get_origin(kind) is dict else None
        if key in FILLED_IN or key in ("app", "recipe"):
            continue
        text = text_of(schema, field.name) or above
        if inner is not None:
            if type(None) in get_args(kind):
                yield key, f"| `{key}` | `null` | a section or `null` | {text} |"
            yield from rows(inner, value if value is not None else inner(), f"{key}.", text)
            continue
        if several is not None:
            yield from _named(several, f"{key}.NAME.")
            continue
        yield key, f"| `{key}` | {shown(value)} | {takes(kind)} | {text} |"


def _named(schema: type, prefix: str) -> Iterator[tuple[str, str]]:
    """Keys of one of several things with names: what it has beyond the section that it stands in."""
    for field in fields(schema):
        if field.name in vars(schema).get("__annotations__", {}):
            default = field.default if field.default is not MISSING else []
            told = f"| `{prefix}{field.name}` | {shown(default)} | {takes(kinds(schema)[field.name])} |"
            yield prefix + field.name, f"{told} {text_of(schema, field.name)} |"


def page() -> str:
    """The whole page."""
    grouped: dict[str, list[str]] = {name: [] for name in GROUPS}
    for key, row in rows(RunConfig, RunConfig()):
        grouped[next(name for name, pattern in GROUPS.items() if re.match(pattern, key))].append(row)
    said = [
        "# Every key of a run",
        "",
        "Written by `tools/keys_page.py` from the dataclasses; do not edit it here. Any key may stand in a recipe, or on the",
        "command line as `key=value`. [Keys that no recipe sets](../keys.md) says when you need the rarer ones.",
    ]
    for name, table in grouped.items():
        said += ["", f"## {name}", "", "| key | default | takes | what it does |", "|---|---|---|---|", *table]
    return "\n".join(said) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
