"""Whatever a person wrote, as a `Reward`: a reward or its class, or a function."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

from .base import Inputs, Reward, RewardResult, RewardSample, Score
from .errors import RewardConfigError, RewardError, nearest, require

ONE, MANY = ("image", "prompt", "metadata"), ("images", "prompts", "metadata")
_TYPES = {"int": numbers.Integral, "float": numbers.Real, "bool": bool, "str": str}
_STARRED = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class FunctionReward(Reward):
    """A function as a reward.

    Args:
        function: `f(image, prompt, metadata)` or the first one or two of these (after a star by name), for one sample; `f(sample)`;
            or, where its first parameter is called `images` or `samples`, for a list of them. One that is called `latents` gets
            these of one sample. It returns a number or a `RewardResult` (of a list: one for each). Parameters after these are
            its options
    """

    video = True  # the function gets what there is

    def __init__(self, function: Callable[..., Any], name: str = "", options: Mapping[str, Any] | None = None) -> None:
        self.name = name or getattr(function, "__name__", type(function).__name__)  # type: ignore[misc]
        options = dict(options or {})
        parameters = _signature(function, self.name)
        positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        first, self.inputs = positional[0].name if positional else "", _inputs(parameters)
        self._whole, self._many = first in ("sample", "samples"), first in ("images", "samples")
        given = [p for p in positional if p.default is p.empty or p.name in (*ONE, *MANY)][
            : 1 if self._whole else len(ONE)
        ]
        self._arguments = len(given)
        if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
            self._arguments = max(self._arguments, 2)
        require(
            self._arguments > 0,
            f"reward {self.name!r}: the function takes no picture; write it as def {self.name}(image, prompt)",
        )
        # Behind a star they are given by name: def f(image, *, prompt).
        by_name = {} if self._whole else dict(zip(MANY if self._many else ONE, ONE, strict=True))
        self._named = {
            n: f for n, f in by_name.items() if n in parameters and parameters[n].kind is Parameter.KEYWORD_ONLY
        }
        taken = {p.name for p in given} | self._named.keys()
        check_options(self.name, options, {key: p for key, p in parameters.items() if key not in taken})
        self._function = functools.partial(function, **options) if options else function

    def score_valid(self, samples: Sequence[RewardSample]) -> Sequence[Score]:
        if self._many:
            columns = [list(samples)] if self._whole else [[getattr(s, name) for s in samples] for name in ONE]
            named = {name: [getattr(s, field) for s in samples] for name, field in self._named.items()}
            answer: Sequence[Score] = self._function(*columns[: self._arguments], **named)
            return answer
        return [self._score_one(sample) for sample in samples]

    def _score_one(self, sample: RewardSample) -> Score:
        given = [sample] if self._whole else [getattr(sample, name) for name in ONE]
        named = {name: getattr(sample, field) for name, field in self._named.items()}
        try:
            score: Score = self._function(*given[: self._arguments], **named)
            return score
        except RewardError as error:
            return RewardResult.failed(error)


def as_reward(found: Any, options: Mapping[str, Any] | None = None, name: str = "") -> Reward:
    """A reward from a `Reward` (no options then), a class, or a function.

    Raises:
        RewardConfigError: it is none of these, an option is unknown, missing or of the wrong type, or the class refuses them.
    """
    options = dict(options or {})
    if isinstance(found, Reward):
        require(not options, f"options {options!r} go with a reward's name, class or function, not with {found!r}")
        return found
    if isinstance(found, type):
        name = name or found.__name__
        check_options(name, options, _signature(found, name))
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


def inputs_of(found: Any) -> Inputs:
    """What a reward, its class or a function reads; nothing is made."""
    if isinstance(found, Reward) or (isinstance(found, type) and issubclass(found, Reward)):
        return found.inputs
    if isinstance(found, type):  # of functions
        found = functools.partial(found.__call__, None)
    return _inputs(_signature(found, getattr(found, "__name__", "")))


def _inputs(parameters: Mapping[str, Parameter]) -> Inputs:
    return "latents" if next(iter(parameters), "") == "latents" else "pixels"


def check_options(name: str, options: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> None:
    """Refuse an option that there is not (the nearest one is named), one of another plain type, and one that is missing."""
    own = {key: p for key, p in parameters.items() if p.kind not in _STARRED}
    known = [key for key, p in own.items() if p.kind is not p.POSITIONAL_ONLY]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key, value in options.items():
        wrong = f"reward {name!r} has no option {key!r}.{nearest(key, known)} Options: {', '.join(known) or 'none'}."
        require(takes_any or key in known, wrong)
        annotation = own[key].annotation if key in own else ""
        wanted = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
        kind = _TYPES.get(wanted, object)
        fits = isinstance(value, kind) and (kind in (bool, object) or not isinstance(value, bool))
        require(fits, f"reward {name!r}: option {key}={value!r} must be of type {wanted}")
        finite = not isinstance(value, float) or math.isfinite(value)
        require(finite, f"reward {name!r}: option {key}={value!r} must be a finite number")
    for key, p in own.items():
        require(
            p.default is not p.empty or key in options,
            f"reward {name!r} needs the option {key!r}: set reward.options.{key}=VALUE in a config, or --option {key}=VALUE",
        )


def _signature(function: Any, name: str) -> Mapping[str, Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardConfigError(
            f"reward {name!r}: its parameters cannot be read ({error}); wrap it in a def"
        ) from error
