"""A batch on its way from noise to pictures: each request's own noise, window, noise level, solver and start.

The engine batches by size and step count and ignores everything else, so the rows of one batch may differ in all of these:
rows that move alike are stepped together, each with its own noise. The state between steps is kept here in fp32, whatever
the engine's dtype is: what the engine passes around is only the cast copy that its transformer sees.

Shapes: B sample, W window step, K denoising step, S prompt token, "…" the model's latent layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from sde_samplers import (
    SOLVERS,
    Kind,
    PastOutput,
    SamplerSettings,
    SigmaSchedule,
    dpm_step,
    effective_order,
    find_kind,
    read_out,
    sde_step,
    thin_tail,
)
from torch import Tensor

from ..errors import RolloutConfigError
from ..noise import clean_latents, generators_of, start_noise
from ..types import GenerationRequest

#: Key of `OmniDiffusionSamplingParams.extra_args` under which a request travels beside the engine's own words for it.
REQUEST = "omni_rollout"


def tail_of(settings: SamplerSettings) -> tuple[int, float] | None:
    """What decides the sigma table beside the size of the picture: (window end, ratio), None for the full one."""
    return None if settings.tail_ratio == 1 else (settings.window_end, settings.tail_ratio)


class _Move(NamedTuple):
    """How a row makes one step; rows with equal moves make it together."""

    kind: Kind
    noise_level: float
    order: int = 0
    """Of the multistep solver; 0 for `sde_step`, whose ODE kind is the Euler step."""
    past: int = 0
    """Read-outs of earlier steps that the solver may look at."""


@dataclass
class RolloutBatch:
    """State of one batch."""

    rows: list[GenerationRequest]
    x: Tensor | None = None
    step: int = 0
    sigmas: list[float] = field(default_factory=list)
    forwards: float = 0.0
    """Rows of the transformer that each sample has cost so far."""
    prompts: list[tuple[Tensor, Tensor | None, Tensor | None]] = field(default_factory=list)
    records: list[list[dict[str, Any]]] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    past: tuple[PastOutput, ...] = ()
    """Read-outs of the whole batch at the last steps, newest first, as far as any row's solver looks back."""

    def __post_init__(self) -> None:
        self.generators = generators_of(self.rows)
        self.records = [[] for _ in self.rows]

    def start(self, like: Tensor) -> Tensor:
        """Initial noise [B, …] fp32 in the shape and on the device of `like`, the engine's own latents."""
        self.x = start_noise(self.rows, self.generators, like.shape[1:]).to(like.device)
        return self.x

    def thinned(self, sigmas: Tensor) -> Tensor:
        """Which entries of the pipeline's full table [K+1] this batch steps over: bool [K+1]."""
        tails = {tail_of(row.settings) for row in self.rows}
        if len(tails) > 1:
            raise RolloutConfigError(
                f"one batch cannot run over several sigma tables; its tails are {sorted(tails, key=str)!r}."
            )
        tail = tails.pop()
        if tail is None:
            return torch.ones_like(sigmas, dtype=torch.bool)
        table = sigmas.detach().float().cpu()
        return torch.isin(table, thin_tail(SigmaSchedule(table), *tail).sigmas).to(sigmas.device)

    def begin(self, sigmas: Tensor) -> None:
        """Take the sigma table, and noise the clean latents of edits to where they begin."""
        self.sigmas = sigmas.detach().float().cpu().tolist()
        assert self.x is not None
        for i, row in enumerate(self.rows):
            if row.init_latents is not None:
                level, clean = self.sigmas[row.settings.start_step], clean_latents(row.init_latents, self.x.shape[1:])
                self.x[i] = (1 - level) * clean.to(self.x) + level * self.x[i]

    def sigma(self) -> float:
        """Sigma of the step under way."""
        return self.sigmas[self.step]

    def advance(self, velocity: Tensor) -> Tensor:
        """One step of every row, each with its own settings. Returns the new state [B, …] fp32."""
        assert self.x is not None
        x, k = self.x, self.step
        t, u, cap = self.sigmas[k], self.sigmas[k + 1], self.sigmas[1]
        after = x.clone()
        for move, members in self._moves(k).items():
            everyone = len(members) == len(self.rows)
            before, v = (x, velocity) if everyone else (x[members], velocity[members])
            if move.order:
                past = [p if everyone else PastOutput(p.sigma, p.x0[members]) for p in self.past[: move.past]]
                step = dpm_step(before, v, t, u, past, order=move.order)
            else:
                draws = find_kind(move.kind).stochastic
                step = sde_step(
                    before,
                    v,
                    t,
                    u,
                    kind=move.kind,
                    noise_level=move.noise_level,
                    sigma_cap=cap,
                    generator=[self.generators[i] for i in members] if draws else None,
                )
                if draws:
                    self._record(members, before, step)
            after[members] = step.prev_sample
        depth = max(SOLVERS[row.settings.solver] for row in self.rows) - 1
        if depth:
            self.past = (read_out(x, velocity, t), *self.past)[:depth]
        self.x, self.step = after, k + 1
        return after

    def _moves(self, k: int) -> dict[_Move, list[int]]:
        groups: dict[_Move, list[int]] = {}
        for i, request in enumerate(self.rows):
            row = request.settings
            if k < row.start_step:
                continue  # this row begins later and stays as it is
            if k in row.window:
                move = _Move(row.kind, row.noise_level)
            elif row.solver == "euler" or (row.tail_ratio < 1 and k < row.window_end):
                move = _Move("ode", 0.0)
            else:
                highest = SOLVERS[row.solver]
                done, steps = k - row.start_step, len(self.sigmas) - 1 - row.start_step
                move = _Move("ode", 0.0, effective_order(highest, done, steps), min(highest - 1, done))
            groups.setdefault(move, []).append(i)
        return groups

    def _record(self, members: list[int], before: Tensor, step: Any) -> None:
        for j, i in enumerate(members):
            kept = {"latents": before[j], "next_latents": step.prev_sample[j], "std": step.std[j]}
            kept |= {"means": step.mean[j]} if self.rows[i].return_means else {}
            self.records[i].append({**kept, "log_probs": None if step.log_prob is None else step.log_prob[j]})

    def result(self, i: int, policy_version: int) -> dict[str, Tensor]:
        """What row i brings home, by the names of `samples`: each tensor owns its memory, so that shipping it does not ship the
        batch."""
        assert self.x is not None
        row, kept = self.rows[i], self.records[i]
        out = {"sigmas": torch.tensor(self.sigmas), "final_latents": _own(self.x[i])}
        out |= {"policy_version": torch.tensor(policy_version), "batch_rows": torch.tensor(len(self.rows))}
        out["forwards"] = torch.tensor(float(self.forwards))
        if not row.return_trajectory:
            return out
        for prefix, (embeds, mask, pooled) in zip(("", "negative_"), self.prompts, strict=False):
            length = embeds.shape[1] if mask is None else int(mask[i].sum())
            out[f"{prefix}prompt_embeds"] = _own(embeds[i, :length])
            out[f"{prefix}prompt_embeds_mask"] = torch.ones(length, dtype=torch.bool)
            if pooled is not None:
                out[f"{prefix}pooled_prompt_embeds"] = _own(pooled[i])
        if kept:
            names = ("latents", "next_latents", "std", *(["means"] if row.return_means else []))
            out |= {name: _own(torch.stack([step[name] for step in kept])) for name in names}
            out["step_index"] = torch.tensor(row.settings.window)
            if kept[0]["log_probs"] is not None:
                out["rollout_log_probs"] = _own(torch.stack([step["log_probs"] for step in kept]))
        return out


def _own(value: Tensor) -> Tensor:
    return value.detach().clone().cpu()
