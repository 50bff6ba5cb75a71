"""What a reward is: a sample in, a result out.

    RewardSample   picture uint8 [C,H,W] (video [T,C,H,W]) or latents, prompt, metadata
    RewardResult   score, components, and an error where there is no score
    Reward         score(samples) -> results, one for one and in order

Two rules hold everywhere. A failure is never a number: its score is NaN and its `error` says why. A score depends
only on its own sample, so batch size, order and the number of workers cannot change it.
"""

from __future__ import annotations

import copy
import inspect
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from .errors import RewardError, RewardInputError, RewardServiceError, require

Inputs = Literal["pixels", "latents"]
"""What a reward reads."""
MAX_PIXELS = 1 << 24  # per frame: 4096 x 4096
MAX_TOTAL_PIXELS = 1 << 27  # per video: 128 frames of 1024 x 1024


@dataclass(frozen=True)
class RewardSample:
    """One generated picture or video, and what was asked for.

    Args:
        image: uint8 [C,H,W] or [T,C,H,W], C = 3 (RGB). For a reward that reads latents: the clean ones, fp32, as the model holds
            them
        prompt: the text it was generated from
        metadata: targets of the reward, e.g. {"count": 3, "color": "red", "shape": "circle"} or {"text": "OPEN"}
        uid, index: prompt id and position in its group: only for messages, never for scoring
    """

    image: np.ndarray
    prompt: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    uid: str = ""
    index: int = 0

    @property
    def label(self) -> str:
        """Names the sample in messages."""
        return f"sample {self.uid or '?'}[{self.index}]"


@dataclass(frozen=True)
class RewardResult:
    """A score and its parts, or the reason why there is none.

    Args:
        score: the number to optimise; NaN when `error` is set, unless a policy put a value there
        components: the parts of the score and whatever else was measured, for logs and galleries
        error: None, or "ErrorType: message"
        retryable: whether the failure may pass by itself (a service, a worker), unlike a bad picture
        look: what `quality.look_of` says of the picture, where a worker pool scored it
    """

    score: float
    components: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    retryable: bool = False
    look: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def failed(cls, error: BaseException | str, *, retryable: bool | None = None) -> RewardResult:
        """A result without a score. Failures of services are retryable, bad inputs are not."""
        if isinstance(error, BaseException):
            known = isinstance(error, RewardError)
            retryable = retryable if retryable is not None else isinstance(error, RewardServiceError) or not known
            error = f"{type(error).__name__}: {error}"
        return cls(math.nan, {}, error, bool(retryable))

    @property
    def ok(self) -> bool:
        return self.error is None

    def unwrap(self) -> float:
        """The score, or a `RewardError` with the recorded reason."""
        if self.error is not None:
            raise RewardError(self.error)
        return self.score


Score = RewardResult | float
"""What a reward may return for a sample; numpy and torch numbers count as floats."""


class Reward(ABC):
    """Base class. Subclasses write `score_valid` and, where they need targets, `check_target`.

    video = True says that a reward takes [T,C,H,W] itself; the others get frames from `VideoReward`. inputs = "latents" says that
    `RewardSample.image` shall hold a sample's clean latents: no picture is decoded for it.
    """

    name: ClassVar[str] = ""
    video: ClassVar[bool] = False
    inputs: Inputs = "pixels"
    batch_size: int = 16  # how many samples a worker hands over at once

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__
        known = get_args(Inputs)
        require(
            cls.inputs in known, f"reward {cls.name!r}: inputs={cls.inputs!r} is none of {known}; it says what is read."
        )

    def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score every sample; results come in the order of the samples. Pictures are read-only inside.

        A sample that cannot be scored gets a failed result. Any error but a `RewardError` is a bug or a broken machine and
        is raised.
        """
        results: list[RewardResult | None] = [None] * len(samples)
        valid: list[int] = []
        for i, sample in enumerate(samples):
            try:
                if self.inputs == "latents":
                    check_latents(sample)
                else:
                    check_image(sample, allow_video=self.video)
                self.check_target(sample.prompt, sample.metadata)
            except RewardError as error:
                results[i] = RewardResult.failed(error)
            else:
                valid.append(i)
        given = [_read_only(samples[i]) for i in valid]
        try:
            answer = self.score_valid(given) if given else []
        except ValueError as error:
            if "read-only" not in str(error):
                raise
            raise RewardError(
                f"reward {self.name!r} writes into its picture, which other rewards read too; write into "
                f"sample.image.copy() ({error})"
            ) from error
        for i, value in zip(valid, _listed(answer, given, self.name), strict=True):
            results[i] = as_result(value, self.name, samples[i])
        return [result for result in results if result is not None]

    @abstractmethod
    def score_valid(self, samples: Sequence[RewardSample]) -> Sequence[Score] | np.ndarray:
        """Score samples whose pictures and targets are known to be good: a result, or just a number, for each."""

    def check_target(self, prompt: str, metadata: Mapping[str, Any]) -> None:  # noqa: B027  (most have no target)
        """Raise `RewardTargetError` when prompt and metadata do not hold the target. Called before training too."""

    def target_of(self, prompt: str, metadata: Mapping[str, Any]) -> Any:
        """What will be looked for, for `check` to print; None where it is the prompt itself. Raises as `check_target`."""
        return None

    def sleep(self) -> None:  # noqa: B027
        """Give GPU memory back until the next sample."""

    def close(self) -> None:  # noqa: B027
        """Release what the reward holds open (connections, threads)."""

    def __call__(self, sample: RewardSample) -> RewardResult:
        return self.score([sample])[0]


class PerSampleReward(Reward):
    """A reward that looks at one sample at a time."""

    def score_valid(self, samples: Sequence[RewardSample]) -> Sequence[Score]:
        results: list[Score] = []
        for sample in samples:
            try:
                results.append(self.score_one(sample))
            except RewardError as error:
                results.append(RewardResult.failed(error))
        return results

    @abstractmethod
    def score_one(self, sample: RewardSample) -> Score:
        """A result, or just a number, for one sample; a `RewardError` becomes its failed result."""


def _read_only(sample: RewardSample) -> RewardSample:
    """The sample with a picture that cannot be written to and metadata of its own."""
    image = sample.image.view()
    image.flags.writeable = False
    return replace(sample, image=image, metadata=copy.deepcopy(dict(sample.metadata)))


def _listed(answer: Any, samples: Sequence[RewardSample], name: str) -> list[Any]:
    """What `score_valid` returned, as one value a sample. Raises `RewardError` when it is not that."""
    if not isinstance(answer, list | tuple) and hasattr(answer, "tolist") and getattr(answer, "ndim", None) == 1:
        answer = answer.tolist()  # an array or a tensor
    if isinstance(answer, list | tuple) and len(answer) == len(samples):
        return list(answer)
    came = f"{len(answer)} results" if isinstance(answer, list | tuple) else _shown(answer)
    raise RewardError(
        f"reward {name!r} returned {came} for {len(samples)} samples, from {samples[0].label}; return one RewardResult or "
        "number for each, in their order"
    )


def as_result(value: Any, name: str, sample: RewardSample) -> RewardResult:
    """A `RewardResult` of finite floats from a result or a number; anything else becomes a failed result that says what came."""
    result = value if isinstance(value, RewardResult) else RewardResult(value)
    if result.error is not None:
        error = str(result.error) or f"RewardError: reward {name!r} failed for {sample.label} and gave no cause"
        return replace(result, error=error)
    wrong = "it returned {}; return a finite number, or RewardResult(number, components)"
    try:
        score = as_number(result.score)
        wrong = "components must be {{name: finite number}}, and there is {}"
        if not isinstance(result.components, Mapping):
            raise ValueError(_shown(result.components))
        return RewardResult(score, {str(key): as_number(part, key) for key, part in result.components.items()})
    except ValueError as error:
        return RewardResult.failed(RewardError(f"reward {name!r}, {sample.label}: {wrong.format(error)}"))


def as_number(value: Any, key: Any = None) -> float:
    """A finite float from a Python, numpy or torch number, or from an array or tensor of one. Raises `ValueError` that shows
    what came."""
    came = _shown(value) if key is None else f"{key!r}: {_shown(value)}"
    number = value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1 else value
    if not isinstance(number, numbers.Real):
        raise ValueError(came)
    try:
        finite = math.isfinite(number)
    except OverflowError:
        finite = False
    if not finite:
        raise ValueError(f"{came}, which is not a finite number")
    return float(number)


def _shown(value: Any) -> str:
    """What came, short, for messages."""
    if inspect.iscoroutine(value):
        value.close()
        return "a coroutine (write `def`, not `async def`)"
    kind, shape = type(value).__name__, getattr(value, "shape", None)
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a whole number of many digits"
    if isinstance(value, int | float):
        return str(value)[:40]
    return f"a {kind} of shape {tuple(shape)}" if shape else "None" if value is None else f"a {kind} ({value!r:.60})"


def check_image(sample: RewardSample, *, allow_video: bool) -> None:
    """Raise `RewardInputError` unless the picture is uint8 RGB [3,H,W], or [T,3,H,W] where video is allowed."""
    image = sample.image
    if not isinstance(image, np.ndarray):
        fault = f"image is a {type(image).__name__}, not a numpy array. Give uint8 [3,H,W] or [T,3,H,W]."
    elif image.dtype != np.uint8:
        nan = ", with NaN or infinite values" if image.dtype.kind == "f" and not np.isfinite(image).all() else ""
        fault = (
            f"image has dtype {str(image.dtype)!r}{nan}. Rewards read uint8; convert floats in [0, 1] with "
            "(x.clip(0, 1) * 255).round().astype('uint8')."
        )
    else:
        fault = _wrong_shape(image.shape, allow_video)
    require(not fault, f"{sample.label}: {fault}", RewardInputError)


def check_latents(sample: RewardSample) -> None:
    """Raise `RewardInputError` unless the sample has latents: an array of finite floats."""
    latents = sample.image
    if not isinstance(latents, np.ndarray) or latents.dtype.kind != "f":
        what = f"an array of {latents.dtype}" if isinstance(latents, np.ndarray) else f"a {type(latents).__name__}"
        fault = (
            f"this reward reads clean latents, an array of floats, and got {what}; score it in a run, which has them."
        )
    elif not latents.size or not np.isfinite(latents).all():
        fault = f"the latents {latents.shape!r} are empty, or have NaN or infinite values."
    else:
        return
    raise RewardInputError(f"{sample.label}: {fault}")


def _wrong_shape(shape: tuple[int, ...], allow_video: bool) -> str:
    """What is wrong with a picture's shape, and what to change; "" when nothing is."""
    if len(shape) not in (3, 4):
        return f"image has shape {shape!r}. Give [3,H,W], or [T,3,H,W] for a video."
    frames, (channels, height, width) = 1 if len(shape) == 3 else shape[0], shape[-3:]
    if frames == 0:
        return f"the video has zero frames (shape {shape!r})."
    if len(shape) == 4 and not allow_video:
        return (
            f"a video of shape {shape!r} was given to a reward for pictures. Say how frames are combined, e.g. "
            "load(name, video='mean')."
        )
    if channels != 3:
        return f"image has shape {shape!r}, so {channels} channels. Rewards read RGB with channels first, [3,H,W]."
    if height == 0 or width == 0:
        return f"the picture is empty (shape {shape!r})."
    if height * width > MAX_PIXELS:
        return f"{height} x {width} pixels are more than the limit of {MAX_PIXELS} a frame. Scale it down first."
    if frames * height * width > MAX_TOTAL_PIXELS:
        return (
            f"{frames * height * width} pixels in {frames} frames are more than the limit of {MAX_TOTAL_PIXELS} a video. "
            "Score fewer frames."
        )
    return ""


def check_weights(**weights: float) -> None:
    """Raise `RewardConfigError` for a negative weight, or when all are zero."""
    shown = ", ".join(f"{name}={weight!r}" for name, weight in weights.items())
    require(
        min(weights.values()) >= 0 < max(weights.values()), f"{shown}: give no negative weight, and not zero to all."
    )
