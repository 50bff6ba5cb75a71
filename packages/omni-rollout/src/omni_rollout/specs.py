"""The model's spec, from the package that an extra brings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import MissingExtraError, RolloutConfigError

if TYPE_CHECKING:
    from model_specs import ModelSpec


def spec_of(path: str, architecture: str | None = None) -> ModelSpec:
    """The spec of a diffusers pipeline folder.

    Args:
        path: of the folder.
        architecture: name or "module:Class" of the spec; None reads it from the folder.

    Raises:
        RolloutConfigError: there is no such folder or spec. MissingExtraError: model-specs is not installed.
    """
    try:
        from model_specs import SpecError, get_spec_for
    except ImportError as error:
        raise MissingExtraError(
            "Sampling needs model-specs: pip install './packages/omni-rollout[diffusers]' (or [vllm])"
        ) from error
    try:
        return get_spec_for(path, architecture)
    except SpecError as error:
        raise RolloutConfigError(str(error)) from error
