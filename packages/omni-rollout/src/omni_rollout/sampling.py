"""From the configuration and a training step to the fields that every request of a batch shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DiffusionRolloutAlgoConfig, DiffusionRolloutConfig, resolve_kind
from .errors import RolloutConfigError

_PIPELINE_FIELDS = (
    "height",
    "width",
    "num_frames",
    "num_inference_steps",
    "true_cfg_scale",
    "guidance_scale",
    "max_sequence_length",
)
_ALGO_FIELDS = ("kind", "noise_level", "solver", "shared_noise", "tail_ratio")
_OVERRIDES = (*_PIPELINE_FIELDS, *_ALGO_FIELDS, "window", "return_trajectory", "return_means", "adapter")


def window_steps(algo: DiffusionRolloutAlgoConfig, num_steps: int, training_step: int = 0) -> tuple[int, ...]:
    """The stochastic steps of one training step: the same for every rank, replica and sample of it.

    Raises `RolloutConfigError` when the window does not fit into `num_steps`.
    """
    if algo.kind == "ode" or algo.noise_level == 0:
        return ()
    # The last step goes to sigma = 0, where Flow-SDE still adds noise that nobody would remove: it stays an ODE step.
    first, end = algo.sde_window_range or (0, max(num_steps - 1, 1))
    if not 0 <= first < end <= num_steps:
        raise RolloutConfigError(
            f"algo.sde_window_range={[first, end]!r} does not fit into num_inference_steps={num_steps!r}."
        )
    size = end - first if algo.sde_window_size is None else algo.sde_window_size
    if size > end - first:
        raise RolloutConfigError(
            f"algo.sde_window_size={size!r} does not fit into steps {first}..{end - 1}: use at most {end - first}."
        )
    if size == 0:
        return ()
    from sde_samplers import windows

    if algo.sample_strategy == "fixed":
        return windows.Fixed(range(first, first + size)).steps(training_step)
    if algo.sample_strategy == "random":
        drawn = windows.Random(size, (first, end), seed=algo.sde_window_seed, period=algo.iters_per_group)
        return drawn.steps(training_step)
    moving = windows.Progressive(size, (first, end), period=algo.iters_per_group, stride=size, at_end="clamp")
    return moving.steps(training_step)


def resolve_sampling(
    config: DiffusionRolloutConfig,
    overrides: Mapping[str, Any] | None = None,
    *,
    training_step: int = 0,
    validate: bool = False,
) -> dict[str, Any]:
    """Fields of `GenerationRequest` that a batch shares: config first (`val_kwargs` when validating), then `overrides`.

    Raises `RolloutConfigError` for an override that no request has.
    """
    overrides = dict(overrides or {})
    unknown = sorted(set(overrides) - set(_OVERRIDES))
    if unknown:
        raise RolloutConfigError(f"sampling keys {unknown!r} are not known; allowed are {', '.join(_OVERRIDES)}.")
    source = config.val_kwargs if validate else config
    fields: dict[str, Any] = {name: getattr(source.pipeline, name) for name in _PIPELINE_FIELDS}
    fields |= {name: getattr(source.algo, name) for name in _ALGO_FIELDS}
    # Validation looks at what is trained, whatever draws the training samples.
    fields["adapter"] = "default" if validate else config.rollout_adapter
    fields["return_trajectory"] = not validate
    fields |= overrides
    fields["kind"] = resolve_kind(fields["kind"])
    if "window" not in overrides:
        ode = fields["kind"] == "ode" or fields["noise_level"] == 0
        fields["window"] = () if ode else window_steps(source.algo, fields["num_inference_steps"], training_step)
    return fields
