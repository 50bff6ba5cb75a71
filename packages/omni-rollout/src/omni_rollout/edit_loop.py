"""A composite agent loop: draw, judge, edit.

The first turn draws the samples. The reward judges each; one that is good enough is handed back. Any other is noised halfway
back and denoised again (SDEdit, arXiv 2108.01073), which keeps its composition and redraws its details, until the judge is
satisfied or the turns are used up. The trajectory that is trained is the last turn's: its window lies behind the step at
which the edit began, so rows of one batch may differ in `step_index` and in `num_turns`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import torch

from .errors import RolloutConfigError
from .loop_base import DiffusionAgentLoop
from .samples import Chunk, pictures_of
from .types import GenerationRequest, Kept

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

GOOD_ENOUGH = 1.0
"""Score at which the loop stops."""


class DiffusionJudgeEditAgentLoop(DiffusionAgentLoop):
    """Up to `agent.num_turns` turns; needs a reward. Adds `num_turns` int64 [B] and `first_score` fp32 [B] (NaN: not judged)."""

    async def run(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Chunk]:
        """See `DiffusionAgentLoop.run`."""
        if self.reward is None:
            raise RolloutConfigError("diffusion_judge_edit_agent judges between its turns: give the worker a reward.")
        first: dict[int, float] = {}
        turn = list(enumerate(requests))  # (position in the call, request of this turn)
        for number in range(1, self.config.agent.num_turns + 1):
            again: list[tuple[int, GenerationRequest]] = []
            async for places, samples in self.client.stream([request for _, request in turn]):
                members = [turn[place] for place in places]
                keep = list(range(len(members)))
                if number < self.config.agent.num_turns:  # the worker asks for the score of the last turn
                    scores = await self._judge(members, samples)
                    for (position, _), score in zip(members, scores, strict=True):
                        first.setdefault(position, score)
                    keep = [row for row, score in enumerate(scores) if score >= GOOD_ENOUGH]
                    worse = [row for row in range(len(members)) if row not in keep]
                    if worse:
                        clean = await self.client.final_latents(samples[torch.tensor(worse)])
                        positions = [members[row][0] for row in worse]
                        again += [
                            (position, edited(requests[position], latents, number + 1))
                            for position, latents in zip(positions, clean, strict=True)
                        ]
                if keep:
                    kept = samples[torch.tensor(keep)]
                    positions = [members[row][0] for row in keep]
                    kept["num_turns"] = torch.full((len(keep),), number)
                    kept["first_score"] = torch.tensor([first.get(position, torch.nan) for position in positions])
                    yield positions, kept
            turn = again
            if not turn:
                return

    async def _judge(self, members: list[tuple[int, GenerationRequest]], samples: TensorDict) -> list[float]:
        assert self.reward is not None
        return [score for score, _, _ in await self.reward([request for _, request in members], pictures_of(samples))]


def edited(request: GenerationRequest, latents: Tensor | Kept, turn: int) -> GenerationRequest:
    """The request of an edit: half of the noise, a window of the same length behind it, noise of its own.

    Args:
        request: of the first turn.
        latents: clean latents […] of the picture to edit, or where they lie.
    """
    settings = request.settings
    steps, size = settings.num_inference_steps, len(settings.window)
    begin = steps // 2
    if begin < 1 or begin + size >= steps + (size == 0):
        raise RolloutConfigError(
            f"an edit begins at step {begin} of {steps} and leaves no room for a window of {size} steps and a last "
            "ODE step: use more steps or a smaller window."
        )
    return request.replace(
        request_id=f"{request.request_id}-turn{turn}",
        uid=f"{request.uid}/turn{turn}",
        settings=settings.replace(window=tuple(range(begin, begin + size)), start_step=begin),
        init_latents=latents,
    )
