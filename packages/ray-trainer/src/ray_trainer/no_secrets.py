"""A config holds no secret: it is written into the run folder, its report and every tracker, and people pass it on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from .errors import TrainerError

_NAMES = re.compile(r"(api_?key|passw(or)?d|secret|(access|auth|bearer|hf)_?token)$", re.IGNORECASE)
_VARIABLES = re.compile(r"(TOKEN|KEY|PASSWORD|SECRET)$")
_ADDRESS = re.compile(r"\w://[^/@\s]+@")
SHORTEST = 8
"""Letters of a variable's value from which a text that holds it holds a secret."""


def check_secrets(tree: Any) -> None:
    """Raise `TrainerError` where a config's tree holds what looks like a secret, by its key and never its value: a key named so, an
    address with a user name in it, or the value of an environment variable named so (a shell had put it there)."""
    named = {name: value for name, value in os.environ.items() if _VARIABLES.search(name) and len(value) >= SHORTEST}
    known = {name: value for name, value in named.items() if not os.path.exists(value)}  # the place of one is none
    for key, text in _texts(tree):
        found = [name for name, value in known.items() if value in text]
        if _NAMES.search(key.rpartition(".")[2]) and text:
            what = "by its name a secret"
        elif _ADDRESS.search(text):
            what = "an address with a user name in it"
        elif found:
            what = f"the value of {found[0]}"
        else:
            continue
        raise TrainerError(
            f"{key} holds {what}, and a config is written into the run folder, its report and its trackers; let what needs it read "
            "an environment variable (the rewards of image_rewards take token_env=NAME)"
        )


def _texts(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a tree, with its dotted key."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _texts(value, f"{prefix}.{key}".lstrip("."))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _texts(value, prefix)
    elif isinstance(tree, str):
        yield prefix, tree
