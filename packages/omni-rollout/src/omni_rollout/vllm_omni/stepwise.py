"""`RolloutMixin` for engines that schedule step by step, where requests at different steps share a call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .denoise import RolloutMixin
from .rollout_batch import REQUEST, RolloutBatch


class StepwiseMixin(RolloutMixin):
    """Each request carries its own `RolloutBatch` of one row."""

    def prepare_encode(self, state: Any, **kwargs: Any) -> Any:
        """Start one request."""
        row = (state.sampling.extra_args or {}).get(REQUEST)
        if row is None:
            return super().prepare_encode(state, **kwargs)  # type: ignore[misc]
        self._batch = state.extra[REQUEST] = RolloutBatch([row])
        try:
            state = super().prepare_encode(state, **kwargs)  # type: ignore[misc]
            self._begin(self._batch)
        finally:
            self._batch = None
        return state

    def denoise_step(self, input_batch: Any, **kwargs: Any) -> Any:
        """One call of the transformer for requests that may stand at different steps."""
        batches = [state.extra.get(REQUEST) for state in kwargs.get("states", ())]
        if not batches or any(batch is None for batch in batches):
            return super().denoise_step(input_batch, **kwargs)  # type: ignore[misc]
        self._row_sigmas = [batch.sigma() for batch in batches]
        try:
            with self.counted_rows() as count:
                noise_pred = super().denoise_step(input_batch, **kwargs)  # type: ignore[misc]
        finally:
            self._row_sigmas = None
        for batch in batches:
            batch.forwards += count.rows / len(batches)
        return noise_pred

    def step_scheduler(self, state: Any, noise_pred: Tensor, **kwargs: Any) -> None:
        """One step of one request."""
        batch = state.extra.get(REQUEST)
        if batch is None:
            super().step_scheduler(state, noise_pred, **kwargs)  # type: ignore[misc]
            return
        state.latents = batch.advance(noise_pred.float()).to(state.latents.dtype)
        state.step_index += 1

    def post_decode(self, state: Any, **kwargs: Any) -> Any:
        """Finish one request."""
        output = super().post_decode(state, **kwargs)  # type: ignore[misc]
        batch = state.extra.get(REQUEST)
        return output if batch is None else self._attach(output, batch.result(0, self.policy_version))
