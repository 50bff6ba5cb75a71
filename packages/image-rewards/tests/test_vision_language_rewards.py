"""`unified_reward` and `hps_v3` on a tiny random Qwen2-VL that the test saves."""

from __future__ import annotations

import numpy as np
import pytest
from image_rewards import RewardConfigError, RewardError, RewardSample, RewardTargetError, load
from image_rewards.vision_language import current_name, parse_final_score

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ c.text }}{% endif %}{% endfor %}"
    " <|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("qwen2vl")
    plain = "user assistant rate this picture of a red cat blue dog Final Score : 1 2 3 4 5"
    words = ["<unk>", *SPECIAL, *plain.split()]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=SPECIAL,
    )
    fast.chat_template = TEMPLATE
    images = transformers.Qwen2VLImageProcessor(patch_size=4, merge_size=2, min_pixels=64, max_pixels=1024)
    videos = transformers.Qwen2VLVideoProcessor(patch_size=4, merge_size=2)
    transformers.Qwen2VLProcessor(images, fast, videos, chat_template=TEMPLATE).save_pretrained(path)
    ids = {w: i for i, w in enumerate(words)}
    config = transformers.Qwen2VLConfig(
        text_config={
            "vocab_size": len(words),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
        },
        vision_config={"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 2},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    for p in model.parameters():
        if p.ndim > 1:
            p.data.normal_(0, 0.2)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    prompts = ["a red cat", "a blue dog", "red"]
    return [RewardSample(rng.integers(0, 256, (3, 16, 24), dtype=np.uint8), prompts[i % 3]) for i in range(4)]


def test_unified_reward_generates_and_random_words_are_no_score(folder, samples, monkeypatch):
    reward = load("unified_reward", path=str(folder), dtype="float32", max_new_tokens=6)
    for result in reward.score(samples[:2]):
        assert "no 'Final Score: N'" in str(result.error)
        assert np.isnan(result.score)
    answers = iter(["good. Final Score: 4", "Final Score: 2.5 or so"])
    monkeypatch.setattr(type(reward._processor), "batch_decode", lambda *_, **__: [next(answers)])
    assert [r.score for r in reward.score(samples[:2])] == [4.0, 2.5]


def test_final_scores():
    assert parse_final_score("Final Score: 3") == 3
    assert parse_final_score("**Final Score:** 4.5/5") == 4.5
    assert parse_final_score("final score: 1, no: Final Score: 2") == 2
    for answer in ("", "Score: 3", "Final Score: 9", "Final Score: none"):
        with pytest.raises(RewardError):
            parse_final_score(answer)


def save_hps_v3(folder, path):
    """The released layout: names of before the language model had a name of its own, one embedding more, and a head."""
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(folder)
    torch.manual_seed(3)
    state = {}
    for key, value in model.state_dict().items():
        if key != "lm_head.weight":
            state[key.replace("model.visual.", "visual.").replace("model.language_model.", "model.")] = value.clone()
    words = state["model.embed_tokens.weight"]
    state["model.embed_tokens.weight"] = torch.cat([words, torch.randn(1, 32)])
    for i, (wide, narrow) in {0: (32, 1024), 3: (1024, 16), 5: (16, 2)}.items():
        state[f"rm_head.{i}.weight"], state[f"rm_head.{i}.bias"] = (
            torch.randn(narrow, wide) / wide**0.5,
            torch.randn(narrow),
        )
    from safetensors.torch import save_file

    save_file(state, path)
    return state


def test_hps_v3_reads_the_special_token(folder, samples, tmp_path):
    state = save_hps_v3(folder, tmp_path / "HPSv3.safetensors")
    (tmp_path / "instruction.txt").write_text("rate this picture of {prompt}")
    options = {"path": str(folder), "checkpoint": str(tmp_path / "HPSv3.safetensors"), "dtype": "float32"}
    reward = load("hps_v3", template=str(tmp_path / "instruction.txt"), **options)
    results = reward.score(samples)
    assert all(r.error is None for r in results)
    assert len({r.score for r in results}) == 4
    assert reward.score(samples[::-1]) == results[::-1]

    # By hand, through the model with its own names.
    inputs = reward.processed(samples[0], suffix="<|Reward|>")
    assert inputs["input_ids"][0].tolist().count(len(state["model.embed_tokens.weight"]) - 1) == 1
    hidden = reward._model(**inputs).last_hidden_state[0]
    place = inputs["input_ids"][0].tolist().index(len(state["model.embed_tokens.weight"]) - 1)
    x = hidden[place]
    for i in (0, 3, 5):
        x = torch.nn.functional.linear(x, state[f"rm_head.{i}.weight"], state[f"rm_head.{i}.bias"])
        x = x.relu() if i < 5 else x
    assert results[0].score == pytest.approx(x[0].item(), rel=1e-5)
    assert results[0].components["sigma"] == pytest.approx(x[1].item(), rel=1e-5)

    with pytest.raises(RewardConfigError, match="template=FILE"):
        load("hps_v3", **options)
    short = options | {"checkpoint": shrink(tmp_path, state), "template": str(tmp_path / "instruction.txt")}
    with pytest.raises(RewardConfigError, match="another token"):
        load("hps_v3", **short).prepare()
    assert "control token" in str(reward(RewardSample(samples[0].image, "a <|image_pad|>")).error)
    with pytest.raises(RewardTargetError, match="no prompt"):
        reward.check_target("", {})


def shrink(tmp_path, state):
    from safetensors.torch import save_file

    state = {k: v.clone() for k, v in state.items()}
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"][:-1].clone()
    save_file(state, tmp_path / "short.safetensors")
    return str(tmp_path / "short.safetensors")


def test_templates_are_checked(folder, tmp_path):
    (tmp_path / "t.txt").write_text("rate it")
    with pytest.raises(RewardConfigError, match="does not contain"):
        load("unified_reward", path=str(folder), template=str(tmp_path / "t.txt"))
    with pytest.raises(RewardConfigError, match="is no file"):
        load("unified_reward", path=str(folder), template="none.txt")


def test_names_of_both_times():
    assert (
        current_name("model.layers.0.x")
        == current_name("model.language_model.layers.0.x")
        == "language_model.layers.0.x"
    )
    assert current_name("visual.blocks.0.x") == current_name("model.visual.blocks.0.x") == "visual.blocks.0.x"
