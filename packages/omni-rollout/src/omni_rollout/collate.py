"""Rows to batch: reading columns of a TensorDict, and stacking finished samples into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import MissingExtraError, RolloutConfigError, RolloutError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from .agent_loop import DiffusionAgentLoopOutput

_MISSING = object()
#: Padded at the right to the longest row, with their masks.
_PADDED = ("prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds", "negative_prompt_embeds_mask")


def column(batch: TensorDict, key: str, default: Any = _MISSING) -> Any:
    """A key of the batch as plain Python.

    A list for per-row values, the value itself for metadata of the whole batch.
    """
    if key not in batch.keys():  # noqa: SIM118 - `in` on a TensorDict means something else
        if default is _MISSING:
            raise RolloutConfigError(f"the batch has no {key!r}; it has {sorted(map(str, batch.keys()))!r}.")
        return default
    value = batch[key]
    if isinstance(value, Tensor):
        return value.tolist()
    if hasattr(value, "tolist"):  # NonTensorStack, numpy arrays
        return value.tolist()
    return list(value) if isinstance(value, list | tuple) else value


def collate(
    rows: Sequence[dict[str, Any]], outputs: Sequence[DiffusionAgentLoopOutput], *, with_rewards: bool
) -> TensorDict:
    """Stack finished samples; see `DiffusionAgentLoopWorker.generate_sequences` for the keys."""
    try:
        from tensordict import NonTensorStack, TensorDict
    except ImportError as error:
        raise MissingExtraError("agent loops need tensordict: pip install './packages/omni-rollout[ray]'") from error
    extras = [output.extra_fields for output in outputs]
    data: dict[str, Any] = {"responses": torch.stack([output.response_diffusion_output for output in outputs])}
    for key in _tensors(extras):
        values = _everywhere(key, extras)
        if values is not None:
            data[key] = _stack(key, values)
    for key in _PADDED:
        values = _everywhere(key, extras)
        if values is not None:
            data[key] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
    if all(output.response_logprobs is not None for output in outputs):
        data["rollout_log_probs"] = torch.stack(
            [o.response_logprobs for o in outputs if o.response_logprobs is not None]
        )
    if all(output.prompt_ids for output in outputs):
        ids = [torch.tensor(output.prompt_ids) for output in outputs]
        data["prompts"] = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        data["prompts_mask"] = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(x).bool() for x in ids], batch_first=True
        )
    forwards = _everywhere("forwards", extras)
    if forwards is not None:
        data["forwards"] = torch.tensor(forwards, dtype=torch.float32)
    data["policy_version"] = torch.tensor([int(extra.get("policy_version", 0)) for extra in extras])
    data["seed"] = torch.tensor([row["seed"] for row in rows])
    data["index"] = torch.tensor([row["index"] for row in rows])
    data["num_turns"] = torch.tensor([output.num_turns for output in outputs])
    lists: dict[str, list[Any]] = {
        "uid": [row["uid"] for row in rows],
        "prompt": [row["raw_prompt"] for row in rows],
        "metadata": [dict(row["metadata"]) for row in rows],
        "schedule_hash": [str(extra.get("schedule_hash", "")) for extra in extras],
    }
    if with_rewards:
        scores = [float("nan") if output.reward_score is None else output.reward_score for output in outputs]
        data["rm_scores"] = torch.tensor(scores, dtype=torch.float32).unsqueeze(-1)
        lists["reward_components"] = [extra.get("reward_components", {}) for extra in extras]
        lists["reward_errors"] = [extra.get("reward_error") for extra in extras]
    batch = TensorDict(data, batch_size=[len(rows)])
    for key, values in lists.items():
        batch[key] = NonTensorStack(*values)
    batch.set_non_tensor("metrics", [output.metrics for output in outputs])
    if with_rewards:
        keys = sorted({key for extra in extras for key in extra.get("reward_components", {})})
        batch.set_non_tensor("reward_extra_keys", keys)
    return batch


def _tensors(extras: Sequence[dict[str, Any]]) -> list[str]:
    """Names of all tensors that samples brought and that have one shape: a trajectory's, and any that a loop added."""
    names = {key: None for extra in extras for key, value in extra.items() if isinstance(value, Tensor)}
    return [key for key in names if key not in _PADDED]


def _stack(key: str, values: list[Tensor]) -> Tensor:
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise RolloutError(
            f"{key!r} has the shapes {sorted(shapes)} in one batch; give all samples tensors of one shape."
        )
    return torch.stack(values)


def _everywhere(key: str, extras: Sequence[dict[str, Any]]) -> list[Any] | None:
    """The values of a key in all samples, None when no sample has it, an error when only some have."""
    values = [extra[key] for extra in extras if extra.get(key) is not None]
    if values and len(values) != len(extras):
        raise RolloutError(
            f"{key!r} came back for {len(values)} of {len(extras)} samples: the backend mixed its answers up."
        )
    return values or None
