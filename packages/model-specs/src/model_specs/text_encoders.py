"""CLIP and T5, as SD3 and FLUX.1 use them.

CLIP reads 77 tokens at most; that is part of those architectures, whose T5 reads the whole prompt. A prompt that CLIP
cannot read to its end is logged with its token count; one that T5 cannot is an error.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


def clip_output(tokenizer: Any, model: Any, prompt: str) -> Any:
    """CLIP's output with hidden states for one prompt, padded to its 77 tokens."""
    limit = tokenizer.model_max_length
    count = len(tokenizer(prompt).input_ids)
    if count > limit:
        logger.warning("CLIP reads %d of the %d tokens of %r; the T5 encoder reads all of it.", limit, count, prompt)
    ids = tokenizer(prompt, padding="max_length", max_length=limit, truncation=True, return_tensors="pt").input_ids
    return model(ids.to(model.device), output_hidden_states=True)


def t5_hidden(tokenizer: Any, model: Any, prompt: str, length: int) -> Tensor:
    """T5's last hidden state [length, C] of one prompt. Padding is encoded and attended to, as in the stock pipelines."""
    ids = tokenizer(prompt, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
    return model(ids.to(model.device))[0][0]
