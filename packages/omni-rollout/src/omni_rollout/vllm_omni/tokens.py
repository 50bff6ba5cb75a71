"""Text and tokens on the server's side: token ids back to text, and prompts that are too long refused before the engine.

The engine crops some prompts in silence and fails the whole batch for others; here a prompt is refused alone, by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import RolloutConfigError
from .pipelines import PipelineEntry


class Prompts:
    """Tokenizers of one pipeline folder, loaded when they are first needed.

    Args:
        path: diffusers pipeline folder.
        entry: says which tokenizer counts, and what it adds.
    """

    def __init__(self, path: str, entry: PipelineEntry) -> None:
        self.path, self.entry = path, entry
        self._tokenizers: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def _tokenizer(self, part: str) -> Any:
        if part not in self._tokenizers:
            from transformers import AutoTokenizer

            self._tokenizers[part] = AutoTokenizer.from_pretrained(self.path, subfolder=part)
        return self._tokenizers[part]

    def check(self, prompt: str, limit: int) -> None:
        """Raise `RolloutConfigError` for a prompt of more than `limit` tokens."""
        if prompt not in self._counts:
            tokenizer, text = self._tokenizer(self.entry.counted_by), prompt
            if self.entry.chat:
                text = tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}],
                    tokenize=False,
                    add_generation_prompt=True,
                    enable_thinking=True,
                )
            self._counts[prompt] = len(tokenizer(text).input_ids) + self.entry.extra_tokens
        if self._counts[prompt] > limit:
            raise RolloutConfigError(
                f"the prompt {prompt!r} has {self._counts[prompt]} tokens, max_sequence_length is {limit}: shorten it or "
                "raise the limit (prompts are never cropped here)."
            )

    def text(self, ids: Sequence[int]) -> str:
        """The prompt behind token ids. Pipelines have several tokenizers, so text is what they share.

        Raises `RolloutConfigError` when the ids are not what the text would be encoded to.
        """
        tokenizer = self._tokenizer("tokenizer")
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        again = tokenizer(text, add_special_tokens=False).input_ids
        special = set(tokenizer.all_special_ids)
        if again != [token for token in ids if token not in special]:
            raise RolloutConfigError(f"prompt_ids {list(ids)!r} are no encoding of a text ({text!r} gives {again!r}).")
        return text
