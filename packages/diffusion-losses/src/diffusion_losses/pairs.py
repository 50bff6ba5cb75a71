"""Preference pairs from rewards, for Diffusion-DPO."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import LossError, check_name
from .groups import GroupIds, metric, read_groups, read_rewards
from .types import PairOutput

MODES = ("best_worst", "all")
TIES = ("skip", "keep")


def make_pairs(
    rewards: Tensor | Sequence[float],
    groups: GroupIds,
    *,
    margin: float = 0.0,
    mode: str = "best_worst",
    ties: str = "skip",
) -> PairOutput:
    """Row numbers (winner, loser) of pairs within each group.

    Args:
        mode: "best_worst" makes one pair per group, its first best and its first worst sample; "all" makes every pair,
            ordered by group, then winner, then loser.
        margin: the winner's reward must exceed the loser's by MORE than this, so that 0 drops ties.
        ties: "keep" (best_worst only) still makes a pair of a group whose rewards are all equal, its second sample
            against its first, as flow_grpo does and verl-omni's pairing allows; the default "skip" does not train on a
            preference that nobody expressed.

    NaN and infinite rewards are left out. Metrics count groups, pairs, skipped ties, groups below the margin,
    singletons and non-finite rewards. Raises `LossError` for missing ids, a negative margin or an unknown name.
    """
    check_name("mode", mode, MODES)
    check_name("ties", ties, TIES)
    if ties == "keep" and (mode == "all" or margin > 0):
        raise LossError(
            f"ties='keep' contradicts mode={mode!r} with margin={margin!r}; use it with mode='best_worst', margin=0"
        )
    if not margin >= 0 or math.isinf(margin):
        raise LossError(f"margin={margin!r} must be zero or a positive number; it is a difference of rewards")
    values = read_rewards("rewards", rewards)
    rows, numbers = read_groups(groups, values.numel()), values.tolist()
    pairs: list[tuple[int, int]] = []
    counts = dict.fromkeys(("tied_pairs", "below_margin", "singleton_groups"), 0)
    for members in rows.values():
        finite = [row for row in members if math.isfinite(numbers[row])]
        if len(finite) < 2:
            counts["singleton_groups"] += 1
            continue
        if mode == "best_worst":
            best, worst = max(finite, key=lambda row: numbers[row]), min(finite, key=lambda row: numbers[row])
            if best == worst:
                best, worst = finite[1], finite[0]
            candidates = [(best, worst)]
        else:
            ordered = [
                (a, b) if numbers[a] >= numbers[b] else (b, a) for i, a in enumerate(finite) for b in finite[i + 1 :]
            ]
            candidates = sorted(ordered)
        for winner, loser in candidates:
            gap = numbers[winner] - numbers[loser]
            if gap == 0 and ties == "skip":
                counts["tied_pairs"] += 1
            elif gap > margin or (gap == 0 and ties == "keep"):
                pairs.append((winner, loser))
            else:
                counts["below_margin"] += 1
    table = torch.tensor(pairs, dtype=torch.long, device=values.device).reshape(-1, 2)
    counts |= {"groups": len(rows), "pairs": len(pairs), "nonfinite": sum(not math.isfinite(x) for x in numbers)}
    metrics = {f"pairs/{name}": metric(value) for name, value in counts.items()}
    return PairOutput(table[:, 0], table[:, 1], metrics)
