"""The denoising that every vLLM-Omni pipeline here shares: each request's own noise, window, noise level and start.

A pipeline of the engine runs its loop and asks `scheduler_step_maybe_with_cfg` for the next latents; `RolloutMixin`
answers with sde-samplers' step and records what training needs. The state between steps is kept here in fp32, whatever
the engine's dtype is: what the engine passes around is only the cast copy that its transformer sees.

The engine batches by size and step count and ignores everything else, so the rows of one batch may differ in kind, noise
level, window and start: each row is stepped with its own.

Shapes: B sample, W window step, K denoising step, S prompt token, "…" the model's latent layout.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from sde_samplers import SigmaSchedule, initial_noise, sample_generator, sde_step
from torch import Tensor

from ..errors import RolloutConfigError

#: Key of `OmniDiffusionSamplingParams.extra_args` under which a request's knobs travel.
KNOBS = "omni_rollout"
_CACHED_PROMPTS = 512


@dataclass(frozen=True)
class Knobs:
    """What one request asks of the sampler; plain values, made by the server from a `GenerationRequest`."""

    seed: int
    uid: str
    index: int
    kind: str
    noise_level: float
    window: tuple[int, ...]
    return_trajectory: bool = True
    start_step: int = 0
    init_latents: Tensor | None = None


@dataclass
class RolloutBatch:
    """State of one batch on its way from noise to pictures."""

    rows: list[Knobs]
    x: Tensor | None = None
    step: int = 0
    sigmas: list[float] = field(default_factory=list)
    schedule_hash: str = ""
    prompts: list[tuple[Tensor, Tensor | None, Tensor | None]] = field(default_factory=list)
    records: list[list[dict[str, Any]]] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generators = [sample_generator(row.seed, row.uid, row.index) for row in self.rows]
        self.records = [[] for _ in self.rows]

    def start(self, like: Tensor) -> Tensor:
        """Initial noise [B, …] fp32 in the shape and on the device of `like`, the engine's own latents."""
        self.x = initial_noise(self.generators, like.shape[1:]).to(like.device)
        return self.x

    def begin(self, sigmas: Tensor) -> None:
        """Take the pipeline's sigma table, and noise the clean latents of edits to where they begin."""
        schedule = SigmaSchedule(sigmas.detach().float().cpu())
        self.sigmas, self.schedule_hash = schedule.sigmas.tolist(), schedule.hash

    def edited(self, x: Tensor) -> Tensor:
        """`x` with the rows that begin from a picture replaced by that picture, noised."""
        for i, row in enumerate(self.rows):
            if row.init_latents is not None:
                if row.init_latents.shape != x.shape[1:]:
                    raise RolloutConfigError(
                        f"init_latents {tuple(row.init_latents.shape)} do not fit: need {tuple(x.shape[1:])}."
                    )
                level = self.sigmas[row.start_step]
                x[i] = (1 - level) * row.init_latents.to(x) + level * x[i]
        return x

    def sigma(self) -> float:
        """Sigma of the step under way."""
        return self.sigmas[self.step]

    def advance(self, velocity: Tensor) -> Tensor:
        """One step of every row, each with its own knobs. Returns the new state [B, …] fp32."""
        assert self.x is not None
        x, k = self.x, self.step
        t, u, cap = self.sigmas[k], self.sigmas[k + 1], self.sigmas[1]
        after = x.clone()
        for (kind, noise_level), members in self._by_kind(k).items():
            everyone = len(members) == len(self.rows)
            before = x if everyone else x[members]
            step = sde_step(
                before,
                velocity if everyone else velocity[members],
                t,
                u,
                kind=kind,  # type: ignore[arg-type]  # checked when the request was made
                noise_level=noise_level,
                sigma_cap=cap,
                generator=[self.generators[i] for i in members] if kind != "ode" else None,
            )
            after[members] = step.prev_sample
            if kind != "ode":
                for j, i in enumerate(members):
                    log_prob = None if step.log_prob is None else step.log_prob[j]
                    kept = {
                        "latents": before[j],
                        "next_latents": step.prev_sample[j],
                        "std": step.std[j],
                        "log_probs": log_prob,
                    }
                    self.records[i].append(kept)
        self.x, self.step = after, k + 1
        return after

    def _by_kind(self, k: int) -> dict[tuple[str, float], list[int]]:
        groups: dict[tuple[str, float], list[int]] = {}
        for i, row in enumerate(self.rows):
            if k < row.start_step:
                continue  # this row begins later and stays as it is
            key = (row.kind, row.noise_level) if k in row.window else ("ode", 0.0)
            groups.setdefault(key, []).append(i)
        return groups

    def result(self, i: int, policy_version: int) -> dict[str, Any]:
        """What row i brings home: tensors own their memory, so that shipping one does not ship the batch."""
        assert self.x is not None
        row, kept = self.rows[i], self.records[i]
        out: dict[str, Any] = {"policy_version": policy_version, "schedule_hash": self.schedule_hash}
        out |= {"batch_size": len(self.rows), "sigmas": torch.tensor(self.sigmas), "final_latents": _own(self.x[i])}
        if not row.return_trajectory:
            return out
        for prefix, (embeds, mask, pooled) in zip(("", "negative_"), self.prompts, strict=False):
            length = embeds.shape[1] if mask is None else int(mask[i].sum())
            out[f"{prefix}prompt_embeds"] = _own(embeds[i, :length])
            out[f"{prefix}prompt_embeds_mask"] = torch.ones(length, dtype=torch.bool)
            if pooled is not None:
                out[f"{prefix}pooled_prompt_embeds"] = _own(pooled[i])
        if kept:
            out |= {
                name: _own(torch.stack([step[name] for step in kept])) for name in ("latents", "next_latents", "std")
            }
            out["step_index"] = torch.tensor(row.window)
            if kept[0]["log_probs"] is not None:
                out["log_probs"] = _own(torch.stack([step["log_probs"] for step in kept]))
        return out


def _own(value: Tensor) -> Tensor:
    return value.detach().clone().cpu()


class RolloutMixin:
    """Put before an engine pipeline in the bases: `class Mine(RolloutMixin, EnginePipeline)`.

    Requests without knobs (warm-up, pictures for people) run through the engine's own code untouched.
    """

    timestep_scale: float = 1000.0
    """What the transformer's `timestep` argument is at sigma 1."""
    policy_version: int = 0
    _batch: RolloutBatch | None = None
    _row_sigmas: list[float] | None = None
    _prompt_cache: OrderedDict[tuple[str, int], tuple[Tensor, ...]]

    def forward(self, req: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """A whole batch of requests, one output each."""
        rows = [(params.extra_args or {}).get(KNOBS) for params in req.sampling_params_list]
        if not any(row is not None for row in rows):
            return self.run_batch(req, *args, **kwargs)
        if any(row is None for row in rows):
            raise RolloutConfigError("a batch mixes rollout requests and plain ones: send them to different engines.")
        self._batch = batch = RolloutBatch(rows)  # type: ignore[arg-type]
        try:
            outputs = self.run_batch(req, *args, **kwargs)
        finally:
            self._batch = None
        return [self._attach(output, batch.result(i, self.policy_version)) for i, output in enumerate(outputs)]

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

    # ----------------------------------------------------------------------------------------- hooks of the engine

    def prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's latents, replaced by each request's own noise."""
        made = super().prepare_latents(*args, **kwargs)  # type: ignore[misc]
        if self._batch is None:
            return made
        latents = made[0] if isinstance(made, tuple) else made
        noise = self._batch.start(latents).to(latents.dtype)
        return (noise, *made[1:]) if isinstance(made, tuple) else noise

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
            timestep = torch.tensor(sigmas, dtype=torch.float32, device=kwargs["timestep"].device) * 1000.0
            kwargs["timestep"] = timestep if self.timestep_scale == 1000.0 else timestep / 1000.0
        return super().predict_noise(*args, **kwargs)  # type: ignore[misc]

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
            assert batch.x is not None
            batch.edited(batch.x)

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


class StepwiseMixin(RolloutMixin):
    """`RolloutMixin` for engines that schedule step by step: each request carries its own `RolloutBatch` of one row."""

    def prepare_encode(self, state: Any, **kwargs: Any) -> Any:
        """Start one request."""
        row = (state.sampling.extra_args or {}).get(KNOBS)
        if row is None:
            return super().prepare_encode(state, **kwargs)  # type: ignore[misc]
        self._batch = state.extra[KNOBS] = RolloutBatch([row])
        try:
            state = super().prepare_encode(state, **kwargs)  # type: ignore[misc]
            self._begin(self._batch)
        finally:
            self._batch = None
        return state

    def denoise_step(self, input_batch: Any, **kwargs: Any) -> Any:
        """One call of the transformer for requests that may stand at different steps."""
        batches = [state.extra.get(KNOBS) for state in kwargs.get("states", ())]
        if batches and all(batch is not None for batch in batches):
            self._row_sigmas = [batch.sigma() for batch in batches]
        try:
            return super().denoise_step(input_batch, **kwargs)  # type: ignore[misc]
        finally:
            self._row_sigmas = None

    def step_scheduler(self, state: Any, noise_pred: Tensor, **kwargs: Any) -> None:
        """One step of one request."""
        batch = state.extra.get(KNOBS)
        if batch is None:
            super().step_scheduler(state, noise_pred, **kwargs)  # type: ignore[misc]
            return
        state.latents = batch.advance(noise_pred.float()).to(state.latents.dtype)
        state.step_index += 1

    def post_decode(self, state: Any, **kwargs: Any) -> Any:
        """Finish one request."""
        output = super().post_decode(state, **kwargs)  # type: ignore[misc]
        batch = state.extra.get(KNOBS)
        return output if batch is None else self._attach(output, batch.result(0, self.policy_version))


def stack_padded(rows: Sequence[Tensor]) -> Tensor:
    """[1, S_i, …] rows to [B, S, …], zeros at the right."""
    return torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True)
