"""From a recipe and a command line to a config: defaults < recipe, over its base < `key=value` texts.

A recipe is a short YAML file that says only what differs.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from fsdp_diffusers_engine.config import DREW, DiffusionModelConfig
from omni_rollout.allowed import kinds
from yaml import MappingNode, ScalarNode

from .assets import resolve
from .config import LORA, NamedReward, PromptSource, RewardPool, RunConfig, to_tree, updates_per_step
from .errors import TrainerError
from .keys import check_values, known_keys, read
from .values import Reference, convert, expand, is_section, read_yaml, section, several_of

OPTIONS = {
    "reward.name": "reward.options",
    "actor.diffusion_loss.loss_mode": "actor.diffusion_loss.options",
    "trainer.algorithm": "algorithm.options",
}
"""Keys that name something, and the options that go with it alone."""
EITHER = {"reward.several": ("reward.name", "reward.options"), "data.sources": ("data.train_file", "data.val_file")}
"""Sections with several of something, and the keys that say one of it: a layer with the one puts the other of lower layers away."""


def compose(app: str, recipe_file: Path, overrides: list[str]) -> RunConfig:
    """Defaults < recipe file (over its base) < `key=value` texts, each value checked against its field.

    Raises:
        TrainerError: an unknown key (the nearest one is named), a value of the wrong type or out of its range, or a file that is
            no YAML mapping.
    """
    layers = _over(_load_recipe(recipe_file), _given(overrides))
    if layers.get("app", app) != app:
        raise TrainerError(
            f"app={layers['app']!r} in recipe {recipe_file.name}: this program is {app}; start the other one"
        )
    tree = _merge(to_tree(RunConfig()), layers | {"app": app, "recipe": recipe_file.stem})
    _fill_several(tree, layers)
    check_values(RunConfig, tree)  # before, so that the key that was typed is named, and not one that refers to it
    tree = _resolved(tree, tree, "")
    check_values(RunConfig, tree)
    config: RunConfig = _build(RunConfig, tree)
    # One place for each fact: the packages' configs get it from here.
    config.actor.model_config = model = _build(DiffusionModelConfig, tree["model"])
    config.rollout.architecture = config.model.architecture
    if config.keeps_drew:
        model.policy_state_adapters = [*dict.fromkeys([*model.policy_state_adapters, config.drawing_state, DREW])]
    if "://" in config.trainer.run_dir:
        raise TrainerError(
            f"trainer.run_dir={config.trainer.run_dir!r} is an address, and a run is written into a folder of this machine; mount "
            "the store and give its folder"
        )
    if config.trainer.on_existing != "raise" and not config.trainer.run_dir:
        raise TrainerError(
            f"trainer.on_existing={config.trainer.on_existing} needs trainer.run_dir=FOLDER: without it every run has a new folder"
        )
    run_dir = config.trainer.run_dir or f"runs/{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    config.trainer.run_dir = str(Path(run_dir).absolute())
    _for_every_folder(config)
    if config.actor.optim.total_training_steps < 0:
        config.actor.optim.total_training_steps = config.trainer.total_steps * updates_per_step(config)
    if config.rollout.seed is None:
        config.rollout.seed = config.trainer.seed
    return config


def _load_recipe(file: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe over the one that it names under `base` (`builtin:NAME`, or a file beside it), each checked by itself."""
    node = read_yaml(file, f"recipe {file.name}")
    if not isinstance(node, MappingNode):
        raise TrainerError(f"recipe {str(file)!r} is not a mapping of config keys; see --help for an example")
    entries = section(node)
    base = entries.pop("base", None)
    recipe = {key: read(key, value, f"recipe {file.name}") for key, value in entries.items()}
    if base is None:
        return recipe
    if not isinstance(base, ScalarNode):
        raise TrainerError(
            f"recipe {file.name}: base must be builtin:NAME or a file beside it, and not a list or a section"
        )
    below = file.parent / resolve("recipes", expand(str(base.value)))
    if not os.path.isfile(below):  # false for a name that no file system takes, where Path.is_file raises
        raise TrainerError(f"recipe {file.name} is based on {base.value!r}, and there is no file {below}")
    chain = (*above, file.resolve())
    if below.resolve() in chain:
        raise TrainerError(
            f"recipe {file.name} is based on {below.name}, which is based on it; a base must end somewhere"
        )
    return _over(_load_recipe(below, chain), recipe)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """One layer of config over another. Options belong to what they are of, and a validation file to its training file: another
    reward, loss, algorithm or training file does not get them; nor does `lora_rank: 0` get what is of a LoRA."""
    labels = _at(above, "reward.several") or {}
    several = {f"reward.several.{label}.name": f"reward.several.{label}.options" for label in labels}
    if "train_file" in above.get("data", {}):
        below = _merge(below, {"data": {"val_file": ""}})
    gone = [key for name, key in (OPTIONS | several).items() if _at(above, name) not in (None, _at(below, name))]
    for group, singles in EITHER.items():
        gone += singles if _at(above, group) else (group,) if _at(above, singles[0]) else ()
    if _at(above, "model.lora_rank") == 0:
        gone += [f"model.{key}" for key in LORA]
    for key in gone:
        part, _, leaf = key.rpartition(".")
        (_at(below, part) or {}).pop(leaf, None)
    return _merge(below, above)


def _given(overrides: list[str]) -> dict[str, Any]:
    """The tree of `key=value` texts; the last of two with one key counts."""
    tree: dict[str, Any] = {}
    for override in overrides:
        name, _, text = override.partition("=")
        value = read(name, text, "the command line")
        for part in reversed(name.split(".")):
            value = {part: value}
        tree = _merge(tree, value)
    return tree


def _fill_several(tree: dict[str, Any], given: dict[str, Any]) -> None:
    """Complete the entries of `EITHER`'s sections, and empty the keys that they stand in for.

    Raises:
        TrainerError: one layer gave both, or a name that cannot be a metric's.
    """
    for group, singles in EITHER.items():
        for key in singles if _at(tree, group) else ():
            if _at(given, key):
                raise TrainerError(f"{group} and {key} are two ways to say one thing; give {key} inside {group}.NAME")
            part, _, leaf = key.partition(".")
            tree[part][leaf] = type(tree[part][leaf])()
        for label in _at(tree, group):
            if not re.fullmatch(r"[a-z][a-z0-9_]*", label):
                raise TrainerError(f"{group} has the name {label!r}; use small letters, digits and _: it names curves")
    reward, data = tree["reward"], tree["data"]
    shared = {f.name: reward[f.name] for f in fields(RewardPool) if f.name not in ("name", "options")}
    reward["several"] = {label: asdict(NamedReward()) | shared | one for label, one in reward["several"].items()}
    data["sources"] = {label: asdict(PromptSource()) | one for label, one in data["sources"].items()}


def _resolved(value: Any, tree: dict[str, Any], name: str, seen: tuple[str, ...] = ()) -> Any:
    """`value` with every `${other.key}` replaced by the value of that key."""
    if isinstance(value, dict):
        return {key: _resolved(one, tree, f"{name}.{key}".lstrip("."), seen) for key, one in value.items()}
    if isinstance(value, list):
        return [_resolved(one, tree, name, seen) for one in value]
    if not isinstance(value, Reference):
        return value
    if value in seen or value not in known_keys():
        why = "leads back to itself" if value in seen else "names no config key"
        raise TrainerError(f"{name}=${{{value}}} {why}; write the value itself")
    found = _resolved(_at(tree, value), tree, name, (*seen, str(value)))
    kind = known_keys().get(name, Any)
    if type(found) in (int, float, str) and {int, float, str} & {kind, *get_args(kind)}:  # of another type, perhaps
        return convert(kind, str(found), name, f"${{{value}}}")
    return found


def _build(schema: Any, tree: dict[str, Any], prefix: str = "") -> Any:
    """The dataclass of a whole tree.

    Raises:
        TrainerError: values that do not go together, with the key of the section that says so.
    """
    made = dict(tree)
    for key, kind in kinds(schema).items():
        value, inner, several = made.get(key), is_section(kind), several_of(kind)
        if inner is not None and isinstance(value, dict):
            made[key] = _build(inner, value, f"{prefix}{key}.")
        elif several is not None and isinstance(value, dict):
            made[key] = {label: _build(several, one, f"{prefix}{key}.{label}.") for label, one in value.items()}
    try:
        return schema(**made)
    except (ValueError, TypeError) as error:
        said = " ".join(str(error).split())
        named = prefix if said.partition("=")[0] in made else f"{prefix.removesuffix('.')}: " if prefix else ""
        raise TrainerError(f"{named}{said}") from error


def _for_every_folder(config: RunConfig) -> None:
    """Paths that workers read, made absolute: the processes of a cluster that was started before run in another folder."""
    for model in (config.model, config.actor.model_config):
        for key in ("path", "lora_adapter_path"):
            value = getattr(model, key)
            if value and Path(value).exists():
                setattr(model, key, str(Path(value).absolute()))
    for reward in (config.reward, *config.reward.several.values()):
        for key, value in reward.options.items():
            if isinstance(value, str) and "/" in value and Path(value).exists():
                reward.options[key] = str(Path(value).absolute())


def _at(tree: Any, key: str) -> Any:
    """The value of a dotted key, None where a layer does not have it."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _merge(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merge(below[key], value) if key in below else value for key, value in above.items()}
