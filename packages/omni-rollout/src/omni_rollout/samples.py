"""Finished samples: one TensorDict from the sampler to the loss.

Keys, as far as they were asked for. B sample, W window step, K denoising step, S prompt token, C H W T as usual, "…" the model's
latent layout; everything on the CPU, the trajectory in fp32.

responses uint8 [B, C, H, W] | [B, T, C, H, W], where pixels are shown · rollout_log_probs [B, W] (averaged over latent elements) ·
latents, next_latents, means [B, W, …] · step_index int64 [B, W] · std [B, W] · final_latents [B, …] · sigmas [B, steps + 1] ·
prompt_embeds [B, S, C] and prompt_embeds_mask bool [B, S], padded at the right · pooled_prompt_embeds [B, C] · negative_… ·
policy_version int64 [B] · forwards [B] (rows of the transformer that a sample cost, counted; a guided step costs 2) ·
batch_rows int64 [B] (samples that it was denoised with)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .errors import RolloutConfigError, RolloutError
from .types import GenerationRequest

if TYPE_CHECKING:
    from sde_samplers import SigmaSchedule, Trajectory
    from sde_samplers.settings import SamplerSettings
    from tensordict import NonTensorStack, TensorDict

Chunk = tuple[list[int], "TensorDict"]
"""Positions of some requests in a call, and their samples in that order."""

#: Must be fp32: a rounded trajectory moves log-probs by far more than a clip range.
_FP32 = ("latents", "next_latents", "sigmas", "std", "means", "final_latents", "rollout_log_probs")
#: Padded to the longest row, with their masks.
_PADDED = tuple(f"{prefix}prompt_embeds{mask}" for prefix in ("", "negative_") for mask in ("", "_mask"))
PROMPTS = (*_PADDED, "pooled_prompt_embeds", "negative_pooled_prompt_embeds")
"""Keys of the prompts' tensors, which all samples of a prompt share."""
FACTS = ("policy_version", "forwards", "batch_rows")
"""Numbers about a sample that whoever asked for it wants to know."""
SHOWN = {"pixels": "responses", "latents": "final_latents"}
"""Keys of what `GenerationRequest.shown` may name."""


def denoised(
    requests: Sequence[GenerationRequest],
    trajectory: Trajectory,
    pictures: Tensor | None,
    schedule: SigmaSchedule,
    *,
    cond: Any,
    negative: Any,
    policy_version: int,
    forwards: float,
) -> TensorDict:
    """The samples of one denoised batch.

    Args:
        requests: B, with windows of one length, all beginning at one step.
        trajectory: of the steps that ran, on any device.
        pictures: uint8 [B, C, H, W] or [B, T, C, H, W]; None where nobody is shown any.
        schedule: the grid that step numbers count in; an edit ran over its end only.
        cond, negative: `model_specs.PromptEmbeds`, the latter None without true guidance.
        policy_version, forwards: the same for every row.
    """
    first, count = requests[0], len(requests)
    data: dict[str, Tensor] = {"final_latents": trajectory.final} | (
        {} if pictures is None else {"responses": pictures}
    )
    data["sigmas"] = schedule.sigmas.expand(count, -1)
    if first.settings.window and first.return_trajectory:
        for name in ("latents", "next_latents", "std", *(["means"] if first.return_means else [])):
            data[name] = getattr(trajectory, name)
        data["step_index"] = trajectory.step_index + first.settings.start_step
        if trajectory.log_probs is not None:
            data["rollout_log_probs"] = trajectory.log_probs
    if first.return_trajectory:
        data |= _prompts(cond, negative)
    data |= _facts(count, policy_version=policy_version, forwards=forwards, batch_rows=count)
    return _batch(data, count)


def given(
    requests: Sequence[GenerationRequest], clean: Tensor, schedule: SigmaSchedule, *, cond: Any, negative: Any
) -> Rows:
    """Finished pictures that nobody drew, as the rows of drawn ones: clean latents [B, …] fp32; the others as for `denoised`."""
    data = {"final_latents": clean, "sigmas": schedule.sigmas.expand(len(requests), -1)} | _prompts(cond, negative)
    return Rows.of(requests, _batch(data, len(requests)))


def _prompts(cond: Any, negative: Any) -> dict[str, Tensor]:
    data: dict[str, Tensor] = {}
    for prefix, embeds in (("", cond), ("negative_", negative)):
        if embeds is not None:
            longest = int(embeds.mask.sum(1).max())
            mask = embeds.mask[:, :longest]
            data |= {f"{prefix}prompt_embeds": embeds.embeds[:, :longest] * mask[..., None]}
            data |= {f"{prefix}prompt_embeds_mask": mask}
            if embeds.pooled is not None:
                data[f"{prefix}pooled_prompt_embeds"] = embeds.pooled
    return data


def _facts(count: int, *, policy_version: int, forwards: float, batch_rows: int) -> dict[str, Tensor]:
    return {
        "policy_version": torch.full((count,), policy_version),
        "forwards": torch.full((count,), float(forwards)),
        "batch_rows": torch.full((count,), batch_rows),
    }


def stacked(rows: Sequence[dict[str, Tensor]]) -> TensorDict:
    """Samples that were finished one by one, as a batch. Every row holds the same keys, without the B."""
    data: dict[str, Tensor] = {}
    for key in rows[0]:
        values = [row[key] for row in rows if key in row]
        if len(values) != len(rows):
            raise RolloutError(f"{key!r} came back for {len(values)} of {len(rows)} samples: answers were mixed up.")
        pad = key in _PADDED
        data[key] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True) if pad else torch.stack(values)
    return _batch(data, len(rows))


def _batch(data: dict[str, Tensor], count: int) -> TensorDict:
    from tensordict import TensorDict

    for name in _FP32:
        if name in data and data[name].dtype != torch.float32:
            raise RolloutConfigError(
                f"{name} has dtype {data[name].dtype}: trajectories are fp32 by contract, a rounded one moves "
                "log-probs by up to 0.15. Keep the sampler state in fp32 and cast only what enters the transformer."
            )
    return TensorDict({name: value.cpu() for name, value in data.items()}, batch_size=[count])


def in_order(chunks: Sequence[Chunk]) -> TensorDict:
    """The samples of a whole call, in the order of its requests."""
    from tensordict import TensorDict

    if len({frozenset(part.keys()) for _, part in chunks}) > 1:
        raise RolloutConfigError(
            "the samples of one call do not hold the same keys: use one call for each kind of request."
        )
    parts = [part for _, part in chunks]
    widths = {key: max(part[key].shape[1] for part in parts) for key in _PADDED if key in parts[0].keys()}
    parts = [_widened(part, widths) if widths else part for part in parts]
    order = torch.tensor([place for places, _ in chunks for place in places]).argsort()
    joined = TensorDict.cat(parts) if len(parts) > 1 else parts[0]
    return joined if bool((order == torch.arange(len(order))).all()) else joined[order]


def _widened(part: TensorDict, widths: dict[str, int]) -> TensorDict:
    part = part.copy()
    for key, width in widths.items():
        value, missing = part[key], width - part[key].shape[1]
        if missing:
            part[key] = torch.nn.functional.pad(value, (0, 0) * (value.ndim - 2) + (0, missing))
    return part


def column(values: Sequence[Any]) -> NonTensorStack:
    """Things that are no numbers, one a row, for a batch; what stands in several rows is held once."""
    from tensordict import NonTensorData, NonTensorStack

    held = {key: NonTensorData(value) for key, value in {id(value): value for value in values}.items()}
    return NonTensorStack(*(held[id(value)] for value in values))


def pictures_of(samples: TensorDict) -> Sequence[Any]:
    """The picture of each sample, or its latents where there is none: an array, or whatever stands for it where samples stay in
    other processes."""
    pictures = samples["responses" if "responses" in samples.keys() else "final_latents"]
    return list(pictures.numpy()) if isinstance(pictures, Tensor) else list(pictures)


PromptKey = tuple[str, str, "str | None"]
"""Uid, text and negative text: an agent loop may rewrite a prompt and keep its uid."""


@dataclass
class Rows:
    """What an update needs of some samples, in the form that crosses processes.

    Pickled, its tensors are arrays of their own size, which Ray moves out of band; a view never takes its whole storage along.

    Attributes:
        tensors: [b, …] each, without the prompts'.
        keys: of the samples' prompts.
        settings: how each sample was drawn.
        prompts: of each key the tensors [s, …], without padding, once.
    """

    tensors: dict[str, Tensor]
    keys: list[PromptKey]
    settings: list[SamplerSettings]
    prompts: dict[PromptKey, dict[str, Tensor]]

    @classmethod
    def of(cls, requests: Sequence[GenerationRequest], samples: TensorDict) -> Rows:
        """Of finished samples, without their pictures and `FACTS`."""
        names = [str(name) for name in samples.keys() if name not in PROMPTS]
        keys = [(request.uid, request.prompt, request.negative_prompt) for request in requests]
        first = {key: place for place, key in reversed(list(enumerate(keys)))}
        prompts = {key: _prompt(samples, place) for key, place in first.items()}
        return cls({name: samples[name] for name in names}, keys, [r.settings for r in requests], prompts)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "tensors": {name: _array(value) for name, value in self.tensors.items()},
            "prompts": {key: {k: _array(v) for k, v in one.items()} for key, one in self.prompts.items()},
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.tensors = {name: _tensor(*value) for name, value in state["tensors"].items()}
        self.prompts = {key: {k: _tensor(*v) for k, v in one.items()} for key, one in state["prompts"].items()}


def _prompt(samples: TensorDict, place: int) -> dict[str, Tensor]:
    found = {name: samples[name][place] for name in PROMPTS if name in samples.keys()}
    for prefix in ("", "negative_"):
        mask = found.get(f"{prefix}prompt_embeds_mask")
        if mask is not None:
            length = int(mask.sum())
            for name in (f"{prefix}prompt_embeds", f"{prefix}prompt_embeds_mask"):
                found[name] = found[name][:length]
    return {name: value.clone() for name, value in found.items()}


def _array(value: Tensor) -> tuple[np.ndarray, torch.dtype]:
    plain = value.detach().cpu().contiguous()
    return (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy(), value.dtype


def _tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array.copy()).view(dtype)  # Ray's memory is read-only, and is given back


def parted(requests: Sequence[GenerationRequest], samples: TensorDict, owners: Sequence[int] = ()) -> tuple[Any, ...]:
    """Samples in parts that may go to different processes: their `FACTS`, {name: array} of what is shown, and the rest.

    Args:
        requests, samples: B, in the same order.
        owners: who gets the rest of each sample: there is a `Rows` for each owner then, in ascending order. One for all without.
    """
    facts = {name: samples[name].numpy() for name in FACTS}
    shown = {name: samples[SHOWN[name]].contiguous().numpy() for name in requests[0].shown}
    rest = samples.exclude("responses", *FACTS)
    if len(set(owners)) < 2:
        return facts, shown, Rows.of(requests, rest)
    shares = [[place for place, one in enumerate(owners) if one == owner] for owner in sorted(set(owners))]
    return facts, shown, *(Rows.of([requests[i] for i in share], rest[torch.tensor(share)]) for share in shares)
