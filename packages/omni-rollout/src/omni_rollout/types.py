"""What goes into a backend and what comes out: one request, one sample.

Shapes: W window (trained) steps, K denoising steps, S prompt tokens, C H W T as usual, "…" the latent layout of the
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .config import check_solver, resolve_kind
from .errors import RolloutConfigError

#: Keys of `DiffusionOutput.extra_fields` that must be fp32: a rounded trajectory moves log-probs by far more than a
#: clip range.
FP32_FIELDS = ("latents", "next_latents", "sigmas", "std", "means", "final_latents")


@dataclass(frozen=True)
class GenerationRequest:
    """One sample to draw.

    Its noise depends on (seed, uid, index) alone, so the same request is the same picture anywhere.
    """

    request_id: str
    """Unique among the requests in flight."""
    uid: str
    """Id of the prompt's group (never the text: two prompts may read the same)."""
    index: int
    """Number of the sample within its group."""
    prompt: str
    seed: int
    height: int
    width: int
    num_inference_steps: int
    negative_prompt: str | None = None
    num_frames: int = 1
    true_cfg_scale: float = 1.0
    guidance_scale: float | None = None
    max_sequence_length: int = 512
    kind: str = "ode"
    """Sampler of the window's steps (sde_samplers' names); all other steps are ODE steps."""
    noise_level: float = 0.0
    window: tuple[int, ...] = ()
    """Step numbers in 0..K-1 that inject noise and are trained."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    return_trajectory: bool = True
    """Return window latents and prompt embeddings; without it only the picture and the final latents come back."""
    return_means: bool = False
    """Return the means of the window's transitions too: losses that compare means need no second forward for the old ones."""
    solver: str = "euler"
    """Integrator of the ODE steps: euler, dpm1, dpm2 or dpm3."""
    shared_noise: bool = False
    """Start from the noise of sample 0 of the group; the noise of the steps stays this sample's own."""
    tail_ratio: float = 1.0
    """Share of the steps after the window (of all steps without one) that is kept; below 1 `solver` integrates them and
    Euler the steps before. Window positions and `num_inference_steps` are those of the full grid."""
    adapter: str = "default"
    """LoRA adapter that samples; "reference" is the base policy."""
    prompt_ids: tuple[int, ...] | None = None
    """Token ids of the prompt, for backends that take tokens; the text is kept beside them."""
    init_latents: Tensor | None = None
    """Clean latents [...] to start from instead of pure noise (an edit turn); see `start_step`."""
    start_step: int = 0
    """First step that runs: `init_latents` are noised to that step's sigma. 0 starts from pure noise."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", resolve_kind(self.kind))
        object.__setattr__(self, "window", tuple(int(step) for step in self.window))
        check_solver("", self.solver, self.tail_ratio)
        steps = self.num_inference_steps
        if any(not self.start_step <= step < steps for step in self.window) or len(set(self.window)) != len(
            self.window
        ):
            raise RolloutConfigError(
                f"window={self.window!r} does not fit: step numbers must be distinct and in "
                f"{self.start_step}..{steps - 1} for num_inference_steps={steps}."
            )
        if list(self.window) != sorted(self.window):
            raise RolloutConfigError(f"window={self.window!r} must be ascending.")
        if self.window and (self.kind == "ode" or self.noise_level <= 0):
            raise RolloutConfigError(
                f"window={self.window!r} with kind={self.kind!r} and noise_level={self.noise_level!r} has no noise to "
                "train on: choose a stochastic kind and a positive noise_level, or an empty window."
            )
        if self.uses_cfg and self.negative_prompt is None:
            raise RolloutConfigError(
                f"true_cfg_scale={self.true_cfg_scale!r} needs a negative_prompt (a space will do); none was given."
            )
        if (self.init_latents is None) != (self.start_step == 0):
            raise RolloutConfigError("init_latents and start_step > 0 belong together: give both or neither.")

    @property
    def window_end(self) -> int:
        """Where the tail begins: one past the last window step, or the first step that runs."""
        return self.window[-1] + 1 if self.window else self.start_step

    @property
    def uses_cfg(self) -> bool:
        """True when the transformer runs a second time on the negative prompt."""
        return self.true_cfg_scale > 1.0

    def replace(self, **changes: Any) -> GenerationRequest:
        """A copy with some fields changed (checked again)."""
        return replace(self, **changes)


@dataclass
class DiffusionOutput:
    """One finished (or aborted) sample.

    `extra_fields`, present as far as they were asked for:
    latents, next_latents [W, …] · step_index [W] long · sigmas [steps taken + 1] · std [W] · means [W, …] · final_latents […] ·
    prompt_embeds [S, C] · prompt_embeds_mask [S] bool · pooled_prompt_embeds [C] · negative_… · policy_version int ·
    seed int · schedule_hash str · batch_size int (samples it was denoised with) · forwards float (rows of the transformer
    that it cost, counted; a step with true CFG costs 2)
    """

    diffusion_output: Tensor | None
    """uint8 [C, H, W] or [T, C, H, W]; None when aborted."""
    log_probs: Tensor | None = None
    """fp32 [W]: log-prob of each window step, averaged over latent elements; None for an empty window."""
    stop_reason: str | None = None
    """One of "completed" and "aborted", or None when unknown."""
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def check(self) -> DiffusionOutput:
        """Refuse a trajectory that was rounded below fp32, or one with holes. Returns self."""
        for name in FP32_FIELDS:
            value = self.extra_fields.get(name)
            if value is not None and value.dtype != torch.float32:
                raise RolloutConfigError(
                    f"{name} has dtype {value.dtype}: trajectories are fp32 by contract, a rounded one moves "
                    "log-probs by up to 0.15. Keep the sampler state in fp32 and cast only what enters the transformer."
                )
        if self.stop_reason == "completed" and self.diffusion_output is None:
            raise RolloutConfigError("a completed sample must hold a picture: diffusion_output is None.")
        return self


def aborted(request: GenerationRequest, policy_version: int) -> DiffusionOutput:
    """The answer to a request that was cancelled before its picture was finished."""
    return DiffusionOutput(
        None, stop_reason="aborted", extra_fields={"policy_version": policy_version, "seed": request.seed}
    )
