"""A composite agent loop: draw, judge, edit.

The first turn draws a sample. The reward judges it; a sample that is good enough is handed back. Any other is noised halfway
back and denoised again (SDEdit, arXiv 2108.01073), which keeps its composition and redraws its details, until the judge is
satisfied or the turns are used up. The trajectory that is trained is the last turn's: its window lies behind the step at
which the edit began, so rows of one batch may differ in `step_index` and in `num_turns`.
"""

from __future__ import annotations

import time
from typing import Any

from .agent_loop import DiffusionAgentLoop, DiffusionAgentLoopOutput, as_loop_output, register
from .errors import RolloutConfigError

GOOD_ENOUGH = 1.0
"""Score at which the loop stops."""


@register("diffusion_judge_edit_agent")
class DiffusionJudgeEditAgentLoop(DiffusionAgentLoop):
    """Up to `agent.num_turns` turns; needs a reward."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> DiffusionAgentLoopOutput:
        """See `DiffusionAgentLoop.run`. Adds the metrics `first_score` and `judge_s`, and `turn_scores`."""
        if self.reward is None:
            raise RolloutConfigError("diffusion_judge_edit_agent judges between its turns: give the worker a reward.")
        start, judging, scores = time.perf_counter(), 0.0, []
        request = self.make_request(sampling_params, **kwargs)
        turn = 1
        while True:
            output = as_loop_output(request, await self.client.generate(request), 0.0)
            if turn == self.config.agent.num_turns:
                break  # the worker asks for the score of the last turn
            judged = time.perf_counter()
            picture = output.response_diffusion_output.numpy()
            score, _, _ = await self.reward(picture, request.prompt, request.metadata, kwargs["uid"], kwargs["index"])
            judging += time.perf_counter() - judged
            scores.append(score)
            if score >= GOOD_ENOUGH:
                break
            turn += 1
            request = self._edit(request, output, turn, **kwargs)
        output.num_turns = turn
        output.metrics["generate_s"] = time.perf_counter() - start - judging
        output.metrics["judge_s"] = judging
        if scores:
            output.metrics["first_score"] = scores[0]
        output.extra_fields["turn_scores"] = scores
        return output

    def _edit(self, request: Any, output: DiffusionAgentLoopOutput, turn: int, **kwargs: Any) -> Any:
        """The next turn's request: half of the noise, a window of the same length behind it, noise of its own."""
        steps, size = request.num_inference_steps, len(request.window)
        begin = steps // 2
        if begin < 1 or begin + size >= steps + (size == 0):
            raise RolloutConfigError(
                f"an edit begins at step {begin} of {steps} and leaves no room for a window of {size} steps and a last "
                "ODE step: use more steps or a smaller window."
            )
        return request.replace(
            request_id=f"{kwargs['request_id']}-turn{turn}",
            uid=f"{kwargs['uid']}/turn{turn}",
            window=tuple(range(begin, begin + size)),
            init_latents=output.extra_fields["final_latents"],
            start_step=begin,
        )
