"""The finished samples that a training process keeps, from their drawing to the update that they are for.

Whoever trains a sample keeps it; the driver knows each by its number (`slot`) here, and moves no latents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omni_rollout.samples import PROMPTS, Rows, column
from tensordict import TensorDict
from torch import Tensor

from . import schema
from .failure import write_tensors

_SCORES = ("old_log_probs", "old_means", "ref_means")


class Store:
    """Rows by slot.

    Args:
        names: of the tensors that are kept; the prompts' are kept too, once for all samples of a prompt.
    """

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._rows: list[dict[str, Tensor]] = []
        self._facts: list[tuple[str, Any]] = []  # (uid, settings)
        self._prompts: dict[str, dict[str, Tensor]] = {}

    def keep(self, rows: Rows, which: Sequence[int] | None = None) -> list[int]:
        """Take some of the rows, or all; their slots."""
        first = len(self._rows)
        tensors = {name: rows.tensors[name] for name in (*self.names, *_SCORES) if name in rows.tensors}
        if which is not None:  # copies: views would keep the rows of other ranks too
            tensors = {name: value[list(which)] for name, value in tensors.items()}
        for number, place in enumerate(range(len(rows.uids)) if which is None else which):
            self._rows.append({name: value[number] for name, value in tensors.items()})
            self._facts.append((rows.uids[place], rows.settings[place]))
            self._prompts.setdefault(rows.uids[place], rows.prompts[rows.uids[place]])
        return list(range(first, len(self._rows)))

    def put(self, slots: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        """Keep more about rows: [b, …] each, in the order of the slots."""
        for place, slot in enumerate(slots):
            self._rows[slot] |= {name: value[place] for name, value in tensors.items()}

    def choose_steps(self, slots: Sequence[int], chosen: Tensor) -> None:
        """Leave only some steps of the trajectories: `chosen` [b, W'] of each window's W."""
        for slot, steps in zip(slots, chosen, strict=True):
            row = self._rows[slot]
            row |= {name: row[name][steps] for name in (*schema.TRAJECTORY, "means") if name in row}

    def rows(self, slots: Sequence[int]) -> Rows:
        """The form that another process takes."""
        uids = [self._facts[slot][0] for slot in slots]
        tensors = {name: torch.stack([self._rows[slot][name] for slot in slots]) for name in self._rows[slots[0]]}
        return Rows(tensors, uids, [self._facts[slot][1] for slot in slots], {uid: self._prompts[uid] for uid in uids})

    def write(self, file: Path) -> None:
        """All rows as a safetensors file of `SLOT/NAME` and, for the prompts, `UID/NAME`; none where there are none."""
        every = {str(slot): row for slot, row in enumerate(self._rows)} | self._prompts
        tensors = {f"{key}/{name}": value.clone() for key, one in every.items() for name, value in one.items()}
        if tensors:
            write_tensors(file, tensors)

    def batch(self, slots: Sequence[int]) -> TensorDict:
        """TensorDict [b] as the engine reads it; a slot may occur more than once."""
        batch = TensorDict(self._tensors(slots), batch_size=[len(slots)])
        batch["settings"] = column([self._facts[slot][1] for slot in slots])
        schema.check(batch, (*self.names, "prompt_embeds", "prompt_embeds_mask"), "the rollout")
        return batch

    def _tensors(self, slots: Sequence[int]) -> dict[str, Tensor]:
        """[b, …] each, the prompts' padded at the right."""
        rows = self.rows(slots)
        tensors = dict(rows.tensors)
        for name in PROMPTS:
            values = [rows.prompts[uid][name] for uid in rows.uids if name in rows.prompts[uid]]
            if values:
                pooled = name.endswith("pooled_prompt_embeds")
                tensors[name] = (
                    torch.stack(values) if pooled else torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
                )
        return tensors
