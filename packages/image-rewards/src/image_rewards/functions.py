"""Whatever a person wrote, as a `Reward`: a reward or its class, or a function."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from image_rewards.base import Reward, RewardResult, RewardSample, Score
from image_rewards.errors import RewardConfigError, RewardError, nearest

ONE, MANY = ("image", "prompt", "metadata"), ("images", "prompts", "metadata")
_TYPES = {"int": numbers.Integral, "float": numbers.Real, "bool": bool, "str": str}


class FunctionReward(Reward):
    """A function as a reward.

    function    `f(image, prompt, metadata)` or the first one or two of these (after a star by name), for one sample; `f(sample)`;
                or, where its first parameter is called `images` or `samples`, for a list of them. It returns a number or a
                `RewardResult` (of a list: one for each). Parameters after these are its options
    """

    video = True  # the function gets what there is

    def __init__(self, function: Callable[..., Any], name: str = "", options: Mapping[str, Any] | None = None) -> None:
        own = getattr(function, "__name__", type(function).__name__)
        self.name = name or own  # type: ignore[misc]
        options = dict(options or {})
        parameters = list(_signature(function, self.name).values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        first = positional[0].name if positional else ""
        self._whole, self._many = first in ("sample", "samples"), first in ("images", "samples")
        needed = [p for p in positional if p.default is p.empty]
        taken = (
            1
            if self._whole
            else min(len(ONE), sum(p.default is p.empty or p.name in (*ONE, *MANY) for p in positional))
        )
        self._arguments = taken
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            self._arguments = max(taken, 2)
        elif not taken:
            raise RewardConfigError(
                f"reward {self.name!r}: the function takes no picture; write it as def {self.name}(image, prompt)"
            )
        # Behind a star they are given by name: def f(image, *, prompt).
        names = MANY if self._many else ONE
        self._named = (
            {}
            if self._whole
            else {
                name: field
                for name, field in zip(names, ONE, strict=True)
                if any(p.kind is p.KEYWORD_ONLY and p.name == name for p in parameters)
            }
        )
        missing = [p.name for p in needed[taken:] if p.name not in options]
        missing += [
            p.name
            for p in parameters
            if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in (*options, *self._named)
        ]
        known = {
            p.name: p
            for p in parameters
            if p not in positional[:taken] and p.kind is not p.VAR_POSITIONAL and p.name not in self._named
        }
        check_options(self.name, options, known, missing)
        self._function = functools.partial(function, **options) if options else function

    def score_valid(self, samples: Sequence[RewardSample]) -> Sequence[Score]:
        if self._many:
            columns = [[getattr(s, name) for s in samples] for name in ONE]
            lists = {name: [getattr(s, field) for s in samples] for name, field in self._named.items()}
            rows = [list(samples)] if self._whole else columns[: self._arguments]
            answer: Sequence[Score] = self._function(*rows, **lists)
            return answer
        results: list[Score] = []
        for sample in samples:
            given = [sample] if self._whole else [getattr(sample, name) for name in ONE]
            try:
                by_name = {name: getattr(sample, field) for name, field in self._named.items()}
                results.append(self._function(*given[: self._arguments], **by_name))
            except RewardError as error:
                results.append(RewardResult.failed(error))
        return results


def as_reward(found: Any, options: Mapping[str, Any] | None = None, name: str = "") -> Reward:
    """A reward from a `Reward` (no options then), a class, or a function.

    Raises:
        RewardConfigError: it is none of these, an option is unknown, missing or of the wrong type, or the class refuses them.
    """
    options = dict(options or {})
    if isinstance(found, Reward):
        if options:
            raise RewardConfigError(
                f"options {options!r} go with a reward's name, class or function, not with {found!r}"
            )
        return found
    if isinstance(found, type):
        name = name or found.__name__
        parameters = _signature(found, name)
        required = [
            p.name
            for p in parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        check_options(name, options, parameters, [key for key in required if key not in options])
        try:
            made = found(**options)
        except RewardError:
            raise
        except Exception as error:
            raise RewardConfigError(
                f"reward {name!r} cannot be made with {options!r}: {type(error).__name__}: {error}"
            ) from error
        return made if isinstance(made, Reward) else as_reward(made, name=name)
    if callable(found):
        return FunctionReward(found, name, options)
    raise RewardConfigError(
        f"reward {name or found!r} is a {type(found).__name__}; give a function (image, prompt), a subclass of "
        "image_rewards.Reward, or an instance of one"
    )


def check_options(
    name: str, options: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], missing: Sequence[str]
) -> None:
    """Refuse an option that there is not (the nearest one is named), one that is missing, and one of another plain type."""
    known = [key for key, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL, p.POSITIONAL_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key, value in options.items():
        if key not in known and not takes_any:
            raise RewardConfigError(
                f"reward {name!r} has no option {key!r}.{nearest(key, known)} Options: {', '.join(known) or 'none'}."
            )
        annotation = parameters[key].annotation if key in parameters else ""
        wanted = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        kind = _TYPES.get(wanted)
        if kind is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise RewardConfigError(f"reward {name!r}: option {key}={value!r} must be of type {wanted}")
        if isinstance(value, float) and not math.isfinite(value):
            raise RewardConfigError(f"reward {name!r}: option {key}={value!r} must be a finite number")
    if missing:
        raise RewardConfigError(
            f"reward {name!r} needs the option {missing[0]!r}: set reward.options.{missing[0]}=VALUE in a config, or "
            f"--option {missing[0]}=VALUE"
        )


def _signature(function: Any, name: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardConfigError(
            f"reward {name!r}: its parameters cannot be read ({error}); wrap it in a def"
        ) from error
