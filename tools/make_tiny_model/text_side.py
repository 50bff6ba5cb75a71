"""Tokenizer and text encoder of the tiny pipeline: the real classes, small, frozen, never trained.

A random transformer already tells captions apart; the image transformer learns to read it. What must be right is the
template: the Qwen-Image pipeline wraps each prompt in a fixed text and drops the first 34 embeddings, so the tokenizer must
turn the text before the prompt into exactly 34 tokens. A byte-pair encoding trained on the wrapped captions, with merges
inside words only, makes every word of the template one token, as the real tokenizer does.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from .shapes import CAPTIONS, caption

TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
DROPPED = 34  # tokens of the template before the prompt; the stock pipeline's constant
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# How Qwen2's tokenizer cuts text before merging: contractions, words with their space, digits, punctuation, blanks.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WIDTH = 64


def build_tokenizer() -> Any:
    """A `Qwen2Tokenizer` whose vocabulary is learned from the 144 wrapped captions."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    corpus = [TEMPLATE.format(caption(number)) for number in range(CAPTIONS)]
    for token in SPECIAL:
        corpus = [text.replace(token, "\n") for text in corpus]
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    learner.train_from_iterator(corpus, trainer)
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in learned["merges"]]
    make: Any = Qwen2Tokenizer  # its annotations do not know the merge tables that it takes
    tokenizer = make(  # transformers 5 takes the tables; file arguments would leave the vocabulary empty
        vocab=learned["vocab"],
        merges=merges,
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL),
    )
    length = len(tokenizer(TEMPLATE.split("{}")[0])["input_ids"])
    if length != DROPPED:
        raise RuntimeError(
            f"the template's prefix has {length} tokens, the pipeline drops {DROPPED}; mend SPLIT or TEMPLATE"
        )
    return tokenizer


def build_encoder(tokenizer: Any, seed: int) -> Any:
    """A random `Qwen2_5_VLForConditionalGeneration`: 2 layers, 64 wide; weights large enough to spread the captions."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "initializer_range": 0.3,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [0],
            "window_size": 28,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(config).eval().requires_grad_(False)


@torch.no_grad()
def encode_captions(tokenizer: Any, encoder: Any) -> Tensor:
    """Embeddings [144, S, 64] of all captions, as the stock pipeline computes them.

    Every caption must come out equally long, so that training needs no mask.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline

    pipeline: Any = QwenImagePipeline(FlowMatchEulerDiscreteScheduler(), None, encoder, tokenizer, None)
    embeds, mask = pipeline.encode_prompt([caption(number) for number in range(CAPTIONS)])
    if mask is not None and not bool(mask.bool().all()):
        raise RuntimeError("captions differ in length after tokenization; every caption word must be one token")
    return embeds
