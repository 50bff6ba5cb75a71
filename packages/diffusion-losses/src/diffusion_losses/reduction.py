"""From one value per element to one loss: sums, counts, and what several ranks must agree on.

A data-parallel trainer averages gradients over ranks. For that average to be the gradient of the single-process
loss, a rank that holds `n` of `N` counted elements must contribute `world * sum / N`, not its own mean: with uneven
splits the mean of means is a different number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import LossError
from .statistics import Statistic
from .surrogates import safe_exp
from .types import ElementLoss, LossOutput, Metrics


def element_loss(
    policy: Tensor,
    mask: Tensor,
    means: Metrics,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    log_ratio: Tensor | None = None,
    distance: Tensor | None = None,
) -> ElementLoss:
    """policy + kl_coef * kl per element, and what is reported of it; `distance` is |log_ratio| when it is not given."""
    objective = policy
    if kl is not None:
        means = {**means, "actor/kl_loss": kl}
        objective = policy + kl_coef * kl
    detached = {name: value.detach() for name, value in means.items()}
    if log_ratio is None:
        return ElementLoss(objective, mask, detached)
    moved = log_ratio.abs() if distance is None else distance
    return ElementLoss(objective, mask, detached, safe_exp(log_ratio.detach()), moved.detach())


def reduce_elements(elements: ElementLoss, *, global_count: int | None = None, dp_group: Any = None) -> LossOutput:
    """Average an `ElementLoss` over its counted elements.

    Args:
        global_count: counted elements of the whole mini-batch, over all micro-batches and ranks. The loss is then
            `world * local_sum / global_count`, no collective runs, and metrics describe this micro-batch.
        dp_group: a `torch.distributed` group. Without `global_count`, sums and counts are all-reduced in two small
            collectives (every rank must call): each rank's loss *value* and metrics are those of the single process, and
            the mean over ranks of the gradients is its gradient.

    An empty mask gives a zero loss that is still attached to the graph, so that no rank skips its backward.
    Raises `LossError` when `global_count` is smaller than the elements counted here.
    """
    mask, objective = elements.mask, elements.objective
    local_sum = torch.where(mask, objective, torch.zeros_like(objective)).sum()
    world = dist.get_world_size(dp_group) if dp_group is not None else 1
    if global_count is not None:
        _check_count(global_count, mask)
        statistics = _statistics(elements, None)
        return LossOutput(local_sum * (world / global_count), _metrics(statistics), statistics)
    statistics = _statistics(elements, dp_group)
    count, total = statistics["actor/loss"].parts
    loss = local_sum * (world / count.clamp(min=1)).to(local_sum.dtype)
    if dp_group is not None:
        # Same gradient, but the value that one process would report.
        loss = loss + ((total / count.clamp(min=1)).to(loss.dtype) - loss).detach()
    return LossOutput(loss, _metrics(statistics), statistics)


def _check_count(global_count: int, mask: Tensor) -> None:
    local = int(mask.sum())
    if isinstance(global_count, bool) or global_count < max(local, 1):
        raise LossError(
            f"data['global_count']={global_count!r} is smaller than the {local} elements counted in this call; it is "
            "the number of counted elements of the whole mini-batch, over all micro-batches and ranks"
        )


@torch.no_grad()
def _statistics(elements: ElementLoss, dp_group: Any) -> dict[str, Statistic]:
    """The statistics of the counted elements; over the ranks of `dp_group` when it is given."""
    mask = elements.mask
    values = {"actor/loss": elements.objective, **elements.means}
    columns = [mask, *(_kept(value, mask) for value in values.values())]
    if elements.ratio is not None:
        off = _kept(elements.ratio.double() - 1.0, mask)  # around 1, where ratios live: the squares keep their digits
        columns += [off, off * off]
    sums = torch.stack([column.sum(dtype=torch.float64) for column in columns])
    extremes = _extremes(elements)
    edges = torch.stack([value for _, value in extremes.values()]) if extremes else None
    if dp_group is not None:
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=dp_group)
        if edges is not None:
            dist.all_reduce(edges, op=dist.ReduceOp.MAX, group=dp_group)
    count = sums[0]
    found = {name: Statistic("mean", torch.stack([count, sums[1 + i]])) for i, name in enumerate(values)}
    if elements.ratio is not None:
        first, second = sums[-2], sums[-1]
        found["actor/ratio_mean"] = Statistic("mean", torch.stack([count, first + count]))
        found["actor/ratio_std"] = Statistic("std", torch.stack([count, first, second]))
    for i, (name, (sign, _)) in enumerate(extremes.items()):
        assert edges is not None
        found[name] = Statistic("max" if sign > 0 else "min", torch.stack([count, sign * edges[i]]))
    found["actor/count"] = Statistic("sum", torch.stack([torch.ones_like(count), count]))
    return found


def _extremes(elements: ElementLoss) -> dict[str, tuple[float, Tensor]]:
    """(sign, largest of sign * value) of what is reported as a maximum (sign 1) or a minimum (-1)."""
    wanted: dict[str, tuple[float, Tensor | None]] = {
        "actor/ratio_max": (1.0, elements.ratio),
        "actor/ratio_min": (-1.0, elements.ratio),
        "actor/distance_max": (1.0, elements.distance),
    }
    none = torch.tensor(-torch.inf, dtype=torch.float64, device=elements.mask.device)
    return {
        name: (sign, torch.where(elements.mask, sign * value.detach().double(), none).max())
        for name, (sign, value) in wanted.items()
        if value is not None
    }


def _metrics(statistics: dict[str, Statistic]) -> Metrics:
    """The numbers of this call as 0-dim fp32 tensors, 0 where nothing was counted; no device synchronisation."""
    metrics = {}
    for name, (pool, parts) in statistics.items():
        count = parts[0].clamp(min=1)
        if pool == "mean":
            value = parts[1] / count
        elif pool == "std":
            value = (parts[2] / count - (parts[1] / count).square()).clamp(min=0).sqrt()
        else:
            value = torch.where(parts[0] > 0, parts[1], torch.zeros_like(count))
        metrics[name] = value.float()
    return metrics


def _kept(value: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, value.detach().double(), torch.zeros((), dtype=torch.float64, device=mask.device))
