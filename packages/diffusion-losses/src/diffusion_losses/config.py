"""What a person can choose about the loss. Imports without torch, so that a config can be checked anywhere.

Every field that exists because public systems disagree names its readings, and its comment says why the default is
the default. `packages/diffusion-losses/README.md` lists which mode reads which tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from annotated_types import Interval

from .errors import LossError, unknown_name
from .specs import POLICY_GRADIENT, LossSpec, find_loss

MeanKLKind = Literal["std", "paper", "flow_grpo", "unscaled"]
VelocityKLKind = Literal["velocity", "velocity_std", "velocity_paper"]
KLKind = Literal["auto", MeanKLKind, VelocityKLKind, "old_policy"]
StepWeighting = Literal["auto", "uniform", "inverse_step", "noise_scale"]
ClipSpace = Literal["log_ratio", "ratio"]
MaskBoundary = Literal["at_or_above", "above"]
AdvantageMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]
NFTForm = Literal["adaptive", "theorem"]
PreferenceLoss = Literal["sigmoid", "ipo", "hinge"]
AWMWeighting = Literal["uniform", "t", "t2", "huber", "ghuber"]
AWMAdvantage = Literal["raw", "unit"]
RatioLevel = Literal["step", "trajectory"]
Positive = Annotated[float, Interval(gt=0, le=1e9)]
NotNegative = Annotated[float, Interval(ge=0, le=1e9)]
MEAN_KL_KINDS, VELOCITY_KL_KINDS = get_args(MeanKLKind), get_args(VelocityKLKind)
PREFERENCE_LOSSES = get_args(PreferenceLoss)
CLIP_SPACES, MASK_BOUNDARIES = get_args(ClipSpace), get_args(MaskBoundary)
ADVANTAGE_MODES, NFT_FORMS, AWM_WEIGHTINGS = get_args(AdvantageMode), get_args(NFTForm), get_args(AWMWeighting)

# Tensors that engine and trainer make for whoever reads them.
MADE_BY_TRAINER = ("old_means", "old_velocity", "old_log_probs", "ref_means", "ref_velocity", "lag_velocity")


@dataclass(frozen=True)
class DiffusionLossConfig:
    """One loss, fully named.

    Raises `LossError` (a `ValueError`) for an unknown name, a clip or a beta that is not above zero, or a negative
    coefficient.
    """

    # A name of `specs.known_losses()`, or "module:attribute" of a `LossSpec`.
    loss_mode: str = "flow_grpo"
    # What a loss of one's own reads beside the fields below, by the names that its spec lists.
    options: dict[str, Any] = field(default_factory=dict)
    # Ratio clip epsilon. 1e-4 is FlowGRPO's and DanceGRPO's: log-probs are means over elements, so ratios are close
    # to 1. GRPO-Guard is published with 2e-6; MixGRPO with 1e-4; AWM's own code with 1 (inactive).
    clip_ratio: Positive = 1e-4
    # Advantages are clamped to +-this (every public system but Flow-DPPO's). It is also NFT's normaliser.
    adv_clip_max: Positive = 5.0
    # DiffusionNFT's beta. 0.5 is verl-omni's; the NFT paper uses 1 for single rewards and 0.1 for OCR and mixtures.
    mix_beta: Positive = 0.5
    # Weight of the KL term, in every mode.
    ref_kl_coef: NotNegative = 0.0
    # Floor of NFT's adaptive weights.
    adaptive_weight_min: Positive = 1e-5
    # Diffusion-DPO's beta. 2000 is verl-omni's and Flow-Factory's default; FlowGRPO's script uses 100.
    dpo_beta: Positive = 2000.0
    # Flow-DPPO's divergence threshold.
    kl_mask_threshold: NotNegative = 1e-5
    # Whether that divergence is divided by S^2 (paper) or only by 2 (verl-omni's switch).
    add_kl_coefficient: bool = True

    # Which KL `ref_kl_coef` weighs (see kl.py). "auto": "std" for policy gradients, which is the closed form of the
    # Gaussian KL per element with the transition's own total std; "velocity" for the forward process, which has no
    # transition; "old_policy" for mix_grpo, whose published KL is taken against the behaviour policy.
    kl_kind: KLKind = "auto"
    # Per-step weights of the policy term. "auto": "inverse_step" (1/h) for grpo_guard as in its paper and verl-omni
    # (Flow-Factory leaves it out: "uniform"), "uniform" for the rest. data["step_weights"] replaces the named weights.
    step_weighting: StepWeighting = "auto"
    # Where grpo_guard clips. fp32 cannot hold 1 +- 2e-6, so verl-omni's "ratio" clip moves the bound to 2.027e-6.
    guard_clip: ClipSpace = "log_ratio"
    # Flow-DPPO masks when D >= threshold (both public codes) or D > threshold (its paper).
    kl_mask_boundary: MaskBoundary = "at_or_above"
    # Flow-DPPO's codes do not clamp advantages inside the loss.
    dppo_clamp_advantages: bool = False

    # How DiffusionNFT turns an advantage into an optimality probability.
    adv_mode: AdvantageMode = "all"
    # "adaptive" is what both public codes run: error over its own detached size, times adv_clip_max / beta.
    # "theorem" is the unweighted loss for which the paper proves v* = v_old + (2 / beta) Delta.
    nft_form: NFTForm = "adaptive"
    # False leaves the negative policy out (only r P is trained): the paper's ablation, not its method.
    nft_negative: bool = True

    # How a pair's margin becomes a loss: Diffusion-DPO's sigmoid, IPO's square, or a hinge.
    dpo_loss: PreferenceLoss = "sigmoid"

    # AWM's published code uses ghuber, "unit" advantages and an inactive clip of 1; Flow-Factory uses uniform, "raw"
    # and a clip of 1e-4. The default is Flow-Factory's set because it is the one that goes with this config's
    # clip_ratio.
    awm_weighting: AWMWeighting = "uniform"
    # The exponent of ghuber.
    awm_power: Annotated[float, Interval(gt=0, le=100)] = 0.25
    # raw: clamped to adv_clip_max. unit: divided by it as well, so within 1.
    awm_advantage: AWMAdvantage = "raw"
    # "trajectory" is AWM's `sum_first`: one ratio per sample from the mean over its [B, W] noise levels.
    awm_ratio: RatioLevel = "step"
    # AWM's `ema_beta`: weight of the mean squared distance to the velocity of a policy that lags behind.
    lag_kl_coef: NotNegative = 0.0

    def __post_init__(self) -> None:
        for name in self.options:
            if name not in self.spec.options:
                raise unknown_name(f"options of loss_mode={self.loss_mode!r}", name, self.spec.options)
        for name, kind in _kinds().items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise unknown_name(name, value, get_args(kind))
            if kind is NotNegative and (not _is_number(value) or value < 0):
                raise LossError(f"{name}={value!r} must be zero or a positive number; use 0 to switch it off")
            if get_origin(kind) is Annotated and kind is not NotNegative:
                require_positive(name, value)
        if self.lag_kl_coef > 0 and self.loss_mode != "awm":
            raise LossError(
                f"lag_kl_coef={self.lag_kl_coef!r} is AWM's, and loss_mode={self.loss_mode!r} does not read it; leave it at 0"
            )
        if self.family != POLICY_GRADIENT and self.resolved_kl_kind != "velocity":
            raise LossError(
                f"kl_kind={self.kl_kind!r} needs the transitions of a trajectory, which loss_mode={self.loss_mode!r} "
                "does not have; use kl_kind='velocity' or 'auto'"
            )

    @property
    def spec(self) -> LossSpec:
        """What is known of the loss, looked up in the process that asks."""
        return find_loss(self.loss_mode)

    @property
    def family(self) -> str:
        """`"policy_gradient"` (needs a stochastic trajectory) or `"forward_process"` (needs clean latents only)."""
        return self.spec.family

    @property
    def resolved_kl_kind(self) -> str:
        """`kl_kind` with "auto" resolved for this mode."""
        if self.kl_kind != "auto":
            return self.kl_kind
        return self.spec.kl_kind or ("std" if self.family == POLICY_GRADIENT else "velocity")

    @property
    def resolved_step_weighting(self) -> str:
        """`step_weighting` with "auto" resolved for this mode."""
        if self.step_weighting != "auto":
            return self.step_weighting
        return self.spec.step_weighting or "uniform"

    @property
    def needs_reference(self) -> bool:
        """Whether the reference policy must be evaluated: `ref_means` or `ref_velocity` must be in `data`."""
        return self.reference_key is not None

    @property
    def reference_key(self) -> str | None:
        """The key of `data` that carries the reference's output, or None when no reference is needed."""
        for key in ("ref_velocity", "ref_means"):
            if key in self.spec.reads:
                return key
        if not self.ref_kl_coef > 0 or self.resolved_kl_kind == "old_policy":
            return None
        return "ref_means" if self.resolved_kl_kind in MEAN_KL_KINDS else "ref_velocity"

    @property
    def needs_old_means(self) -> bool:
        """Whether `data["old_means"]` is read."""
        return "old_means" in self.spec.reads

    @property
    def needs_old_velocity(self) -> bool:
        """Whether `data["old_velocity"]` is read (AWM also takes `old_log_probs` in its place)."""
        return "old_velocity" in self.spec.reads

    @property
    def needs_trajectory(self) -> bool:
        """Whether all steps of a sample must come in one call, as `[B, W]`."""
        return self.spec.joins_steps or self.awm_ratio == "trajectory"

    @property
    def own_tensors(self) -> tuple[str, ...]:
        """Tensors of the batch that this loss reads and that only the rollout or the algorithm can write."""
        return tuple(key for key in self.spec.reads if key not in MADE_BY_TRAINER)

    @property
    def limit(self) -> float | None:
        """The bound on `ElementLoss.distance`, the value of the field `spec.limit`; None for a loss without one."""
        return None if self.spec.limit is None else float(getattr(self, self.spec.limit))


@cache
def _kinds() -> dict[str, Any]:
    return get_type_hints(DiffusionLossConfig, include_extras=True)


def require_positive(name: str, value: float) -> None:
    """Raise `LossError` unless `value` is a finite number above zero."""
    if not _is_number(value) or value <= 0:
        raise LossError(f"{name}={value!r} must be a finite number above zero; the method divides or clips by it")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
