"""What the rest of a trainer must know about a loss: one `LossSpec` each, found by name.

This module imports without torch, so that a config can be checked anywhere; a spec names its function by import path,
or holds it where it is written in the same file as the spec:

    MINE = LossSpec(my_loss, "policy_gradient", reads=("my_weights",))        # in my_losses.py

which `loss_mode="my_losses:MINE"` uses, in whatever process the loss runs. An installed package offers losses by the
entry-point group `diffusion_losses`.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from .errors import LossError, check_name, unknown_name

POLICY_GRADIENT = "policy_gradient"
FORWARD_PROCESS = "forward_process"
ENTRY_POINT_GROUP = "diffusion_losses"


@dataclass(frozen=True)
class LossSpec:
    """One loss.

    Args:
        function: `f(config, model_output, data) -> ElementLoss`, or its import path "module:name".
        family: "policy_gradient" (needs a stochastic trajectory) or "forward_process" (needs clean latents only).
        reads: what it reads of `data` beside what its family always brings. "old_means", "old_velocity" and
            "ref_velocity" are made by the trainer; any other name is a tensor of the batch that the rollout or the
            algorithm writes: [B] or [B, W, ...] over a trajectory's steps, [B, ...] without one.
        paired: rows belong together in twos, winner and loser.
        scored: it reads what came of rewards, advantages or the order of a pair; False for plain imitation.
        joins_steps: it looks at all steps of a sample at once, so that they must come in one call, as [B, W].
        limit: the config field that bounds `ElementLoss.distance`: the loss's clip, in its own units; None without one.
        kl_kind, step_weighting: what "auto" means for it; None is the family's usual.
        guided_samples: whether its samples may be drawn with classifier-free guidance although the update looks at the
            conditional velocity alone.
        options: names that `DiffusionLossConfig.options` may hold for it.
    """

    function: Callable[..., Any] | str
    family: str
    reads: tuple[str, ...] = ()
    paired: bool = False
    scored: bool = True
    joins_steps: bool = False
    limit: str | None = None
    kl_kind: str | None = None
    step_weighting: str | None = None
    guided_samples: bool = True
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("family", self.family, (POLICY_GRADIENT, FORWARD_PROCESS))
        if self.paired and self.family == POLICY_GRADIENT:
            raise LossError("paired=True goes with family='forward_process': a trajectory has no partner at its noise")

    @property
    def takes_given(self) -> bool:
        """Whether it can train on finished pictures that nobody scored: pairs in an order, or pictures to imitate."""
        return self.family == FORWARD_PROCESS and (self.paired or not self.scored)

    @property
    def replays(self) -> bool:
        """Whether it scores the stored steps of a trajectory again, and does not noise clean latents."""
        return self.family == POLICY_GRADIENT

    def load(self) -> Callable[..., Any]:
        """The function, imported where it is needed."""
        if not isinstance(self.function, str):
            return self.function
        loaded: Callable[..., Any] = pkgutil.resolve_name(self.function)
        return loaded


_SURROGATE = LossSpec("diffusion_losses.policy_gradient:clipped_loss", POLICY_GRADIENT, limit="clip_ratio")

BUILTIN: dict[str, LossSpec] = {
    "flow_grpo": _SURROGATE,
    "dance_grpo": _SURROGATE,
    # MixGRPO's published KL is taken against the behaviour policy.
    "mix_grpo": LossSpec(
        "diffusion_losses.policy_gradient:clipped_loss", POLICY_GRADIENT, limit="clip_ratio", kl_kind="old_policy"
    ),
    "gspo": LossSpec(
        "diffusion_losses.policy_gradient:trajectory_loss", POLICY_GRADIENT, joins_steps=True, limit="clip_ratio"
    ),
    "grpo_guard": LossSpec(
        "diffusion_losses.policy_gradient:guard_loss",
        POLICY_GRADIENT,
        reads=("old_means",),
        limit="clip_ratio",
        step_weighting="inverse_step",
    ),
    "flow_dppo": LossSpec(
        "diffusion_losses.policy_gradient:divergence_loss",
        POLICY_GRADIENT,
        reads=("old_means",),
        limit="kl_mask_threshold",
    ),
    # Both compare with the velocity of the policy that sampled; with guidance that would be another velocity.
    "diffusion_nft": LossSpec(
        "diffusion_losses.forward_process:nft_loss", FORWARD_PROCESS, reads=("old_velocity",), guided_samples=False
    ),
    "awm": LossSpec(
        "diffusion_losses.forward_process:awm_loss",
        FORWARD_PROCESS,
        reads=("old_velocity",),
        limit="clip_ratio",
        guided_samples=False,
    ),
    # A preference holds whoever drew the two pictures.
    "dpo": LossSpec("diffusion_losses.preference:dpo_loss", FORWARD_PROCESS, reads=("ref_velocity",), paired=True),
    "sft": LossSpec("diffusion_losses.forward_process:sft_loss", FORWARD_PROCESS, scored=False),
}


def known_losses() -> tuple[str, ...]:
    """The names of this package and of installed ones that `loss_mode` accepts, sorted."""
    return tuple(sorted({*BUILTIN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}))


@functools.cache
def find_loss(name: str) -> LossSpec:
    """The spec behind a `loss_mode`: a name of this package, an entry point, or "module:attribute".

    Raises `LossError` for an unknown name (the nearest is given), a module that cannot be imported, and a target that
    is no `LossSpec`.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    point = next(iter(entry_points(group=ENTRY_POINT_GROUP, name=name)), None)
    if point is None and ":" not in name:
        raise unknown_name("loss_mode", name, known_losses(), "or give 'module:attribute' of a LossSpec")
    try:
        found = pkgutil.resolve_name(name) if point is None else point.load()
    except (ImportError, AttributeError, ValueError) as error:
        raise LossError(f"loss_mode={name!r} cannot be imported: {error}") from error
    if not isinstance(found, LossSpec):
        raise LossError(f"loss_mode={name!r} is a {type(found).__name__}; give a diffusion_losses.LossSpec")
    return found
