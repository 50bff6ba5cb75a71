"""Alpha and rank as trainers write them: in PEFT's `adapter_config.json` or the header of a safetensors file, there as plain keys
or as JSON inside one key. Where PEFT has a default or a rule, it is PEFT's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import PayloadError
from .experts import EXPERTS
from .foreign import what_is

_PEFT_ALPHA = 8.0  # LoraConfig's default
_ALPHA_KEYS = frozenset(
    {"lora_alpha", "alpha", "network_alpha", "ss_network_alpha", "linear_alpha", "adapter_alpha", "networkalpha"}
)
_RANK_KEYS = frozenset(
    {"r", "rank", "dim", "lora_rank", "lora_r", "lora_dim", "network_dim", "network_rank", "ss_network_dim"}
    | {"adapter_rank", "networkdim"}
)
_OTHER_KINDS = {
    "use_dora": "DoRA",
    "lora_decompose": "DoRA",
    "lora_bias": "a LoRA with bias",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "arrow_config": "Arrow",
    "alora_invocation_tokens": "activated LoRA",
    "target_parameters": "a LoRA on bare parameters",
    "layer_replication": "a LoRA over replicated layers",
    "modules_to_save": "a LoRA with whole modules beside it",
    "trainable_token_indices": "a LoRA with trained tokens",
}
# Sections of a header that may say alpha; any other may be a text encoder's, or an optimizer's with an alpha of its own.
_SECTIONS = frozenset(
    {"lora", "network", "adapter", "peft", "default", "lora_config", "network_config", "adapter_config", "peft_config"}
    | {"model", "config", "training", "training_config", "transformer_lora"}
)
_BASE_CHANGING = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True)
class Settings:
    """Alpha of every layer. `rank` is what was stated, to be compared with the tensors; None when nothing was."""

    origin: str
    alpha: float
    rank: int | None = None
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rank_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    target_modules: tuple[str, ...] | None = None

    def alpha_of(self, names: Sequence[str], rank: int) -> float:
        """Alpha with the scale alpha / rank for a layer; `names` are its names, the one that PEFT saw first."""
        stated = pattern_value(self.rank_pattern, names, self.rank)
        if stated is not None and stated != rank:
            raise PayloadError(
                f"{self.origin}: rank {stated:g} is stated for {names[0]!r} and its tensors have rank {rank}, so its alpha is "
                "unclear; correct the file, or say alpha yourself (load_any(alpha=…), --alpha)."
            )
        alpha = pattern_value(self.alpha_pattern, names, self.alpha)
        assert alpha is not None
        return alpha * math.sqrt(rank) if self.rslora else alpha


def pattern_value(patterns: Mapping[str, float], names: Sequence[str], default: float | None) -> float | None:
    """The value of the first pattern that fits, as PEFT looks it up: a regular expression at the end of the name, after a
    dot or from its start."""
    for name in names:
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
    return default


def config_settings(file: Path) -> dict[str, Settings]:
    """From an `adapter_config.json`. Raises `PayloadError` when it cannot be read or is no plain LoRA's."""
    data = file.read_bytes()
    try:
        config = json.loads(data)  # from bytes: with or without byte order mark, UTF-8, 16 or 32
    except (ValueError, RecursionError) as error:
        kind = None if data[:1] in b"{[" else what_is(data[:512], len(data))
        problem = f"no JSON but {kind}" if kind else f"no whole JSON ({error}); copy it again"
        raise PayloadError(f"{file} is {problem}.") from error
    if not isinstance(config, dict):
        raise PayloadError(f"{file} holds {json.dumps(config)[:40]}, not the settings of an adapter; copy it again.")
    return {"": _settings({key.lower(): value for key, value in config.items()}, str(file), peft=True)}


def header_settings(metadata: Mapping[str, str], file: str) -> dict[str, Settings]:
    """From a file's header, by expert ("" for all); empty when it does not say. Raises `PayloadError` when two entries differ."""
    found: dict[str, list[Settings]] = {}
    for key, group, values in _groups(metadata):
        peft = "peft_type" in values or {"r", "target_modules"} <= values.keys()
        if peft or any(_given(values.get(name)) for name in _ALPHA_KEYS):
            found.setdefault(group, []).append(_settings(values, f"{file}, header{key}", peft=peft))
    for entries in found.values():
        if len({(entry.alpha, entry.rslora) for entry in entries}) > 1:
            says = " and ".join(
                f"alpha {entry.alpha:g} ({entry.origin.removeprefix(file + ', ')})" for entry in entries
            )
            raise PayloadError(f"{file} says {says}; say which (load_any(alpha=…), --alpha).")
    return {group: max(entries, key=lambda entry: len(entry.alpha_pattern)) for group, entries in found.items()}


def number(value: Any, what: str) -> float:
    """A finite number from 0 up, also as text. Raises `PayloadError`."""
    try:
        if isinstance(value, bool):
            raise ValueError
        result = float(value)
    except (TypeError, ValueError):
        raise PayloadError(f"{what} is {value!r}; it must be a number.") from None
    if not math.isfinite(result) or result < 0:
        raise PayloadError(f"{what} is {value!r}; it must be a finite number, 0 or above.")
    return result


def _settings(values: Mapping[str, Any], origin: str, *, peft: bool) -> Settings:
    _check_kind(values, origin)
    alphas, ranks = (
        {key: number(value, f"{origin}: {key}") for key, value in values.items() if key in keys and _given(value)}
        for keys in (_ALPHA_KEYS, _RANK_KEYS)
    )
    if len(set(alphas.values())) > 1:
        raise PayloadError(f"{origin} says {alphas!r}; say which (load_any(alpha=…), --alpha).")
    patterns: dict[str, dict[str, float]] = {}
    for name in ("alpha_pattern", "rank_pattern"):
        given = values.get(name) or {}
        if not isinstance(given, Mapping):
            raise PayloadError(f"{origin}: {name} is {given!r}; it must map patterns to numbers.")
        patterns[name] = {key: number(value, f"{origin}: {name}[{key!r}]") for key, value in given.items()}
        for key in given:
            try:
                re.compile(key)
            except re.error as error:
                raise PayloadError(f"{origin}: {name} has {key!r}, no regular expression ({error}).") from error
    targets = values.get("target_modules")
    return Settings(
        origin,
        next(iter(alphas.values()), _PEFT_ALPHA if peft else math.nan),
        int(next(iter(ranks.values()))) if len(set(ranks.values())) == 1 else None,
        patterns["alpha_pattern"],
        patterns["rank_pattern"],
        rslora=_on(values.get("use_rslora")),
        target_modules=tuple(sorted(map(str, targets))) if isinstance(targets, list) else None,
    )


def _check_kind(values: Mapping[str, Any], origin: str) -> None:
    problems = [f"{kind} ({key})" for key, kind in _OTHER_KINDS.items() if _on(values.get(key))]
    kind, bias = values.get("peft_type"), values.get("bias")
    if _on(kind) and str(kind).rpartition(".")[2].upper() != "LORA":
        problems.append(f"peft_type {kind}")
    if _on(bias):
        problems.append(f"bias {bias!r}")
    start = str(values.get("init_lora_weights")).lower()
    if start.startswith(_BASE_CHANGING):
        problems.append(f"init_lora_weights {start!r}, whose training changed the base weights too")
    if problems:
        raise PayloadError(
            f"{origin}: {', '.join(problems)}: no plain LoRA, so A and B alone would give another result; make a plain "
            "LoRA of it with PEFT (peft.save_as_lora, or save_pretrained's path_initial_model_for_weight_conversion)."
        )


def _given(value: Any) -> bool:
    """Whether a number is there: headers hold text, where None is a word (kohya writes Dynamic for ranks that differ)."""
    return str(value).strip().lower() not in ("", "none", "null", "dynamic")


def _on(value: Any) -> bool:
    """Whether a switch is on or a list holds something."""
    return _given(value) and str(value).strip().lower() not in ("false", "0", "[]", "{}")


def _groups(metadata: Mapping[str, str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(where, expert or "", settings) of the header's plain keys, and of every JSON object in it."""
    yield from (("", group, values) for group, values in _by_expert(metadata).items())
    for key, text in metadata.items():
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield from ((f" {key}", group, values) for group, values in _by_expert(value).items())


def _by_expert(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        head, _, rest = key.rpartition(".")
        head = head.lower()
        if isinstance(value, Mapping) and not head and key in (*EXPERTS, *_SECTIONS):
            for group, inner in _by_expert(value).items():
                groups.setdefault(key if key in EXPERTS else group, {}).update(inner)
        elif head in ("", *EXPERTS, *_SECTIONS):  # others are parts such as text_encoder
            groups.setdefault(head if head in EXPERTS else "", {})[rest.lower().replace("-", "_")] = value
    return groups
