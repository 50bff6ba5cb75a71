"""The denoising that every vLLM-Omni pipeline here shares.

A pipeline of the engine runs its loop and asks `scheduler_step_maybe_with_cfg` for the next latents; `RolloutMixin` answers
with the step that `RolloutBatch` makes, in which what training needs is recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from model_specs.compiling import tune_compiler
from torch import Tensor

from ..counting import RowCount, counted_rows
from ..errors import RolloutConfigError
from .cpu_platform import enabled
from .rollout_batch import REQUEST, RolloutBatch

_CACHED_PROMPTS = 512


class RolloutMixin:
    """Put before an engine pipeline in the bases: `class Mine(RolloutMixin, EnginePipeline)`.

    Requests of the engine's own (warm-up, pictures for people) run through the engine's own code untouched.
    """

    timestep_scale: float = 1000.0
    """What the transformer's `timestep` argument is at sigma 1."""
    policy_version: int = 0
    _batch: RolloutBatch | None = None
    _row_sigmas: list[float] | None = None
    _prompt_cache: OrderedDict[tuple[str, int], tuple[Tensor, ...]]

    def __init__(self, *, od_config: Any, **kwargs: Any) -> None:
        super().__init__(od_config=od_config, **kwargs)  # type: ignore[call-arg]
        if not od_config.enforce_eager:
            tune_compiler()

    def forward(self, req: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """A whole batch of requests, one output each."""
        rows = [(params.extra_args or {}).get(REQUEST) for params in req.sampling_params_list]
        if not any(row is not None for row in rows):
            if enabled() and req.is_dummy_run():  # a large one would warm nothing up on a CPU, and takes seconds there
                for params in req.sampling_params_list:
                    params.height = params.width = 64
            return self.run_batch(req, *args, **kwargs)
        if any(row is None for row in rows):
            raise RolloutConfigError("a batch mixes rollout requests and plain ones: send them to different engines.")
        self._batch = batch = RolloutBatch(rows)  # type: ignore[arg-type]
        try:
            with self.counted_rows() as count:
                outputs = self.run_batch(req, *args, **kwargs)
        finally:
            self._batch = None
        batch.forwards = count.rows / len(rows)
        return [self._attach(output, batch.result(i, self.policy_version)) for i, output in enumerate(outputs)]

    def counted_rows(self) -> AbstractContextManager[RowCount]:
        """Counts what the transformer is given inside the block; a Wan pipeline may have two, and lack either."""
        return counted_rows(getattr(self, name, None) for name in ("transformer", "transformer_2"))

    def run_batch(self, req: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """The engine's own forward: one output per request."""
        outputs: list[Any] = super().forward(req, *args, **kwargs)  # type: ignore[misc]
        return outputs

    @staticmethod
    def _attach(output: Any, fields: dict[str, Any]) -> Any:
        """Latents go where the engine ships tensors through shared memory, the small rest beside them."""
        stacks = [fields.pop(name, None) for name in ("latents", "next_latents")]
        big = torch.cat([*(part for part in stacks if part is not None), fields.pop("final_latents")[None]])
        # Video comes as typed media, which the engine moves to the host itself.
        return replace(output, trajectory_latents=big, trajectory_log_probs=fields, to_cpu=output.media is None)

    def to(self, device: Any, *args: Any, **kwargs: Any) -> Any:
        """Move what was built on the CPU. The engine moves a pipeline of one's own before it loads the transformer's weights.

        Layers on the meta device, which it quantizes as it loads them, get their values on this one; torch refuses to move what has
        none. The other layers' weights are made anew: nothing is in them that would be worth a copy of the whole model.
        """
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

        loads = set[int]()
        for name in ("transformer", "transformer_2"):
            part = getattr(self, name, None)
            for module in part.modules() if part is not None else ():
                if module in LAYERWISE_INFO:
                    LAYERWISE_INFO[module].restore_device = torch.device(device)
                if isinstance(module, LinearBase):
                    loads.add(id(getattr(module, "weight", None)))

        def move(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return tensor
            return (
                torch.empty_like(tensor, device=device) if id(tensor) in loads else tensor.to(device, *args, **kwargs)
            )

        return self._apply(move)  # type: ignore[attr-defined]

    # ----------------------------------------------------------------------------------------- hooks of the engine

    def prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's latents, replaced by each request's own noise."""
        made = super().prepare_latents(*args, **kwargs)  # type: ignore[misc]
        if self._batch is None:
            return made
        latents = made[0] if isinstance(made, tuple) else made
        noise = self._batch.start(latents).to(latents.dtype)
        return (noise, *made[1:]) if isinstance(made, tuple) else noise

    def prepare_timesteps(self, *args: Any, **kwargs: Any) -> Any:
        """(timesteps [K], K) as the engine makes them, without the steps that a thinned tail leaves out."""
        timesteps, steps = super().prepare_timesteps(*args, **kwargs)  # type: ignore[misc]
        if self._batch is None:
            return timesteps, steps
        self.thin(self.scheduler)  # type: ignore[attr-defined]
        timesteps = self.scheduler.timesteps  # type: ignore[attr-defined]
        return timesteps, len(timesteps)

    def thin(self, scheduler: Any) -> None:
        """Take the steps out of a scheduler's tables that the batch at hand does not make."""
        if self._batch is not None:
            kept = self._batch.thinned(torch.as_tensor(scheduler.sigmas))
            scheduler.sigmas, scheduler.timesteps = (
                scheduler.sigmas[kept],
                scheduler.timesteps[kept[:-1].to(scheduler.timesteps.device)],
            )

    def predict_noise(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's call of the transformer, at this module's sigma.

        The engine rounds timesteps to its dtype before it divides them by 1000, which in bf16 is another sigma than the
        trainer's; here it stays fp32.
        """
        sigmas = self._row_sigmas
        if self._batch is not None:
            self._begin(self._batch)
            sigmas = [self._batch.sigma()] * len(self._batch.rows)
        if sigmas is not None and "timestep" in kwargs:
            timestep = self.timesteps_at(torch.tensor(sigmas)).to(kwargs["timestep"].device)
            kwargs["timestep"] = timestep if self.timestep_scale == 1000.0 else timestep / 1000.0
        return super().predict_noise(*args, **kwargs)  # type: ignore[misc]

    def timesteps_at(self, sigmas: Tensor) -> Tensor:
        """What the network is told at these noise levels, fp32, on a scale of 1000."""
        return sigmas.float() * 1000.0

    def scheduler_step_maybe_with_cfg(
        self,
        noise_pred: Any,
        t: Any,
        latents: Any,
        do_true_cfg: bool,
        per_request_scheduler: Any = None,
        generator: Any = None,
    ) -> Any:
        """The next latents, in the engine's dtype."""
        if self._batch is None:
            return super().scheduler_step_maybe_with_cfg(  # type: ignore[misc]
                noise_pred, t, latents, do_true_cfg, per_request_scheduler, generator
            )
        self._begin(self._batch)
        return self._batch.advance(noise_pred.float()).to(latents.dtype)

    def _begin(self, batch: RolloutBatch) -> None:
        if not batch.sigmas:
            batch.begin(torch.as_tensor(self.scheduler.sigmas))  # type: ignore[attr-defined]

    # --------------------------------------------------------------------------------------------------- prompts

    def encode_each(
        self, prompts: Sequence[str], max_length: int, encode_one: Callable[[str], tuple[Tensor, ...]]
    ) -> list[tuple[Tensor, ...]]:
        """Each distinct prompt encoded once, alone, and remembered.

        Alone, because an embedding should not depend on which prompts shared its batch; once, because a group shares it.
        """
        if not hasattr(self, "_prompt_cache"):
            object.__setattr__(self, "_prompt_cache", OrderedDict())
        cache = self._prompt_cache
        for prompt in prompts:
            key = (prompt, max_length)
            if key not in cache:
                cache[key] = tuple(encode_one(prompt))
            cache.move_to_end(key)
        rows = [cache[prompt, max_length] for prompt in prompts]
        while len(cache) > _CACHED_PROMPTS:
            cache.popitem(last=False)
        return rows

    def remember(self, embeds: Tensor, mask: Tensor | None = None, pooled: Tensor | None = None) -> None:
        """Keep a batch's embeddings for its samples; the first call is the prompt, the second the negative one."""
        if self._batch is not None:
            self._batch.prompts.append((embeds, mask, pooled))


def stack_padded(rows: Sequence[Tensor]) -> Tensor:
    """[1, S_i, …] rows to [B, S, …], zeros at the right."""
    return torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True)
