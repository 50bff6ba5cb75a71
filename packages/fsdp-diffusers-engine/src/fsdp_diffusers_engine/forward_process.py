"""Forward processes: noise clean latents and score the velocity (DiffusionNFT, Diffusion-DPO, AWM).

B samples, W noise levels per sample, K sampler steps, `…` the latent's own shape.

No trajectory is needed: from the rollout's clean latent x0 the engine makes x_t = (1 - sigma) x0 + sigma e and asks
the policy for its velocity there; the losses compare it with e - x0. Noise and levels are drawn per row from
(`noise_seed`, row of the whole batch), so they do not depend on micro-batches, ranks or device; the two rows of a
preference pair share theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from . import batch, losses, objective, sharding
from .config import DREW, ForwardProcessConfig, Levels
from .errors import EngineError, nearest
from .objective import Objective, Policy

if TYPE_CHECKING:
    from diffusion_losses.config import DiffusionLossConfig
    from sde_samplers.settings import SamplerSettings
    from tensordict import TensorDict


LEVELS = get_args(Levels)
_PER_SAMPLE_OR_STEP = ("advantages", "mask", "rollout_weights")


class ForwardProcess(Objective):
    """Objective of losses on the velocity at freshly noised latents.

    Batch: `final_latents` [B, …] fp32 (clean), prompts as for the policy-gradient engine, `sigmas` [B, K+1] or
    [K+1] for levels from the sampler's schedule. `advantages` [B] for NFT and AWM, none for SFT; for DPO the rows come in pairs
    (winner, loser, winner, loser, …: `PairOutput.interleaved()`). What the loss's `LossSpec.reads` names of its own is
    [B, …], the same at every level. Optional `mask` [B] or [B, W]. Non-tensor data: `noise_seed`
    (different for every call that shall draw anew, equal on all ranks), `micro_batch_size`, `settings` (the
    `sde_samplers.SamplerSettings` that drew the samples), optional `global_count` (elements; pairs for DPO).

    The old policy is the state `old` when the model has one, else the present weights (then no forward is spent).

    A forward-only pass returns `error` [b, W], the mean squared error of the velocity, and `sigma` [b, W].
    """

    steps_of = _PER_SAMPLE_OR_STEP

    def __init__(self, config: ForwardProcessConfig | None = None) -> None:
        self.config = config or ForwardProcessConfig()
        if self.config.levels not in LEVELS:
            near = nearest(self.config.levels, LEVELS, 1)
            raise EngineError(f"levels={self.config.levels!r} is unknown; use one of {LEVELS} (nearest {near})")

    def reads(self, config: DiffusionLossConfig) -> tuple[str, ...]:
        """See `objective.Objective`."""
        return ("final_latents", "sigmas")

    def prepare(
        self, policy: Policy, data: TensorDict, config: DiffusionLossConfig | None, training: bool
    ) -> tuple[list[dict[str, Any]], int]:
        """Check the batch, draw noise and levels, cut: (micro-batches, number of noise levels)."""
        # These losses match the conditional velocity, however the samples were drawn.
        settings = batch.settings_of(data).replace(true_cfg_scale=1.0)
        x0 = batch.tensor(data, "final_latents", "the rollout writes it")
        batch.require_fp32(x0, "final_latents")
        pairs = config is not None and config.spec.paired
        if pairs and len(x0) % 2:
            raise EngineError(
                f"a preference batch has {len(x0)} rows; give pairs of rows, interleaved (PairOutput.interleaved())"
            )
        if training and not pairs and (config is None or config.spec.scored):
            batch.tensor(data, "advantages", "compute advantages before the update")
        seed = batch.plain(data, "noise_seed")
        if seed is None:
            raise EngineError("the batch has no 'noise_seed'; put a number that changes with every update into it")
        own = losses.own_tensors(config, data)
        tensors = batch.select(data, ("final_latents", *batch.PROMPTS, *_PER_SAMPLE_OR_STEP, *own), policy.device)
        table = data["sigmas"] if "sigmas" in data.keys() else None
        rows = data["noise_row"] if "noise_row" in data.keys() else sharding.first_row(len(x0), policy.layout.dp_group)
        noise, sigma = self.draw(int(seed), x0, table, pairs, rows)
        count, steps = sigma.shape
        for key in own:  # one value, or one tensor, per sample: the same at every level
            tensors[key] = tensors[key].unsqueeze(1).expand(count, steps, *tensors[key].shape[1:])
        tensors |= {"noise": noise.to(policy.device), "sigma": sigma.to(policy.device)}
        for key in _PER_SAMPLE_OR_STEP:
            if key in tensors and tensors[key].ndim == 1:
                tensors[key] = tensors[key][:, None].expand(count, steps)
            elif key in tensors and tensors[key].shape[1] != steps:
                # One value per sample, repeated over the window of a rollout that had one.
                tensors[key] = tensors[key][:, :1].expand(count, steps)
        mask = tensors.get("mask")
        if pairs:
            counted = count * steps / 2 if mask is None else float((mask[0::2] & mask[1::2]).sum())
        else:
            counted = count * steps if mask is None else float(mask.sum())
        return objective.cut(policy.layout, data, tensors, settings, counted, unit=2 if pairs else 1), steps

    def draw(
        self, seed: int, x0: Tensor, sigmas: Tensor | None, pairs: bool, rows: Tensor | int = 0
    ) -> tuple[Tensor, Tensor]:
        """Noise [B, W, …] and levels [B, W], fp32 on the CPU. `rows` are the numbers of this rank's rows in the whole
        mini-batch [B], or the first one's."""
        from sde_samplers import sample_generator

        config = self.config
        table = None
        if config.levels == "schedule":
            if sigmas is None:
                raise EngineError("levels='schedule' draws from the sampler's sigmas, and the batch has none; add them")
            table = (sigmas if sigmas.ndim == 1 else sigmas[0]).cpu()[:-1]  # the last entry is exactly clean
        rows = rows if isinstance(rows, Tensor) else rows + torch.arange(len(x0))
        noise, levels = [], []
        for row in rows.tolist():
            generator = sample_generator(seed, str(row // 2 if pairs else row), 0)
            drawn = _levels(config, table, generator)
            levels.append(drawn)
            noise.append(torch.randn(len(drawn), *x0.shape[1:], generator=generator))
        return torch.stack(noise), torch.stack(levels)

    def inputs(self, policy: Policy, micro_batch: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Noised latents [b, …] at level `step` with their sigma [b], noise and x0."""
        x0, noise, sigma = micro_batch["final_latents"], micro_batch["noise"][:, step], micro_batch["sigma"][:, step]
        t = sigma.reshape(-1, *(1,) * (x0.ndim - 1))
        return {"latents": (1.0 - t) * x0 + t * noise, "sigma": sigma, "noise": noise, "x0": x0}

    def score(self, inputs: Mapping[str, Any], velocity: Tensor, settings: SamplerSettings) -> dict[str, Tensor]:
        """The velocity as it is."""
        return {"velocity": velocity}

    def scores(self, inputs: Mapping[str, Any], output: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See the class."""
        error = output["velocity"] - (inputs["noise"] - inputs["x0"])
        return {"error": error.square().flatten(1).mean(1), "sigma": inputs["sigma"]}

    def row(
        self, inputs: Mapping[str, Any], output: Mapping[str, Tensor], config: DiffusionLossConfig | None
    ) -> dict[str, Tensor]:
        """The noised latent and its parts; the present velocity as the old one's, which `others` replaces."""
        found = {"x_t": inputs["latents"], **{key: inputs[key] for key in ("x0", "noise", "sigma")}}
        if config is not None and config.needs_old_velocity:
            found["old_velocity"] = output["velocity"].detach()
        return found

    def others(
        self, policy: Policy, micro_batch: Mapping[str, Any], step: int, config: DiffusionLossConfig
    ) -> dict[str, Tensor]:
        """Velocities of the old or lagging policy and the reference, as far as the loss reads them."""
        wanted = {"ref_velocity": self.config.reference_state} if config.needs_reference else {}
        states = policy.model_config.policy_state_adapters
        if config.lag_kl_coef > 0:  # then `old` lags behind, and the policy that sampled is the present one, or DREW
            wanted = {"lag_velocity": "old", **wanted}
        if config.needs_old_velocity and DREW in states:
            wanted = {"old_velocity": DREW, **wanted}
        elif config.needs_old_velocity and "old" in states and config.lag_kl_coef == 0:
            wanted = {"old_velocity": "old", **wanted}
        inputs, found = self.inputs(policy, micro_batch, step), dict[str, Tensor]()
        for state in dict.fromkeys(wanted.values()):
            with torch.no_grad(), policy.use_adapter(state):
                velocity = self.velocity(policy, micro_batch, inputs)
            found |= {name: velocity for name, its in wanted.items() if its == state}
        return found


def _levels(config: ForwardProcessConfig, table: Tensor | None, generator: torch.Generator) -> Tensor:
    """[W] noise levels of one row."""
    if table is not None:
        # A random choice without repetition, new for every row: it drops a random level, not the last one.
        most = max(1, int(len(table) * config.schedule_fraction))
        wanted = min(config.num_levels, most) if config.num_levels > 0 else most
        if config.schedule_choice == "stratified":
            bounds = torch.tensor([most * part // wanted for part in range(wanted + 1)])
            places = bounds[:-1] + (torch.rand(wanted, generator=generator) * bounds.diff()).long()
            return table[places.minimum(bounds[1:] - 1)]
        return table[torch.randperm(len(table), generator=generator)[:wanted]]
    wanted = max(config.num_levels, 1)
    if config.levels == "uniform":
        t = torch.rand(wanted, generator=generator)
    else:
        t = torch.sigmoid(config.logit_mean + config.logit_std * torch.randn(wanted, generator=generator))
    t = config.shift * t / (1.0 + (config.shift - 1.0) * t)
    return t.clamp(1e-3, 1.0)
