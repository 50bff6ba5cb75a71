"""The finished samples that a training process keeps, from their drawing to the update that they are for.

Whoever trains a sample keeps it; the driver knows each by its number (`slot`) here, and moves no latents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omni_rollout.samples import PROMPTS, PromptKey, Rows, column
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
        self._facts: list[tuple[PromptKey, Any]] = []  # (prompt, settings)
        self._prompts: dict[PromptKey, dict[str, Tensor]] = {}
        self._copies: set[int] = set()

    def keep(self, rows: Rows, copies: bool = False) -> list[int]:
        """Take rows; their slots. Copies are rows that another process keeps as well, and writes."""
        slots = list(range(len(self._rows), len(self._rows) + len(rows.keys)))
        tensors = {name: rows.tensors[name] for name in (*self.names, *_SCORES) if name in rows.tensors}
        self._rows += [{name: value[place] for name, value in tensors.items()} for place in range(len(slots))]
        self._facts += zip(rows.keys, rows.settings, strict=True)
        for key, prompt in rows.prompts.items():
            self._prompts.setdefault(key, prompt)
        self._copies |= set(slots) if copies else set()
        return slots

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
        keys = [self._facts[slot][0] for slot in slots]
        tensors = {name: torch.stack([self._rows[slot][name] for slot in slots]) for name in self._rows[slots[0]]}
        return Rows(tensors, keys, [self._facts[slot][1] for slot in slots], {key: self._prompts[key] for key in keys})

    def write(self, file: Path) -> None:
        """Its own rows as a safetensors file of `SLOT/NAME` and, for the prompts, `UID/NAME`; none where there are none.

        A prompt that was rewritten under the same uid is `UID#NUMBER/NAME` from then on.
        """
        every = {str(slot): row for slot, row in enumerate(self._rows) if slot not in self._copies}
        for (uid, *_), tensors_of in self._prompts.items():
            every[uid if uid not in every else f"{uid}#{len(every)}"] = tensors_of
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
            values = [rows.prompts[key][name] for key in rows.keys if name in rows.prompts[key]]
            if values:
                pooled = name.endswith("pooled_prompt_embeds")
                tensors[name] = (
                    torch.stack(values) if pooled else torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
                )
        return tensors
