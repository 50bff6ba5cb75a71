"""Reading what a training step needs out of a TensorDict, and cutting it into micro-batches without copies.

Shapes: B samples, W trained steps, K sampler steps, S tokens, C channels. How the samples were drawn travels in the batch
as its non-tensor entry `settings`, because it belongs to the samples and not to the engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import EngineError, nearest

if TYPE_CHECKING:
    from model_specs import PromptEmbeds
    from sde_samplers.settings import SamplerSettings
    from tensordict import TensorDict

    from .config import FSDPDiffusionActorConfig


PROMPTS = tuple(
    f"{prefix}{key}"
    for prefix in ("", "negative_")
    for key in ("prompt_embeds", "prompt_embeds_mask", "pooled_prompt_embeds")
)
"""Keys of the prompts' tensors."""
OWN = math.nan
"""As a row's old log-prob: that of the update's own forward, while the weights are those that are meant. Its ratio is then exactly
1, and a log-prob that is no number does not hide behind it: the loss refuses the new one."""


def plain(data: TensorDict | Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A non-tensor entry of `data`: one value for the batch. `default` when it is absent.

    A batch that was stacked from single samples carries a list with one value per sample; they must agree. A tuple is
    one value.
    """
    if key not in data.keys():
        return default
    value = data[key]
    value = getattr(value, "data", value) if type(value).__module__.startswith("tensordict") else value
    if isinstance(value, Tensor):
        value = value.tolist() if value.ndim else value.item()
    if isinstance(value, list):
        first = value[0] if value else default
        if any(entry != first for entry in value):
            raise EngineError(
                f"{key!r} differs within the batch: {sorted({repr(e) for e in value})[:4]}; "
                f"send samples of different {key} in different batches"
            )
        return first
    return value


def settings_of(data: TensorDict | Mapping[str, Any]) -> SamplerSettings:
    """How the samples of the batch were drawn, which the trainer's forward repeats. They may differ in their windows and in
    where an edit began (`step_index` has each sample's own steps)."""
    if "settings" not in data.keys():
        raise EngineError(
            "the batch has no 'settings'; put the SamplerSettings that drew its samples into it as non-tensor data"
        )
    value = data["settings"]
    rows = value if isinstance(value, list) else [getattr(value, "data", value)]
    first: SamplerSettings = rows[0]
    for other in {row.replace(window=first.window, start_step=first.start_step) for row in set(rows)} - {first}:
        names = [name for name in first.__dataclass_fields__ if getattr(other, name) != getattr(first, name)]
        raise EngineError(
            f"settings differ within the batch, in {', '.join(names)}: {other} and {first}; send such samples in batches of "
            f"their own"
        )
    return first


def tensor(data: TensorDict | Mapping[str, Any], key: str, remedy: str) -> Tensor:
    """A required tensor of the batch."""
    keys = [str(k) for k in data.keys()]
    if key not in keys or not isinstance(data[key], Tensor):
        raise EngineError(f"the batch has no tensor {key!r} (nearest: {nearest(key, keys, 2)}); {remedy}")
    return data[key]


def require_fp32(value: Tensor, key: str) -> Tensor:
    """Refuse rounded trajectories: bf16 latents move log-probs by more than any clip range."""
    if value.dtype != torch.float32:
        raise EngineError(f"{key!r} is {value.dtype}, and the trajectory must be fp32; store it as the sampler made it")
    return value


def prompts(data: Mapping[str, Any], prefix: str = "", multiple: int = 1) -> PromptEmbeds | None:
    """The batch's prompt embeddings, without the padding that all rows share; None when absent.

    Rows of one length then need no attention mask, which picks the faster kernel; the rollout saw them so too.

    `prefix` is `""` or `"negative_"`. The number of tokens is padded to a `multiple` (of the ranks that share
    a sample).
    """
    from model_specs import PromptEmbeds

    from .padding import pad_jagged

    embeds = data.get(f"{prefix}prompt_embeds")
    if embeds is None:
        return None
    mask = data.get(f"{prefix}prompt_embeds_mask")
    if embeds.is_nested:
        embeds, mask = pad_jagged(embeds)
    elif mask is None:
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
    pooled = data.get(f"{prefix}pooled_prompt_embeds")
    found = PromptEmbeds(embeds, mask.bool(), pooled).trim()
    return found.pad_to(-(-embeds.shape[1] // multiple) * multiple) if multiple > 1 else found


def text_tokens(data: TensorDict | Mapping[str, Any]) -> int:
    """Prompt tokens of a row, padding included."""
    from .padding import longest

    embeds = data["prompt_embeds"]
    return longest(embeds) if embeds.is_nested else int(embeds.shape[1])


def select(data: TensorDict | Mapping[str, Any], keys: tuple[str, ...], device: torch.device) -> dict[str, Tensor]:
    """The named tensors that are there, on `device`; pictures and metadata stay behind."""
    present = set(data.keys())
    chosen = {key: data[key] for key in keys if key in present and isinstance(data[key], Tensor)}
    return {key: value.to(device, non_blocking=True) for key, value in chosen.items()}


def mini_batches(
    actor: FSDPDiffusionActorConfig, count: int, step: int, epoch: int = 0, planned: int | None = None
) -> list[Tensor]:
    """Row numbers of each mini-batch of `count` rows over all ranks: the same whatever the number of ranks.

    `planned` asks for that many, whatever `count`. Pairs stay together. The shuffle depends on the seed, the training step
    and the epoch. Raises `EngineError` for fewer rows than mini-batches.
    """
    unit = 2 if actor.diffusion_loss.spec.paired else 1
    pieces = math.ceil(count / actor.ppo_mini_batch_size)
    if planned is not None:
        pieces = max(min(planned, count // unit), 1)
    if count % unit or count // unit < pieces:
        raise EngineError(
            f"there are {count} samples for {pieces} mini-batches (units of {unit}); give at least {pieces * unit}, or raise "
            f"ppo_mini_batch_size={actor.ppo_mini_batch_size}"
        )
    units = torch.arange(count).view(-1, unit)
    if actor.shuffle:
        seed = hash((actor.data_loader_seed, step, epoch, 0)) % (2**63)
        units = units[torch.randperm(len(units), generator=torch.Generator().manual_seed(seed))]
    return [chosen.flatten() for chosen in torch.tensor_split(units, pieces)]


def micro_batches(tensors: Mapping[str, Tensor], size: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive slices of `size` samples: views, not copies (jagged tensors are cut by their offsets)."""
    from .padding import narrow_jagged

    count = batch_size(tensors)
    for start in range(0, count, size):
        stop = min(start + size, count)
        yield {k: narrow_jagged(v, start, stop) if v.is_nested else v[start:stop] for k, v in tensors.items()}


def batch_size(tensors: Mapping[str, Tensor]) -> int:
    """Number of samples, the same in every tensor."""
    sizes = {key: value.shape[0] for key, value in tensors.items()}
    if len(set(sizes.values())) != 1:
        raise EngineError(f"the tensors of the batch have different numbers of samples: {sizes}")
    return next(iter(sizes.values()))
