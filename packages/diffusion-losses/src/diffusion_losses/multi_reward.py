"""Several rewards, one advantage.

Adding raw rewards lets the one with the widest spread decide. GDPO (arXiv 2601.05242) normalises each reward within
its group first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .advantages import finish, group_advantages, moments, scale_of
from .errors import LossError, check_name
from .groups import GroupIds, read_groups, read_rewards, result_dtype
from .types import AdvantageOutput

METHODS = ("gdpo", "decoupled", "sum")


def combined_advantages(
    components: Mapping[str, Tensor | Sequence[float]],
    groups: GroupIds,
    *,
    weights: Mapping[str, float] | None = None,
    method: str = "gdpo",
    std: str = "group",
    ddof: int = 1,
    eps: float = 1e-4,
    eps_kind: str = "add",
    clip: float | None = None,
) -> AdvantageOutput:
    """Advantages [B] from named rewards, each [B].

    Args:
        method: "gdpo" (default; Flow-Factory's default): every reward is normalised within its group, the weighted sum
            of those is normalised over the batch, so its scale does not depend on how many rewards there are;
            "decoupled" (MixGRPO's `advantage_aggr`): the same without the second step;
            "sum": the weighted sum of raw rewards is normalised once.
        weights: by component name, 1 where absent.
        std, ddof, eps, eps_kind: as in `group_advantages`, for every normalisation; Flow-Factory is ddof=0, eps=1e-6,
            eps_kind="floor", MixGRPO ddof=1, eps=1e-8.

    A component that says nothing about a group (all equal) contributes zero there; a sample is masked when no
    component says anything or any of its rewards is not finite. `advantages/equal_groups` counts groups
    of several in which no sample is left. Metrics of single components are under
    `advantages/<name>_...`. Raises `LossError` for no components, weights of unknown components, or what
    `group_advantages` refuses.
    """
    check_name("method", method, METHODS)
    if not components:
        raise LossError(f"components={dict(components)!r} is empty; give at least one named reward")
    shares = dict.fromkeys(components, 1.0) | dict(weights or {})
    for name in shares:
        check_name("weights key", name, components)
    values = {name: read_rewards(f"components[{name!r}]", value) for name, value in components.items()}
    sizes = {name: value.numel() for name, value in values.items()}
    if len(set(sizes.values())) > 1:
        raise LossError(f"components have different lengths, {sizes!r}; give one reward of each kind per sample")
    dtype = (
        torch.float64 if any(result_dtype(value) == torch.float64 for value in components.values()) else torch.float32
    )
    if method == "sum":
        total = sum((shares[name] * value for name, value in values.items()), torch.zeros(()).double())
        result = group_advantages(total, groups, std=std, ddof=ddof, eps=eps, eps_kind=eps_kind, clip=clip)
        return AdvantageOutput(result.advantages.to(dtype), result.mask, result.metrics)
    parts = {
        name: group_advantages(value, groups, std=std, ddof=ddof, eps=eps, eps_kind=eps_kind)
        for name, value in values.items()
    }
    finite = torch.stack([torch.isfinite(value) for value in values.values()]).all(dim=0)
    mask = torch.stack([part.mask for part in parts.values()]).any(dim=0) & finite
    combined = sum((shares[name] * part.advantages for name, part in parts.items()), torch.zeros(()).double())
    if method == "gdpo":
        whole = moments(combined[finite], ddof)
        combined = (combined - whole.mean) / scale_of(whole.std, eps, eps_kind)
    combined = torch.where(mask, combined, torch.zeros_like(combined))
    rows = read_groups(groups, mask.numel()).values()
    silent = sum(len(members) > 1 and not bool(mask[members].any()) for members in rows)
    counts = {"groups": len(rows), "nonfinite": int((~finite).sum()), "equal_groups": silent}
    output = finish(combined, mask, counts, clip=clip, dtype=dtype)
    for name, part in parts.items():
        prefix = f"advantages/{name}_"
        output.metrics.update({key.replace("advantages/", prefix, 1): value for key, value in part.metrics.items()})
    return output
