"""Prompt embeddings: the batch that every `velocity` takes, and the caching encoder that makes it.

Shapes: B samples, S text tokens, C channels. A mask is bool, True where a token counts, and left-aligned: the tokens
that count come first, padding after them.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .errors import SpecError


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

    @cached_property
    def full(self) -> bool:
        """True when no row has padding: then the stock pipelines pass no mask, which also picks a faster attention.

        Asked once per object, as `lengths` is: on a GPU the answer is a synchronisation.
        """
        return bool(self.mask.all())

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row that count."""
        return self.mask.sum(1).tolist()

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> PromptEmbeds:
        """Move, and cast the floating-point parts. Returns self when nothing changes."""
        embeds = self.embeds.to(device=device, dtype=dtype)
        mask = self.mask.to(device=device)
        pooled = None if self.pooled is None else self.pooled.to(device=device, dtype=dtype)
        if embeds is self.embeds and mask is self.mask and pooled is self.pooled:
            return self
        moved = replace(self, embeds=embeds, mask=mask, pooled=pooled)
        moved.__dict__["full"] = self.full
        return moved

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
        wide = PromptEmbeds(self.embeds.expand(batch, -1, -1), self.mask.expand(batch, -1), pooled)
        wide.__dict__["full"] = self.full
        return wide

    def rows(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Each prompt's tokens without padding, [s, C] each, for networks that take a list of captions."""
        embeds = self.embeds.to(dtype=dtype)
        return [row[:length] for row, length in zip(embeds, self.lengths, strict=True)]

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
        longest = max(self.lengths)
        if longest == self.mask.shape[1]:
            return self
        return replace(self, embeds=self.embeds[:, :longest], mask=self.mask[:, :longest])

    @staticmethod
    def cat(parts: Sequence[PromptEmbeds]) -> PromptEmbeds:
        """Stack batches, padded to the longest. SpecError for pooled vectors in some parts only."""
        vectors = [part.pooled for part in parts if part.pooled is not None]
        if len(vectors) not in (0, len(parts)):
            raise SpecError("Some parts have pooled vectors and some do not: join parts of one architecture only.")
        longest = max(part.embeds.shape[1] for part in parts)
        embeds, masks = zip(*((p.embeds, p.mask) for p in (part.pad_to(longest) for part in parts)), strict=True)
        joined = PromptEmbeds(torch.cat(embeds), torch.cat(masks), torch.cat(vectors) if vectors else None)
        lengths = [length for part in parts for length in part.lengths]
        joined.__dict__.update(lengths=lengths, full=min(lengths) == longest)
        return joined


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
        batch = pad_sequence([embeds for embeds, _ in rows], batch_first=True)
        mask = torch.arange(batch.shape[1]) < torch.tensor([[len(embeds)] for embeds, _ in rows])
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
