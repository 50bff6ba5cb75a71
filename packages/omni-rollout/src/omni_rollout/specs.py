"""The model's spec, from the package that an extra brings."""

from __future__ import annotations

from importlib.util import find_spec
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
            "Sampling needs model-specs: uv pip install './packages/omni-rollout[diffusers]' (or [vllm])"
        ) from error
    try:
        return get_spec_for(path, architecture)
    except SpecError as error:
        raise RolloutConfigError(str(error)) from error


def pipeline_class(spec: ModelSpec, stepwise: bool) -> str:
    """Qualified name of the vLLM-Omni pipeline that serves a model; it is looked for, and not imported, for that needs the engine.

    Raises:
        RolloutConfigError: the spec names none, or one in a module that is not there.
    """
    name = spec.engine_stepwise_pipeline if stepwise else spec.engine_pipeline
    if not name and spec.engine_pipeline:
        raise RolloutConfigError(f"{spec.name!r} cannot run step by step: set vllm_omni.step_execution=false.")
    if not name:
        raise RolloutConfigError(
            f"{spec.name!r} has no pipeline in vLLM-Omni: name one in {type(spec).__name__}.engine_pipeline, or set "
            "rollout.backend=diffusers."
        )
    module, _, attribute = name.partition(":")
    try:
        found = find_spec(module)
    except (ImportError, ValueError):  # a folder above it is no package
        found = None
    if found is None or not attribute:
        raise RolloutConfigError(
            f"engine_pipeline={name!r} of {type(spec).__name__} is no 'module:Class' that can be found here."
        )
    return f"{module}.{attribute}"
