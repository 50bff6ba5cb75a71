"""Keys by their dotted names: which there are, of what type each is, and the value that a typed text or a recipe gives it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from omni_rollout.allowed import fault, kinds
from yaml import MappingNode, Node, ScalarNode

from .config import FILLED_IN, RunConfig
from .doors import importable
from .errors import TrainerError
from .values import Reference, convert, expand, free, is_section, parse_yaml, section, several_of

DOORS = (
    "trainer.algorithm",
    "actor.diffusion_loss.loss_mode",
    "rollout.agent.default_agent_loop",
    "rollout.algo.kind",
    "rollout.val_kwargs.algo.kind",
    "model.architecture",
    "reward.name",
)
"""Keys that may name what a person wrote, as "module:attribute" or "./file.py:attribute"."""
ELSEWHERE = {
    "learning_rate": "actor.optim.lr",
    "max_steps": "trainer.total_steps",
    "num_train_epochs": "trainer.total_steps",
    "output_dir": "trainer.run_dir",
    "num_generations": "rollout.n",
    "num_images_per_prompt": "rollout.n",
    "group_size": "rollout.n",
    "resolution": "rollout.pipeline.height",
    "num_gpus": "trainer.num_workers",
    "rank": "model.lora_rank",
    "pretrained_model_name_or_path": "model.path",
    "beta": "actor.diffusion_loss.ref_kl_coef",
}
"""What other trainers call a key, for the one that is named when it is typed here."""
PATHS = ("trainer.run_dir", "model.path", "model.lora_adapter_path", "data.train_file", "data.val_file")
"""Keys in which `~` and `$HOME` mean what they mean to a shell."""


@cache
def known_keys(schema: type = RunConfig, prefix: str = "") -> Mapping[str, Any]:
    """Every key of a config, sections included, with its type. What the program fills in itself is left out."""
    keys: dict[str, Any] = {}
    for name, kind in get_type_hints(schema).items():
        if prefix + name not in FILLED_IN:
            keys[prefix + name], inner = kind, is_section(kind)
            keys |= known_keys(inner, f"{prefix}{name}.") if inner else {}
    return keys


def kind_of(name: str, schema: type = RunConfig) -> Any:
    """The type of a dotted key, also of one inside a mapping of options or of sections; None where there is no such key."""
    keys, parts = known_keys(schema), name.split(".")
    if name in keys:
        return keys[name]
    for cut in range(len(parts) - 1, 0, -1):
        kind = keys.get(".".join(parts[:cut]))
        if get_origin(kind) is dict:
            element, rest = several_of(kind), parts[cut + 1 :]
            if element is None:
                return Any
            return kind_of(".".join(rest), element) if rest else element
    return None


def read(name: str, node: Node | str, source: str) -> Any:
    """The value, or the tree of values, that `node` gives to key `name`.

    Raises:
        TrainerError: there is no such key (the nearest one is named), or the value does not fit.
    """
    for filled, told in FILLED_IN.items():
        if name == filled or name.startswith(f"{filled}."):
            raise TrainerError(f"config key {filled!r} in {source} is filled in from {told!r}; set that one instead")
    keys = known_keys()
    kind = kind_of(name) if name else RunConfig
    if kind is Any and name not in keys:  # reward.options.path=…
        if node == "":
            return ""
        return free(parse_yaml(node, name) if isinstance(node, str) else node, name, source)
    if kind is None:
        leaf = name.rpartition(".")[2]
        # A right name under the wrong section is the commonest slip: offer where that leaf lives.
        same = [known for known in keys if known.split(".")[-1] == leaf]
        hint = next(iter(same), ELSEWHERE.get(leaf)) or next(
            iter(difflib.get_close_matches(name, keys, n=1, cutoff=0.4)), None
        )
        raise TrainerError(
            f"unknown config key {name!r} in {source}" + (f"; did you mean {hint!r}?" if hint else "; see --help")
        )
    inner = is_section(kind)
    if inner is None and several_of(kind) is None:
        value = convert(kind, node, name, source)
        if value is None or isinstance(value, Reference):
            return value
        general = re.sub(r"^(reward\.several|data\.sources)\.\w+\.", lambda m: m[1].split(".")[0] + ".", name)
        if general in PATHS:
            return expand(value) if isinstance(value, str) else [expand(str(one)) for one in value]
        return importable(name, value) if general in DOORS else value
    if isinstance(node, str):
        node = parse_yaml(node, name)
    if isinstance(node, ScalarNode) and node.value in ("null", "~") and NoneType in get_args(kind):
        return None
    if not isinstance(node, MappingNode):
        shown = repr(node.value) if isinstance(node, ScalarNode) else "a list"
        hint = f"; set its keys, such as {name}.{fields(inner)[0].name}" if name and inner else ""
        raise TrainerError(f"config key {name!r} in {source} is a section, but {shown} was given{hint}")
    return {key: read(f"{name}.{key}" if name else key, value, source) for key, value in section(node).items()}


def check_values(schema: type, tree: dict[str, Any], prefix: str = "") -> None:
    """Raise `TrainerError`, with key, value and what it may be, for the first value that the type of its field does not allow."""
    for name, kind in kinds(schema).items():
        value, inner, several = tree.get(name), is_section(kind), several_of(kind)
        if inner is not None and isinstance(value, dict):
            check_values(inner, value, f"{prefix}{name}.")
        elif several is not None and isinstance(value, dict):
            for label, one in value.items():
                check_values(several, one, f"{prefix}{name}.{label}.")
        elif any(isinstance(one, Reference) for one in (value if isinstance(value, list) else [value])):
            continue  # its value is not known yet
        elif wrong := fault(kind, value):
            raise TrainerError(f"{prefix}{name}{wrong}")
