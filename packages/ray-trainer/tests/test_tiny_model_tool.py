"""tools/make_tiny_model: the pieces do what they say, and the whole writes a folder that stock diffusers draws with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from image_rewards import RewardSample, load
from image_rewards.shapes import parse_target
from torch import nn

TOOLS = Path(__file__).resolve().parents[3] / "tools"
SHIPPED = Path(__file__).resolve().parents[1] / "src/ray_trainer/assets/tiny_qwen_image"


@pytest.fixture(scope="module", autouse=True)
def tool():
    torch.set_num_threads(1)
    sys.path.insert(0, str(TOOLS))
    yield
    sys.path.remove(str(TOOLS))


def test_captions_are_distinct_and_say_what_the_reward_reads():
    from make_tiny_model.shapes import CAPTIONS, attributes, caption, caption_id, metadata

    ids = torch.arange(CAPTIONS)
    assert torch.equal(caption_id(*attributes(ids)), ids)
    assert len({caption(number) for number in range(CAPTIONS)}) == 144
    for number in range(CAPTIONS):
        asked = parse_target(caption(number), {})
        assert (asked.count, asked.color, asked.shape, asked.background) == tuple(metadata(number).values())


def test_every_drawn_picture_is_strictly_right_and_clean():
    from make_tiny_model.shapes import CAPTIONS, caption, draw, metadata

    torch.manual_seed(0)
    pictures = ((draw(torch.arange(CAPTIONS)) + 1) * 127.5).round().byte().numpy()
    samples = [RewardSample(picture, caption(i), metadata(i)) for i, picture in enumerate(pictures)]
    results = load("shapes").score(samples)
    assert [r.components["strict"] for r in results] == [1.0] * 144
    assert np.mean([r.components["clean"] for r in results]) > 0.97


def test_half_of_the_noisy_captions_stay_right():
    from make_tiny_model.shapes import CAPTIONS, add_caption_noise

    torch.manual_seed(0)
    ids = torch.randint(0, CAPTIONS, (20_000,))
    expected = (1 - 0.25 * 3 / 4) * (1 - 0.25 * 5 / 6) * (1 - 0.25 * 2 / 3) * (1 - 0.1 / 2)
    assert (add_caption_noise(ids) == ids).float().mean().item() == pytest.approx(expected, abs=0.015)
    assert torch.equal(add_caption_noise(ids, (0, 0, 0, 0)), ids)


def test_packing_is_the_stock_pipelines():
    from diffusers import QwenImagePipeline
    from make_tiny_model.autoencoder import pack, unpack

    z = torch.randn(2, 16, 8, 8)
    torch.testing.assert_close(pack(z), QwenImagePipeline._pack_latents(z, 2, 16, 8, 8), rtol=0, atol=0)
    torch.testing.assert_close(unpack(pack(z)), z, rtol=0, atol=0)


def test_the_text_side_is_made_again_to_the_byte():
    from make_tiny_model.text_side import build_encoder, build_tokenizer, encode_captions
    from transformers import Qwen2Tokenizer

    tokenizer = build_tokenizer()
    assert tokenizer.get_vocab() == Qwen2Tokenizer.from_pretrained(SHIPPED / "tokenizer").get_vocab()
    embeds = encode_captions(tokenizer, build_encoder(tokenizer, seed=0))
    assert embeds.shape[0] == 144
    assert embeds.shape[2] == 64
    assert len(torch.unique(embeds.flatten(1), dim=0)) == 144


def test_the_loop_minimises_and_calls_back_once():
    from make_tiny_model.loop import Recipe, reached, train

    used, unused = nn.Parameter(torch.tensor([5.0])), nn.Parameter(torch.ones(1))

    def losses():
        return torch.stack([(used - 2).square().sum(), used.abs().sum()])

    parameters = reached([used, unused], losses)
    assert len(parameters) == 1
    assert parameters[0] is used
    calls = []
    recipe = Recipe(0.1, (0.9, 0.99), 0.0, 5)
    log = train(
        "test", parameters, losses, recipe, 1.0, lambda: calls.append("step"), {0.5: lambda: calls.append("half")}
    )
    assert used.item() == pytest.approx(2.0, abs=0.2)
    assert log.steps == calls.count("step") > 50
    assert calls.count("half") == 1
    assert log.graphed is False


def test_a_new_transformer_predicts_zero_and_a_new_autoencoder_takes_one_frame():
    from make_tiny_model import autoencoder, transformer

    model = transformer.build().eval()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(2.48e6, rel=0.01)
    with torch.no_grad():
        v = transformer.velocity(model, torch.randn(2, 16, 64), torch.tensor([0.3, 1.0]), torch.randn(2, 20, 64))
    assert v.shape == (2, 16, 64)
    assert v.abs().max().item() == 0
    vae = autoencoder.build().eval()
    with torch.no_grad():
        assert autoencoder.decode(vae, autoencoder.encode(vae, torch.zeros(1, 3, 64, 64))).shape == (1, 3, 64, 64)


def test_the_command_makes_a_folder_that_stock_diffusers_draws_with(tmp_path, monkeypatch, capsys):
    from diffusers import QwenImagePipeline
    from make_tiny_model import cli

    monkeypatch.setitem(cli.SIZES, "cpu", cli.Sizes(16, 2, 16, 4, 8, 4))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "one red circle on a white background"}\n{"prompt": "two blue squares on a black background"}\n'
    )
    folder, log = tmp_path / "tiny", tmp_path / "log.json"
    status = cli.main(
        f"--out {folder} --seconds-vae 1 --seconds-transformer 1 --device cpu "
        f"--prompts {prompts} --seeds 2 --steps 2 --log {log}".split()
    )
    assert status == 0
    out = capsys.readouterr().out
    assert "2 prompts × 2 seeds, 2 steps" in out
    for name in ("strict", "count", "color", "shape", "background", "clean"):
        assert f"{name} " in out.splitlines()[-1]
    record = json.loads(log.read_text())
    assert record["transformer"]["steps"] > 0
    assert record["megabytes"] <= 10
    assert 0 <= record["accuracy"]["strict"]["mean"] <= 1

    pipeline = QwenImagePipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    stored = json.loads((folder / "scheduler/scheduler_config.json").read_text())
    assert (stored["shift"], stored["use_dynamic_shifting"]) == (3.0, False)
    assert len(set(pipeline.vae.config.latents_std)) > 1  # measured, not the placeholder
    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline(
        "one red circle on a white background", height=64, width=64, num_inference_steps=2, true_cfg_scale=1.0
    )
    assert picture.images[0].size == (64, 64)


def test_an_unknown_prompt_is_named(tmp_path):
    from make_tiny_model.cli import _captions

    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a cat"}\n')
    with pytest.raises(SystemExit, match="'a cat' is not one of the 144 captions"):
        _captions(path)
