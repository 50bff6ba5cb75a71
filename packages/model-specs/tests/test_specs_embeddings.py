"""Prompt batches and the caching encoder."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_specs import PromptEmbeds, PromptEncoder, PromptTooLongError, SpecError


def batch(*lengths: int, width: int = 3, pooled: bool = False) -> PromptEmbeds:
    longest = max(lengths)
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    embeds = torch.randn(len(lengths), longest, width) * mask[..., None]
    return PromptEmbeds(embeds, mask, torch.randn(len(lengths), 2) if pooled else None)


class Counting(PromptEncoder):
    """Embeds a prompt as its character codes and counts how often it is asked."""

    def __init__(self, **options: Any) -> None:
        self.loads, self.calls = 0, 0

        def load() -> object:
            self.loads += 1
            return object()

        super().__init__(load, self.embed, max_sequence_length=8, limit=16, **options)

    def embed(self, parts: object, prompt: str, max_sequence_length: int) -> tuple[torch.Tensor, None]:
        assert parts is not None
        self.calls += 1
        return torch.tensor([[float(ord(letter))] for letter in prompt]), None


def test_cat_pads_to_the_longest() -> None:
    one, two = batch(2, 3, pooled=True), batch(5, pooled=True)
    both = PromptEmbeds.cat([one, two])
    assert both.lengths == [2, 3, 5]
    assert both.embeds.shape == (3, 5, 3)
    assert both.mask.sum(1).tolist() == [2, 3, 5]
    assert both.pooled is not None
    assert two.pooled is not None
    assert torch.equal(both.pooled[2], two.pooled[0])
    assert torch.equal(both.embeds[:2, :3], one.embeds)
    assert (both.full, two.full) == (False, True)
    with pytest.raises(SpecError, match="have pooled vectors and some do not"):
        PromptEmbeds.cat([one, batch(2)])


def test_pad_trim_expand_rows() -> None:
    prompts = batch(4, 2)
    assert prompts.pad_to(4) is prompts
    assert prompts.pad_to(9).mask.sum(1).tolist() == [4, 2]
    assert torch.equal(prompts.pad_to(9).trim().embeds, prompts.embeds)
    assert [row.shape[0] for row in prompts.pad_to(9).rows()] == [4, 2]
    with pytest.raises(SpecError, match="never cropped"):
        prompts.pad_to(3)
    assert batch(4).expand(5).embeds.shape == (5, 4, 3)
    with pytest.raises(SpecError, match="2 prompt rows for 3 samples"):
        prompts.expand(3)


def test_shapes_and_masks_are_checked() -> None:
    with pytest.raises(SpecError, match="do not fit together"):
        PromptEmbeds(torch.zeros(2, 3, 4), torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(SpecError, match=r"mask\.bool\(\)"):
        PromptEmbeds(torch.zeros(2, 3, 4), torch.ones(2, 3))
    with pytest.raises(SpecError, match="pooled"):
        PromptEmbeds(torch.zeros(2, 3, 4), torch.ones(2, 3, dtype=torch.bool), torch.zeros(3, 4))


def test_to_keeps_identity_when_nothing_changes() -> None:
    prompts = batch(2, pooled=True)
    assert prompts.to("cpu", torch.float32) is prompts
    half = prompts.to(dtype=torch.bfloat16)
    assert half.embeds.dtype == torch.bfloat16
    assert half.mask.dtype == torch.bool


def test_encoder_encodes_each_prompt_once_and_unloads() -> None:
    encoder = Counting()
    prompts = encoder.encode(["ab", "cde", "ab"])
    assert encoder.calls == 2
    assert prompts.mask.sum(1).tolist() == [2, 3, 2]
    assert torch.equal(prompts.embeds[0], prompts.embeds[2])
    encoder.unload()
    assert not encoder.loaded
    assert torch.equal(encoder.encode(["cde", "ab"]).embeds, prompts.embeds[[1, 0]])
    assert (encoder.loads, encoder.loaded) == (1, False)  # all from the cache
    encoder.encode(["new"])
    assert (encoder.loads, encoder.loaded) == (2, True)
    encoder.encode(["ab"], max_sequence_length=4)
    assert encoder.calls == 4  # another length is another entry


def test_cache_forgets_the_prompt_unused_longest() -> None:
    encoder = Counting(cache_bytes=4 * 4)  # four characters in fp32
    encoder.encode(["ab", "cd"])
    encoder.encode(["ab"])
    encoder.encode(["ef"])
    assert encoder.calls == 3
    encoder.encode(["ab"])
    assert encoder.calls == 3
    encoder.encode(["cd"])
    assert encoder.calls == 4


def test_encoder_refuses_bad_input() -> None:
    encoder = Counting()
    for wrong in ([], "a red circle"):
        with pytest.raises(SpecError, match="non-empty list"):
            encoder.encode(wrong)
    with pytest.raises(SpecError, match="must be a string"):
        encoder.encode([3])  # type: ignore[list-item]
    with pytest.raises(SpecError, match=r"1\.\.16"):
        encoder.encode(["a"], 17)


@pytest.mark.parametrize("name", ["qwen_image", "sd3", "flux", "z_image", "wan"])
def test_long_prompts_are_an_error_never_cropped(load: Callable[[str], Any], name: str) -> None:
    encoder = load(name).encoder
    prompt = "a red circle " * 8
    with pytest.raises(PromptTooLongError, match=r"has [0-9]+ tokens") as caught:
        encoder.encode(["a cat", prompt], max_sequence_length=12)
    assert repr(prompt) in str(caught.value)
    assert "max_sequence_length is 12" in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, ValueError)
    assert str(again) == str(caught.value)


def test_clip_says_what_it_cannot_read(load: Callable[[str], Any], caplog: pytest.LogCaptureFixture) -> None:
    prompt = "purple triangles " * 8  # more than 77 letters, few words
    with caplog.at_level(logging.WARNING, logger="model_specs"):
        load("flux").encoder.encode([prompt], 64)
    assert "CLIP reads 77 of the 122 tokens" in caplog.text
    assert repr(prompt) in caplog.text


@pytest.mark.parametrize("name", ["qwen_image", "z_image"])
def test_embedding_does_not_depend_on_the_batch(load: Callable[[str], Any], name: str) -> None:
    encoder = load(name).encoder
    prompt = "two blue squares"
    encoder._cache.clear()
    alone = encoder.encode([prompt])
    encoder._cache.clear()
    among = encoder.encode(["a cat and a dog in the background", prompt])
    assert torch.equal(alone.embeds[0], among.rows()[1])
    assert alone.full


def test_sd3_without_t5(load: Callable[[str], Any], tmp_path: Any) -> None:
    """Stock puts zeros where T5 would be; then CLIP is the only reader and a prompt must fit it."""
    from model_specs import get_spec_for

    loaded = load("sd3")
    pipeline = loaded.pipeline
    t5 = pipeline.text_encoder_3, pipeline.tokenizer_3
    pipeline.register_modules(text_encoder_3=None, tokenizer_3=None)
    try:
        expected = pipeline.encode_prompt(["a cat"], None, None, do_classifier_free_guidance=False)
        pipeline.save_pretrained(tmp_path)
    finally:
        pipeline.register_modules(text_encoder_3=t5[0], tokenizer_3=t5[1])
    encoder = get_spec_for(tmp_path).load_encoder(tmp_path)
    ours = encoder.encode(["a cat"])
    torch.testing.assert_close(ours.embeds, expected[0])
    torch.testing.assert_close(ours.pooled, expected[2])
    with pytest.raises(PromptTooLongError, match="CLIP"):
        encoder.encode(["purple triangles " * 8])
    with pytest.raises(PromptTooLongError, match="CLIP"):
        get_spec_for(tmp_path).prompt_check(tmp_path)("purple triangles " * 8, 256)


@pytest.mark.parametrize("name", ["qwen_image", "sd3", "z_image", "wan", "flux"])
def test_lengths_are_checked_without_weights_as_the_encoder_does(name, tiny_folder):
    from model_specs import get_spec_for

    folder = tiny_folder(name)
    spec = get_spec_for(folder)
    check, encoder = spec.prompt_check(folder), spec.load_encoder(folder)
    for count in (1, 12, 17, 18, 19, 20, 24):
        prompt, answers = " ".join(["red"] * count), []
        for ask in (check, lambda prompt, length: encoder.encode([prompt], length)):
            try:
                ask(prompt, 20)
                answers.append("")
            except PromptTooLongError as error:
                answers.append(str(error))
        assert answers[0] == answers[1], prompt
    with pytest.raises(PromptTooLongError):
        check("red " * 60, 20)
