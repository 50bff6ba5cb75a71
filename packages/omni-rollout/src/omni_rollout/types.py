"""One sample asked for. What comes back is a batch: see `samples`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from sde_samplers.settings import SamplerSettings

from .errors import RolloutConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Kept:
    """Clean latents in another process: row `row` of the array [b, …] fp32 behind `reference`. See `kept`."""

    reference: Any
    """Ray's, or the number of an argument of the call."""
    row: int


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
    settings: SamplerSettings
    negative_prompt: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the reward must know of the prompt."""
    adapter: str = "default"
    """LoRA adapter that samples; "reference" is the base policy."""
    return_trajectory: bool = True
    """Return window latents and prompt embeddings; without it only the picture and the final latents come back."""
    return_means: bool = False
    """Return the means of the window's transitions too: losses that compare means need no second forward for the old ones."""
    shown: tuple[Literal["pixels", "latents"], ...] = ("pixels",)
    """What whoever looks at the sample is given of it; without pixels it is not decoded."""
    init_latents: Tensor | Kept | None = None
    """Clean latents [...] to start from instead of pure noise (an edit turn), where `settings.start_step` is above 0; or where
    they lie."""

    def __post_init__(self) -> None:
        if self.settings.guided and self.negative_prompt is None:
            raise RolloutConfigError(
                f"true_cfg_scale={self.settings.true_cfg_scale!r} needs a negative_prompt (a space will do); none was given."
            )
        if (self.init_latents is None) != (self.settings.start_step == 0):
            raise RolloutConfigError("init_latents and settings.start_step > 0 belong together: give both or neither.")

    def replace(self, **changes: Any) -> GenerationRequest:
        """A copy with some fields changed (checked again)."""
        return replace(self, **changes)
