"""Prompt embeddings: the batch that every `velocity` takes, and the caching encoder that makes it.

Shapes: B samples, S text tokens, C channels. A mask is bool, True where a token counts, and left-aligned: the tokens
that count come first, padding after them.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from model_specs.errors import SpecError


@dataclass(frozen=True, eq=False)
class PromptEmbeds:
    """What a transformer is told about the prompts of a batch.

    Args:
        embeds: [B, S, C], padded at the right with zeros.
        mask: [B, S] bool, left-aligned.
        pooled: [B, C'] where the architecture has a pooled vector (SD3, FLUX), else None.

    Raises:
        SpecError: the shapes or dtypes do not fit together.
    """

    embeds: Tensor
    mask: Tensor
    pooled: Tensor | None = None

    def __post_init__(self) -> None:
        if self.embeds.ndim != 3 or self.mask.shape != self.embeds.shape[:2]:
            raise SpecError(
                f"embeds {tuple(self.embeds.shape)} and mask {tuple(self.mask.shape)} do not fit together: "
                "give embeds [B, S, C] and mask [B, S]."
            )
        if self.mask.dtype != torch.bool:
            raise SpecError(f"The prompt mask is {self.mask.dtype}, it must be torch.bool: pass `mask.bool()`.")
        if self.pooled is not None and (self.pooled.ndim != 2 or self.pooled.shape[0] != self.embeds.shape[0]):
            raise SpecError(
                f"pooled {tuple(self.pooled.shape)} does not fit embeds {tuple(self.embeds.shape)}: give it [B, C]."
            )

    def __len__(self) -> int:
        return self.embeds.shape[0]

    @property
    def full(self) -> bool:
        """True when no row has padding: then the stock pipelines pass no mask, which also picks a faster attention."""
        known = self.__dict__.get("_full")
        if known is None:  # asked once per object: on a GPU the answer is a synchronisation
            known = bool(self.mask.all())
            object.__setattr__(self, "_full", known)
        return known

    def check(self) -> PromptEmbeds:
        """Return self if every mask row is left-aligned and not empty, else raise SpecError naming the row."""
        lengths = self.mask.sum(1, keepdim=True)
        positions = torch.arange(self.mask.shape[1], device=self.mask.device)
        wrong = ((positions < lengths) != self.mask).any(1) | (lengths[:, 0] == 0)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise SpecError(
                f"Mask row {row} is not left-aligned or is empty ({int(lengths[row])} of {self.mask.shape[1]} tokens "
                "count): put the tokens that count first and the padding after them."
            )
        return self

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> PromptEmbeds:
        """Move, and cast the floating-point parts. Returns self when nothing changes."""
        embeds = self.embeds.to(device=device, dtype=dtype)
        mask = self.mask.to(device=device)
        pooled = None if self.pooled is None else self.pooled.to(device=device, dtype=dtype)
        if embeds is self.embeds and mask is self.mask and pooled is self.pooled:
            return self
        return self._carry(replace(self, embeds=embeds, mask=mask, pooled=pooled))

    def _carry(self, other: PromptEmbeds) -> PromptEmbeds:
        """Pass on what is already known about the mask."""
        if "_full" in self.__dict__:
            object.__setattr__(other, "_full", self.__dict__["_full"])
        return other

    def index(self, rows: Tensor | Sequence[int] | slice) -> PromptEmbeds:
        """The given rows, in that order (repetition allowed)."""
        if not isinstance(rows, slice):
            rows = torch.as_tensor(rows, device=self.embeds.device)
        pooled = None if self.pooled is None else self.pooled[rows]
        chosen = PromptEmbeds(self.embeds[rows], self.mask[rows], pooled)
        return self._carry(chosen) if self.__dict__.get("_full") else chosen

    def expand(self, batch: int) -> PromptEmbeds:
        """One row for all `batch` samples (a shared negative prompt); a batch of that size already is returned as is.

        Raises:
            SpecError: neither 1 nor `batch` rows.
        """
        if len(self) == batch:
            return self
        if len(self) != 1:
            raise SpecError(f"{len(self)} prompt rows for {batch} samples: give one row per sample, or one for all.")
        pooled = None if self.pooled is None else self.pooled.expand(batch, -1)
        _ = self.full  # known from here on, of the wider one too
        return self._carry(PromptEmbeds(self.embeds.expand(batch, -1, -1), self.mask.expand(batch, -1), pooled))

    def rows(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Each prompt's tokens without padding, [s, C] each, for networks that take a list of captions."""
        if "_lengths" not in self.__dict__:  # like `full`: one synchronisation per object
            object.__setattr__(self, "_lengths", self.mask.sum(1).tolist())
        embeds = self.embeds.to(dtype=dtype)
        return [row[:length] for row, length in zip(embeds, self.__dict__["_lengths"], strict=True)]

    def pad_to(self, length: int) -> PromptEmbeds:
        """Pad the token axis with zeros (mask False) to `length`; SpecError when it is longer already."""
        missing = length - self.embeds.shape[1]
        if missing < 0:
            raise SpecError(f"Cannot pad {self.embeds.shape[1]} tokens to {length}: prompts are never cropped here.")
        if missing == 0:
            return self
        return replace(
            self,
            embeds=torch.nn.functional.pad(self.embeds, (0, 0, 0, missing)),
            mask=torch.nn.functional.pad(self.mask, (0, missing)),
        )

    def trim(self) -> PromptEmbeds:
        """Drop the padding that all rows share (none of the tokens that count)."""
        longest = int(self.mask.sum(1).max())
        if longest == self.mask.shape[1]:
            return self
        return replace(self, embeds=self.embeds[:, :longest], mask=self.mask[:, :longest])

    @staticmethod
    def cat(parts: Sequence[PromptEmbeds]) -> PromptEmbeds:
        """Stack batches, padded to the longest. SpecError for no part, or pooled vectors in some parts only."""
        if not parts:
            raise SpecError("PromptEmbeds.cat([]) has nothing to join: give at least one PromptEmbeds.")
        with_pooled = [part.pooled is not None for part in parts]
        if any(with_pooled) != all(with_pooled):
            raise SpecError("Some parts have pooled vectors and some do not: join parts of one architecture only.")
        longest = max(part.embeds.shape[1] for part in parts)
        parts = [part.pad_to(longest) for part in parts]
        pooled = torch.cat([part.pooled for part in parts if part.pooled is not None]) if all(with_pooled) else None
        return PromptEmbeds(torch.cat([p.embeds for p in parts]), torch.cat([p.mask for p in parts]), pooled)


class PromptEncoder:
    """Turns prompts into `PromptEmbeds`, each prompt once.

    Every prompt is encoded alone, so that its embedding does not depend on which prompts came with it: a resumed run,
    another batch size and another replica get the same bits. Results are kept on the CPU, least recently used out
    first, so the text encoder can be unloaded between steps; a prompt not in the cache loads it again.

    Args:
        load: returns the loaded tokenizers and models, whatever `encode_one` needs.
        encode_one: (loaded, prompt, max_sequence_length) -> ([s, C], pooled [C'] or None).
        device: where the models are put and the embeddings returned.
        max_sequence_length: the architecture's default, in tokens.
        limit: the largest `max_sequence_length` that the architecture accepts.
        cache_bytes: memory that the cache may take; the prompts in use longest ago go first.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        encode_one: Callable[[Any, str, int], tuple[Tensor, Tensor | None]],
        device: torch.device | str = "cpu",
        *,
        max_sequence_length: int,
        limit: int,
        cache_bytes: int = 2 * 1024**3,
    ) -> None:
        self._load, self._encode_one = load, encode_one
        self._parts: Any = load()
        self.device = torch.device(device)
        self.max_sequence_length = max_sequence_length
        self.limit = limit
        self.cache_bytes = cache_bytes
        self._cached = 0
        self._cache: OrderedDict[tuple[str, int], tuple[Tensor, Tensor | None]] = OrderedDict()

    @property
    def loaded(self) -> bool:
        """Whether the text encoder is in memory."""
        return self._parts is not None

    @property
    def parts(self) -> Any:
        """The tokenizers and models, loaded again if they were unloaded."""
        if self._parts is None:
            self._parts = self._load()
        return self._parts

    def unload(self) -> None:
        """Free the text encoder. Cached prompts stay available."""
        self._parts = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def encode(self, prompts: Sequence[str], max_sequence_length: int | None = None) -> PromptEmbeds:
        """Embeddings of the prompts on `device`, padded to the longest of them.

        Raises:
            SpecError: no prompt, something that is not a string, or a limit that the architecture does not accept.
            PromptTooLongError: a prompt with more than `max_sequence_length` tokens (the message names it).
        """
        if isinstance(prompts, str) or not prompts:
            raise SpecError(f"encode() takes a non-empty list of prompts, not {prompts!r}: pass e.g. ['a red circle'].")
        length = self.max_sequence_length if max_sequence_length is None else max_sequence_length
        if not 0 < length <= self.limit:
            raise SpecError(f"max_sequence_length={length!r} is outside 1..{self.limit}, what this architecture takes.")
        rows = []
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise SpecError(f"A prompt must be a string, not {type(prompt).__name__}: {prompt!r}.")
            rows.append(self._lookup(prompt, length))
        longest = max(embeds.shape[0] for embeds, _ in rows)
        batch = rows[0][0].new_zeros(len(rows), longest, rows[0][0].shape[1])
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, (embeds, _) in enumerate(rows):
            batch[i, : embeds.shape[0]] = embeds
            mask[i, : embeds.shape[0]] = True
        pooled = [vector for _, vector in rows if vector is not None]
        return PromptEmbeds(batch, mask, torch.stack(pooled) if pooled else None).to(self.device)

    def _lookup(self, prompt: str, length: int) -> tuple[Tensor, Tensor | None]:
        key = (prompt, length)
        if key not in self._cache:
            with torch.no_grad():
                embeds, pooled = self._encode_one(self.parts, prompt, length)
            self._cache[key] = row = (embeds.cpu(), None if pooled is None else pooled.cpu())
            self._cached += _bytes(row)
            while self._cached > self.cache_bytes and len(self._cache) > 1:
                self._cached -= _bytes(self._cache.popitem(last=False)[1])
        self._cache.move_to_end(key)
        return self._cache[key]


def _bytes(row: tuple[Tensor, Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in row if tensor is not None)
