"""Per-prompt reward statistics that run across epochs.

A prompt that comes back after many steps is judged against everything it ever earned, not only against this step's
group, which matters when groups are small. flow_grpo's tracker was meant to do this, but its second `update` without
a `clear` fails, so in practice it is per epoch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from diffusion_losses.advantages import check_scale, finish, moments, scale_of
from diffusion_losses.errors import LossError, unknown_name
from diffusion_losses.groups import GroupIds, read_groups, read_rewards, result_dtype
from diffusion_losses.types import AdvantageOutput

SCOPES = ("group", "batch", "none")


class RunningStatistics:
    """Count, mean and sum of squared deviations of every prompt's rewards, in constant memory per prompt.

    Groups must be ids of PROMPTS that stay the same over a run, not the fresh uid of one step. The state is
    JSON-serialisable and belongs into a
    checkpoint: `state_dict()` and `load_state_dict()`; ids are then strings or integers.

    std: "group" divides by the std of the prompt's history, "batch" by that of the current rewards of all prompts
        (flow_grpo's global_std), "none" by 1.
    ddof, eps, eps_kind, clip: as in `group_advantages`.
    """

    def __init__(
        self, *, std: str = "group", ddof: int = 1, eps: float = 1e-4, eps_kind: str = "add", clip: float | None = None
    ) -> None:
        if std not in SCOPES:
            raise unknown_name("std", std, SCOPES)
        check_scale(ddof=ddof, eps=eps, eps_kind=eps_kind, clip=clip)
        self.std, self.ddof, self.eps, self.eps_kind, self.clip = std, ddof, eps, eps_kind, clip
        self._history: dict[Hashable, tuple[int, float, float]] = {}

    def update(self, rewards: Tensor | Sequence[float], groups: GroupIds) -> AdvantageOutput:
        """Add `rewards` [B] to the histories of their `groups`, then return advantages against those histories.

        Samples with a NaN or infinite reward enter no history; they, and samples of a prompt whose whole history is
        one value, get A = 0 and mask False. The first update equals `group_advantages`.
        """
        values = read_rewards("rewards", rewards)
        rows = read_groups(groups, values.numel())
        finite = torch.isfinite(values)
        batch = moments(values[finite], self.ddof)
        advantages, mask = torch.zeros_like(values), torch.zeros_like(finite)
        flat = 0
        for name, members in rows.items():
            index = torch.tensor(members, device=values.device)
            index = index[finite[index]]
            if index.numel() == 0:
                continue
            self._add(name, values[index])
            count, mean, deviations = self._history[name]
            if deviations == 0.0:
                flat += 1
                continue
            own = (deviations / (count - self.ddof)) ** 0.5
            divisor = 1.0
            if self.std != "none":
                divisor = scale_of(own if self.std == "group" else batch.std, self.eps, self.eps_kind)
            advantages[index] = (values[index] - mean) / divisor
            mask[index] = True
        counts = {
            "groups": len(rows),
            "flat_histories": flat,
            "nonfinite": float((~finite).sum()),
            "tracked_prompts": len(self._history),
        }
        return finish(advantages, mask, counts, clip=self.clip, dtype=result_dtype(rewards))

    def _add(self, name: Hashable, values: Tensor) -> None:
        """Merge two sets of moments (Chan, Golub and LeVeque): exact in any order, no history is stored."""
        count, mean, deviations = self._history.get(name, (0, 0.0, 0.0))
        n, own_mean = values.numel(), float(values.mean())
        own = 0.0 if bool(values.max() == values.min()) else float((values - own_mean).square().sum())
        if own == 0.0:
            own_mean = float(values[0])  # the mean of equal numbers may differ from them in the last digit
        total, gap = count + n, own_mean - mean
        merged = deviations + own + gap * gap * count * n / total
        self._history[name] = (total, mean + gap * n / total, merged)

    def state_dict(self) -> dict[str, Any]:
        """`{"prompts": [[id, count, mean, sum of squared deviations], ...]}`."""
        return {"prompts": [[name, *history] for name, history in self._history.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the histories by those of `state_dict()`."""
        if "prompts" not in state:
            raise LossError(f"state has keys {sorted(state)!r} but no 'prompts'; give what state_dict() returned")
        self._history = {name: (int(n), float(mean), float(m2)) for name, n, mean, m2 in state["prompts"]}

    def clear(self) -> None:
        """Forget every prompt."""
        self._history.clear()
