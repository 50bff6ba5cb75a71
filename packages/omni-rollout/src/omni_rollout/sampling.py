"""From the configuration and a training step to the settings that every request of a batch shares."""

from __future__ import annotations

from sde_samplers.errors import SamplerError
from sde_samplers.kinds import find_kind
from sde_samplers.settings import SamplerSettings

from .config import DiffusionRolloutAlgoConfig, DiffusionRolloutConfig
from .errors import RolloutConfigError


def window_steps(algo: DiffusionRolloutAlgoConfig, num_steps: int, training_step: int = 0) -> tuple[int, ...]:
    """The stochastic steps of one training step: the same for every rank, replica and sample of it.

    Raises `RolloutConfigError` when the window does not fit into `num_steps`.
    """
    if not find_kind(algo.kind).stochastic or algo.noise_level == 0:
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


def resolve_settings(
    config: DiffusionRolloutConfig, *, training_step: int = 0, validate: bool = False
) -> SamplerSettings:
    """What a batch of training samples (or, validating, of `val_kwargs`) is drawn with.

    Raises `RolloutConfigError` for values that contradict each other.
    """
    source = config.val_kwargs if validate else config
    pipeline, algo = source.pipeline, source.algo
    window = window_steps(algo, pipeline.num_inference_steps, training_step)
    names = SamplerSettings.__dataclass_fields__
    values = {name: getattr(part, name) for part in (pipeline, algo) for name in names if hasattr(part, name)}
    if not window:
        values |= {"kind": "ode", "noise_level": 0.0}
    try:
        return SamplerSettings(**values, window=window)
    except SamplerError as error:
        raise RolloutConfigError(str(error)) from error
