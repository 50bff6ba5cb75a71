"""Best-of-n: train on the extremes of what was sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diffusion_losses.errors import LossError
from diffusion_losses.groups import GroupIds, read_groups, read_rewards


def best_of_n(scores: Tensor | Sequence[float], n: int, groups: GroupIds | None = None) -> Tensor:
    """Row numbers of the n/2 highest and the n/2 lowest scores: a [n] long tensor, or [groups * n] with `groups`.

    DanceGRPO's `bestofn`, whose scores are weighted sums of advantages. It selects over the whole local batch
    (groups=None, default here for that reason); with `groups` every group contributes n rows, so that no prompt
    drops out. Within a selection the order is that of the public code: the top half in ascending order, then the
    bottom half in ascending order; ties keep the batch order. Rows with NaN or infinite scores are never selected.
    Raises `LossError` when n is odd, below 2, or larger than the number of finite scores.
    """
    if isinstance(n, bool) or n < 2 or n % 2:
        raise LossError(f"n={n!r} must be an even number of at least 2: half of it is taken from each end")
    values = read_rewards("scores", scores)
    members = [list(range(values.numel()))] if groups is None else list(read_groups(groups, values.numel()).values())
    chosen = []
    for rows in members:
        index = torch.tensor(rows, device=values.device)
        index = index[torch.isfinite(values[index])]
        if index.numel() < n:
            raise LossError(
                f"n={n!r} but only {index.numel()} of {len(rows)} scores are finite; lower n or sample more"
            )
        ascending = index[torch.sort(values[index], stable=True).indices]
        chosen += [ascending[-(n // 2) :], ascending[: n // 2]]
    return torch.cat(chosen)
