"""Training on finished pictures, offline Diffusion-DPO and supervised fine-tuning: the same loop, and nothing is drawn.

The prompts of a step bring their pictures (`ray_trainer.given`). The workers encode and keep them as rows, and the update is that
of the online programs: DPO on winner, loser, winner, loser, …, or the loss of flow matching.
"""

from __future__ import annotations

from ray_trainer.given import finished_files
from ray_trainer.prompts import Prompt
from ray_trainer.rollouts import requests_of
from ray_trainer.step_metrics import Metrics
from ray_trainer.trainer import RayDiffusionTrainer
from ray_trainer.workers import ActorRolloutRefWorker as Worker
from tensordict import TensorDict


class RayOfflineTrainer(RayDiffusionTrainer):
    """Given pictures → update."""

    def generate_sequence(self, prompts: list[Prompt], step: int) -> TensorDict:
        """Rows [P·2] or [P] of the prompts' own pictures, kept by the workers as drawn ones are."""
        self._prompts = prompts
        self.workers.call(Worker.forget)
        paired = self.config.actor.diffusion_loss.spec.paired
        files = [str(file) for prompt in prompts for file in finished_files(prompt, paired)]
        rows = [(f"step{step}/{prompt.uid}", prompt) for prompt in prompts]
        owner, slot = self.workers.take(
            requests_of(self.config, rows, self.config.rows_per_prompt, step=step, validate=False), files
        )
        self._batch = TensorDict({"owner": owner, "slot": slot}, batch_size=[len(files)])
        return self._batch

    def compute_rm_score(self, batch: TensorDict) -> Metrics:
        """Nothing is scored, and nothing was drawn."""
        return {"forwards/rollout": 0.0}

    def prepare_update(self, batch: TensorDict, step: int) -> tuple[TensorDict, Metrics]:
        """The rows as they are."""
        return batch, {}
