"""From what a person typed to a value of a field's type, the same on the command line and in a recipe.

The field's type decides, never the look of the text: a text field takes `0012`, `yes`, `null` or `#3` as they stand. Whole numbers
may be written 100, 0100, 1e3 or 10.0; switches true, false, yes, no, on, off, 1 or 0. Lists and options are YAML.
"""

from __future__ import annotations

import os
import re
from dataclasses import is_dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from .errors import TrainerError

_SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_REFERENCE = re.compile(r"\$\{([a-z_]\w*(?:\.\w+)+)\}")


class Reference(str):
    """`${trainer.seed}` as a whole value: the value of that key."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, but 1e-3 is a number and 0100 is a hundred."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        section(node)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Its counterpart: a text that `_Loader` would take for a number is quoted."""


_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_INT = re.compile(r"[-+]?\d[\d_]*")
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {  # a copy: the tables of the parents stay as they are
        first: [(tag, pattern) for tag, pattern in table if not tag.endswith((":int", ":float"))]
        for first, table in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"(?:{_INT.pattern})$"), list("-+0123456789"))
    _class.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{_FLOAT.pattern})$"), list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))


def parse_yaml(text: str | bytes, where: str) -> yaml.Node:
    """The node of one YAML document; an empty one is an empty mapping.

    Raises:
        TrainerError: the text is no YAML.
    """
    try:
        node = yaml.compose(text, _Loader)  # type: ignore[arg-type]
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise TrainerError(f"{where} is no YAML: {' '.join(str(error).split())}") from error
    return node if node is not None else yaml.MappingNode("tag:yaml.org,2002:map", [])


def read_yaml(file: Path, where: str) -> yaml.Node:
    """`parse_yaml` of a file (UTF-8 or UTF-16, with or without a byte order mark)."""
    try:
        return parse_yaml(file.read_bytes(), where)
    except OSError as error:
        raise TrainerError(f"{where} cannot be read: {error}") from error


def section(node: yaml.Node) -> dict[str, yaml.Node]:
    """The entries of a mapping; a key that stands there twice is refused."""
    assert isinstance(node, yaml.MappingNode)
    yaml.SafeLoader("").flatten_mapping(node)  # "<<: *anchor"
    found: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.value in found:
            raise TrainerError(f"key {key.value!r} stands twice in one section (line {key.start_mark.line + 1})")
        found[str(key.value)] = value
    return found


def dump(tree: Any) -> str:
    """A tree of plain values as YAML that `read_yaml` reads back as it is."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=4096)


def expand(path: str) -> str:
    """`~`, `~name`, `$NAME` and `${NAME}` as a shell would, where they exist."""
    return os.path.expandvars(os.path.expanduser(path))


def convert(kind: Any, node: yaml.Node | str, name: str, where: str) -> Any:
    """The value that `node` gives a field of type `kind`.

    Args:
        kind: int, float, bool, str, a `Literal`, a list or dict of these, one of them or None, or Any (text, list, mapping).
        node: text as typed on the command line, or the node of a recipe.
        name, where: of the key, for errors.

    Raises:
        TrainerError: it gives none.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    kinds = tuple(type(get_args(one)[0]) if get_origin(one) is Literal else one for one in kinds)
    scalar = next((one for one in kinds if one in _SCALARS), None)
    holder = next((one for one in kinds if one is Any or get_origin(one) in _HOLDERS), None)
    if isinstance(node, str):
        either = holder is Any or scalar is not None
        if holder is not None and (not either or node[:1] + node[-1:] in ("[]", "{}")):
            node = parse_yaml(node, f"{name}={node} on the command line")
        else:
            node = yaml.ScalarNode("tag:yaml.org,2002:str", node)
    if not isinstance(node, yaml.ScalarNode):
        if holder is None:
            raise _wrong(name, where, f"must be {_SCALARS[scalar][1]}, not a list or a section")
        if get_origin(holder) is list and isinstance(node, yaml.SequenceNode):
            element = get_args(holder)[0]
            return [convert(element, item, f"{name}[{i}]", where) for i, item in enumerate(node.value)]
        if holder is not Any and isinstance(node, yaml.MappingNode) != (get_origin(holder) is dict):
            raise _wrong(name, where, f"must be {_HOLDERS[get_origin(holder)]}")
        return free(node, name, where)
    text, plain = str(node.value), node.style is None
    if match := _REFERENCE.fullmatch(text):
        return Reference(match[1])
    if plain and ((NoneType in kinds and text in ("null", "~", "")) or (holder is Any and text == "null")):
        return None
    if scalar is None and holder not in (None, Any):
        raise _wrong(name, where, f"must be {_HOLDERS[get_origin(holder)]}, and {text!r} is none")
    read, form = _SCALARS[scalar or str]
    try:
        return read(text)
    except (ValueError, ArithmeticError) as error:
        raise _wrong(name, where, f"must be {form}, and {text!r} is none") from error


def free(node: yaml.Node, name: str, where: str) -> Any:
    """What YAML makes of a node: the value of an option, whose type the config does not know."""
    try:
        return _referring(_Loader("").construct_document(node))
    except (yaml.YAMLError, ValueError) as error:
        raise _wrong(name, where, f"is no value: {' '.join(str(error).split())}") from error


def _referring(value: Any) -> Any:
    if isinstance(value, str) and (match := _REFERENCE.fullmatch(value)):
        return Reference(match[1])
    if isinstance(value, dict):
        return {key: _referring(one) for key, one in value.items()}
    return [_referring(one) for one in value] if isinstance(value, list) else value


def _whole(text: str) -> int:
    try:
        number = Decimal(text.strip())
    except InvalidOperation as error:
        raise ValueError("no number") from error
    if not number.is_finite() or number.adjusted() > 30 or number != number.to_integral_value():
        raise ValueError("no whole number")
    return int(number)


def _switch(text: str) -> bool:
    if text.strip().lower() not in _SWITCHES:
        raise ValueError("no switch")
    return _SWITCHES[text.strip().lower()]


def _text(text: str) -> str:
    text.encode()  # what is no Unicode cannot be written into config.yaml
    if "\0" in text:
        raise ValueError("no text can hold a zero byte")
    return text


_SCALARS: dict[Any, tuple[Any, str]] = {
    bool: (_switch, "true or false"),
    int: (_whole, "a whole number"),
    float: (lambda text: float(text.strip().replace("\u2212", "-")), "a number"),
    str: (_text, "a text in Unicode"),
}


_HOLDERS: dict[Any, str] = {list: "a list such as [one, two]", dict: "a mapping such as {name: value}"}


def _wrong(name: str, where: str, what: str) -> TrainerError:
    return TrainerError(f"{name} in {where} {what}")


def is_section(kind: Any) -> type | None:
    """The dataclass behind `kind` (or `kind | None`), if there is one."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return next((one for one in kinds if isinstance(one, type) and is_dataclass(one)), None)


def several_of(kind: Any) -> type | None:
    """The dataclass of which `kind` holds several by name, if it does."""
    return is_section(get_args(kind)[1]) if get_origin(kind) is dict else None
