"""The finished samples that a training process keeps, from their drawing to the update that they are for.

Whoever trains a sample keeps it; the driver knows each by its number (`slot`) here, and moves no latents.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omni_rollout.samples import PROMPTS, PromptKey, Rows, column
from sde_samplers import SamplerSettings
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
        self._lock = threading.Lock()  # rows come from replicas while others move from worker to worker
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._rows: list[dict[str, Tensor]] = []
        self._facts: list[tuple[PromptKey, Any]] = []  # (prompt, settings)
        self._prompts: dict[PromptKey, dict[str, Tensor]] = {}
        self._copies: set[int] = set()

    def keep(self, rows: Rows, copies: bool = False) -> list[int]:
        """Take rows; their slots. Copies are rows that another process keeps as well, and writes."""
        tensors = {name: rows.tensors[name] for name in (*self.names, *_SCORES) if name in rows.tensors}
        with self._lock:
            slots = list(range(len(self._rows), len(self._rows) + len(rows.keys)))
            for key, prompt in rows.prompts.items():
                self._prompts.setdefault(key, prompt)
            self._facts += zip(rows.keys, rows.settings, strict=True)
            self._copies |= set(slots) if copies else set()
            self._rows += [{name: value[place] for name, value in tensors.items()} for place in range(len(slots))]
        return slots

    def retain(self, slots: Sequence[int]) -> None:
        """Forget all rows but these, whose slots are 0, 1, … from now on, in this order."""
        self._rows, self._facts = [self._rows[slot] for slot in slots], [self._facts[slot] for slot in slots]
        self._prompts, self._copies = {key: self._prompts[key] for key, _ in self._facts}, set()

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

    def save(self, file: Path, slots: Sequence[int]) -> None:
        """Some rows as a safetensors file, from which `load` makes the same rows in the slots 0, 1, …"""
        facts = [self._facts[slot] for slot in slots]
        prompts = list(dict.fromkeys(key for key, _ in facts))
        every = {f"rows/{place}": self._rows[slot] for place, slot in enumerate(slots)}
        every |= {f"prompts/{place}": self._prompts[key] for place, key in enumerate(prompts)}
        tensors = {f"{owner}/{name}": value.clone() for owner, one in every.items() for name, value in one.items()}
        written = {"prompts": prompts, "rows": [(prompts.index(key), asdict(settings)) for key, settings in facts]}
        write_tensors(file, tensors, {"facts": json.dumps(written)})

    def load(self, file: Path) -> None:
        """The rows of a file that `save` wrote, in the place of all others."""
        from safetensors import safe_open

        with safe_open(file, framework="pt") as stored:
            facts = json.loads(stored.metadata()["facts"])
            tensors = {key: stored.get_tensor(key) for key in stored.keys()}
        keys: list[PromptKey] = [(uid, text, negative) for uid, text, negative in facts["prompts"]]
        self.clear()
        self._facts = [(keys[place], _settings(settings)) for place, settings in facts["rows"]]
        self._rows, self._prompts = [{} for _ in self._facts], {key: {} for key in keys}
        for path, value in tensors.items():
            kind, place, name = path.split("/")
            (self._rows[int(place)] if kind == "rows" else self._prompts[keys[int(place)]])[name] = value

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


def _settings(written: Mapping[str, Any]) -> SamplerSettings:
    """From JSON, which knows no tuples."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in written.items()}
    return SamplerSettings(**values)
