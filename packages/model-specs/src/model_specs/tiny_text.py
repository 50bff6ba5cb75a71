"""Tokenizers and text encoders for `model_specs.tiny`: real classes, made in code, offline, a few thousand weights."""

from __future__ import annotations

import json
import string
from typing import Any

import transformers

# Words that get tokens of their own; all else falls back to characters or bytes.
WORDS = (
    "a", "an", "the", "of", "on", "in", "and", "with", "one", "two", "three", "four", "red", "green", "blue", "yellow",
    "white", "black", "purple", "orange", "circle", "circles", "square", "squares", "triangle", "triangles",
    "background", "photo", "picture", "cat", "dog", "small", "large", "left", "right", "above", "below",
)  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)  # fmt: skip


def qwen_tokenizer(corpus: list[str]) -> Any:
    """A byte-level BPE in which every word of the corpus is one token, as a `Qwen2Tokenizer` with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    # The tokenizer's own way of splitting text, so that the merges learned here are the ones that apply later.
    splitter = json.loads(transformers.Qwen2Tokenizer().backend_tokenizer.to_str())["pre_tokenizer"]
    blank = Tokenizer(models.BPE())
    blank.pre_tokenizer = pre_tokenizers.Sequence([])
    blank = Tokenizer.from_str(json.dumps({**json.loads(blank.to_str()), "pre_tokenizer": splitter}))
    trainer = trainers.BpeTrainer(
        vocab_size=5000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    plain = [text for line in corpus for text in _without_special(line)]
    blank.train_from_iterator([*plain, *(f" {word}" for word in WORDS)], trainer)
    model = json.loads(blank.to_str())["model"]
    merges: Any = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=merges,
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _without_special(text: str) -> list[str]:
    for token in SPECIAL:
        text = text.replace(token, "\0")
    return [part for part in text.replace("{}", "").split("\0") if part]


def qwen2_5_vl(tokenizer: Any, width: int) -> Any:
    """The text encoder of Qwen-Image: `Qwen2_5_VLForConditionalGeneration`, 2 layers."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1280,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "initializer_range": 0.3,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": width,
            "fullatt_block_indexes": [0],
            "window_size": 28,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen3(tokenizer: Any, width: int) -> Any:
    """The text encoder of Z-Image: `Qwen3Model`, 3 layers."""
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    return transformers.Qwen3Model(config).eval()


def clip_tokenizer() -> Any:
    """A `CLIPTokenizer` that spells every word."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def clip_encoder(tokenizer: Any, width: int, *, projection: bool) -> Any:
    """`CLIPTextModelWithProjection` (SD3) or `CLIPTextModel` (FLUX.1), 3 layers."""
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=4,
        projection_dim=width,
        max_position_embeddings=77,
        hidden_act="gelu",
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    kind: Any = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return kind(config).eval()


def t5_tokenizer() -> Any:
    """A `T5Tokenizer` with the words above and single characters."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    vocab += [(f"▁{word}", -1.0) for word in WORDS if len(word) > 1]
    vocab += [(letter, -4.0) for letter in string.ascii_letters + string.digits + string.punctuation]
    return transformers.T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


def t5_encoder(tokenizer: Any, width: int, *, umt5: bool = False) -> Any:
    """`T5EncoderModel` (SD3, FLUX.1) or `UMT5EncoderModel` (Wan), 2 layers."""
    family = "UMT5" if umt5 else "T5"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )
    return getattr(transformers, f"{family}EncoderModel")(config).eval()
