"""Rewards with networks, on tiny random models of the same architectures that the tests save."""

from __future__ import annotations

import json
import pickle
import shutil

import numpy as np
import pytest
from image_rewards import RewardConfigError, RewardSample, RewardTargetError, load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WORDS = "a red blue green cat dog circle photo of on white the".split()  # noqa: SIM905


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save_tokenizer(folder, max_length=12):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {w: i for i, w in enumerate(["<pad>", "<unk>", *WORDS, "<bos>", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<bos>", vocabulary["<bos>"]), ("<eos>", vocabulary["<eos>"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=ends)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=max_length,
    )
    fast.save_pretrained(folder)
    return vocabulary


def clip_config(vocabulary):
    text = {"vocab_size": len(vocabulary), "max_position_embeddings": 12, "eos_token_id": vocabulary["<eos>"]}
    text |= {"bos_token_id": vocabulary["<bos>"], "pad_token_id": 0}
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"image_size": 32, "patch_size": 8, **size}
    return transformers.CLIPConfig(projection_dim=24, text_config={**text, **size}, vision_config=vision)


def save_clip(folder):
    torch.manual_seed(0)
    model = transformers.CLIPModel(clip_config(save_tokenizer(folder)))
    for p in model.parameters():  # larger than the usual start, so that scores differ clearly
        if p.ndim > 1:
            p.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(
        folder
    )
    return model


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    save_clip(folder)
    return str(folder)


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    prompts = ["a red cat", "the blue dog", "a circle on white", "green", " ".join(WORDS * 3)]
    sizes = [(32, 32), (40, 64), (1, 1), (33, 20), (64, 64)]
    return [
        RewardSample(rng.integers(0, 256, (3, *sizes[i % 5]), dtype=np.uint8), prompts[i % 5], uid=str(i))
        for i in range(11)
    ]


def check_contract(reward, samples, expected_components):
    """The same score alone, in any batch and order; finite; told apart; blank prompts refused where prompts count."""
    together = reward.score(samples)
    assert all(r.error is None for r in together), together
    assert all(set(r.components) == expected_components for r in together)
    order = np.random.default_rng(1).permutation(len(samples))
    assert reward.score([samples[i] for i in order]) == [together[i] for i in order]
    assert [reward(s) for s in samples[:3]] == together[:3]
    assert len({r.score for r in together}) == len(samples)
    return together


def test_clip_score_is_the_cosine_that_transformers_gives(clip, samples):
    results = check_contract(load("clip_score", path=clip), samples, {"cosine", "truncated"})
    model = transformers.CLIPModel.from_pretrained(clip).eval()
    images = transformers.AutoImageProcessor.from_pretrained(clip)
    tokens = transformers.AutoTokenizer.from_pretrained(clip)
    for sample, result in list(zip(samples, results, strict=True))[:2]:
        from PIL import Image

        pixels = images(Image.fromarray(sample.image.transpose(1, 2, 0)), return_tensors="pt")
        with torch.no_grad():
            out = model(**pixels, **tokens(sample.prompt, return_tensors="pt", return_token_type_ids=False))
        expected = torch.cosine_similarity(out.image_embeds, out.text_embeds).item()
        assert result.score == pytest.approx(expected, abs=1e-5)
    assert [r.components["truncated"] for r in results[:5]] == [0, 0, 0, 0, 1]


def test_pickscore_scales_the_cosine(clip, samples):
    results = check_contract(load("pickscore", path=clip), samples, {"cosine", "truncated"})
    scale = transformers.CLIPModel.from_pretrained(clip).logit_scale.exp().item()
    assert results[0].score == pytest.approx(scale * results[0].components["cosine"])


def test_siglip(tmp_path, samples):
    vocabulary = save_tokenizer(tmp_path)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": len(vocabulary), "max_position_embeddings": 12, **size}
    torch.manual_seed(0)
    model = transformers.SiglipModel(
        transformers.SiglipConfig(text_config=text, vision_config={"image_size": 32, "patch_size": 8, **size})
    )
    for p in model.parameters():
        if p.ndim > 1:
            p.data.normal_(0, 0.2)
    model.save_pretrained(tmp_path)
    transformers.SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    results = check_contract(load("siglip", path=str(tmp_path)), samples, {"cosine", "logit", "truncated"})
    assert all(0 < r.score < 1 for r in results)


def test_aesthetic_reads_no_prompt(clip, tmp_path, samples):
    from image_rewards.clip import mlp_head

    torch.manual_seed(1)
    head = mlp_head(24)
    state = {f"layers.{k}": v * 3 for k, v in head.state_dict().items()}
    torch.save(state, tmp_path / "head.pth")
    reward = load("aesthetic", path=clip, head=str(tmp_path / "head.pth"))
    results = check_contract(reward, samples, {"aesthetic"})
    again = reward.score([RewardSample(s.image, "another prompt") for s in samples])
    assert results == again
    torch.save({"layers.0.weight": torch.zeros(1024, 768)}, tmp_path / "wide.pth")
    with pytest.raises(RewardConfigError, match="embeddings of 768"):
        load("aesthetic", path=clip, head=str(tmp_path / "wide.pth")).prepare()


def copy_settings(source, folder):
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(f"{source}/{name}", folder)


def to_open_clip(state):
    """The inverse of the name map, written the other way round: from what open_clip's modules are called."""
    out = {}
    for tower, prefix in (("vision_model", "visual."), ("text_model", "")):
        for i in range(2):
            source, target = f"{tower}.encoder.layers.{i}.", f"{prefix}transformer.resblocks.{i}."
            for kind in ("weight", "bias"):
                parts = [state[f"{source}self_attn.{p}_proj.{kind}"] for p in "qkv"]
                out[f"{target}attn.in_proj_{kind}"] = torch.cat(parts)
                out[f"{target}attn.out_proj.{kind}"] = state[f"{source}self_attn.out_proj.{kind}"]
                out[f"{target}ln_1.{kind}"] = state[f"{source}layer_norm1.{kind}"]
                out[f"{target}ln_2.{kind}"] = state[f"{source}layer_norm2.{kind}"]
                out[f"{target}mlp.c_fc.{kind}"] = state[f"{source}mlp.fc1.{kind}"]
                out[f"{target}mlp.c_proj.{kind}"] = state[f"{source}mlp.fc2.{kind}"]
    for kind in ("weight", "bias"):
        out[f"visual.ln_pre.{kind}"] = state[f"vision_model.pre_layrnorm.{kind}"]
        out[f"visual.ln_post.{kind}"] = state[f"vision_model.post_layernorm.{kind}"]
        out[f"ln_final.{kind}"] = state[f"text_model.final_layer_norm.{kind}"]
    out["visual.class_embedding"] = state["vision_model.embeddings.class_embedding"]
    out["visual.positional_embedding"] = state["vision_model.embeddings.position_embedding.weight"]
    out["visual.conv1.weight"] = state["vision_model.embeddings.patch_embedding.weight"]
    out["token_embedding.weight"] = state["text_model.embeddings.token_embedding.weight"]
    out["positional_embedding"] = state["text_model.embeddings.position_embedding.weight"]
    out["visual.proj"] = state["visual_projection.weight"].T.contiguous()
    out["text_projection"] = state["text_projection.weight"].T.contiguous()
    out["logit_scale"] = state["logit_scale"]
    out["attn_mask"] = torch.zeros(12, 12)
    return out


def test_hps_from_open_clips_checkpoint_equals_the_converted_one(clip, tmp_path, samples):
    state = transformers.CLIPModel.from_pretrained(clip).state_dict()
    file = tmp_path / "HPS_v2.1_compressed.pt"
    torch.save({"state_dict": to_open_clip(state)}, file)
    folder = tmp_path / "settings"
    save_tokenizer(folder)
    copy_settings(clip, folder)
    released = check_contract(load("hps", path=str(folder), checkpoint=str(file)), samples, {"cosine", "truncated"})
    assert released == load("hps", path=clip).score(samples) == load("clip_score", path=clip).score(samples)
    broken = to_open_clip(state)
    broken["visual.extra"] = torch.zeros(1)
    del broken["ln_final.weight"]
    torch.save(broken, file)
    with pytest.raises(RewardConfigError, match="1 weights absent, 1 unknown"):
        load("hps", path=str(folder), checkpoint=str(file)).prepare()


def test_image_reward_from_the_released_names(tmp_path, samples):
    from image_rewards.blip import MEAN, STD
    from image_rewards.clip import mlp_head
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    vocabulary = save_tokenizer(tmp_path / "bert", max_length=64)
    size = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BlipConfig(
        vision_config={"hidden_size": 40, "image_size": 32, "patch_size": 8, **size},
        text_config={"hidden_size": 32, "encoder_hidden_size": 40, "vocab_size": len(vocabulary), **size},
    )
    torch.manual_seed(0)
    vision = transformers.BlipVisionModel(config.vision_config).eval()
    text = BlipTextModel(config.text_config, add_pooling_layer=False).eval()
    head = mlp_head(32).eval()
    for module in (vision, text, head):
        for p in module.parameters():
            if p.ndim > 1:
                p.data.normal_(0, 0.2)
    table = {}
    for key, tensor in vision.state_dict().items():
        for new, old in (
            ("embeddings.class_embedding", "cls_token"),
            ("embeddings.position_embedding", "pos_embed"),
            ("embeddings.patch_embedding", "patch_embed.proj"),
            ("post_layernorm", "norm"),
            ("encoder.layers", "blocks"),
            ("layer_norm", "norm"),
            ("self_attn.projection", "attn.proj"),
            ("self_attn.qkv", "attn.qkv"),
        ):
            key = key.replace(new, old)
        table[f"blip.visual_encoder.{key}"] = tensor
    table |= {f"blip.text_encoder.{k}": v for k, v in text.state_dict().items()}
    table |= {f"mlp.layers.{k}": v for k, v in head.state_dict().items()}
    table["blip.vision_proj.weight"] = torch.zeros(1)
    torch.save(table, tmp_path / "ImageReward.pt")
    config.save_pretrained(tmp_path)
    options = {
        "checkpoint": str(tmp_path / "ImageReward.pt"),
        "tokenizer": str(tmp_path / "bert"),
        "config": str(tmp_path),
    }
    results = check_contract(load("image_reward", **options), samples, {"image_reward", "raw"})
    assert results[0].score == pytest.approx((results[0].components["raw"] - MEAN) / STD)

    # The first sample by hand: 32 x 32 needs no resizing.
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    pixels = ((torch.tensor(samples[0].image) / 255 - mean[:, None, None]) / std[:, None, None])[None]
    ids = torch.tensor(
        [[vocabulary["<bos>"], *(vocabulary[w] for w in samples[0].prompt.split()), vocabulary["<eos>"]]]
    )
    with torch.no_grad():
        seen = vision(pixel_values=pixels).last_hidden_state
        read = text(input_ids=ids, encoder_hidden_states=seen).last_hidden_state[:, 0]
        expected = head(read).item()
    assert results[0].components["raw"] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(RewardTargetError, match="no prompt"):
        load("image_reward", **options).check_target(" ", {})


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    folder = tmp_path_factory.mktemp("yolos")
    torch.manual_seed(0)
    config = transformers.YolosConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=[32, 32],
        patch_size=8,
        num_detection_tokens=6,
        id2label={0: "cat", 1: "dog"},
    )
    model = transformers.YolosForObjectDetection(config)
    for p in model.parameters():
        if p.ndim > 1:
            p.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    size = {"shortest_edge": 32, "longest_edge": 32}
    transformers.YolosImageProcessor(size=size, do_pad=False).save_pretrained(folder)
    return str(folder)


def test_geneval_runs_a_detector_and_a_clip(detector, clip):
    rng = np.random.default_rng(0)
    asked = {"include": [{"class": "cat", "count": 1, "color": "red"}, {"class": "dog", "position": ["left of", 0]}]}
    samples = [RewardSample(rng.integers(0, 256, (3, 40, 48), dtype=np.uint8), "", asked) for _ in range(5)]
    reward = load("geneval", detector=detector, clip=clip, threshold=0.0)
    results = reward.score(samples)
    assert all(r.error is None for r in results)
    assert all(r.components["objects"] >= 1 for r in results)
    assert set(results[0].components) == {"strict", "count", "color", "position", "parts", "objects"}
    assert reward.score(samples[::-1]) == results[::-1]
    with pytest.raises(RewardTargetError, match="class='unicorn'"):
        reward.check_target("", {"include": [{"class": "unicorn"}]})
    with pytest.raises(RewardTargetError, match="no clip="):
        load("geneval", detector=detector).check_target("", asked)
    with pytest.raises(RewardConfigError, match="threshold=2"):
        load("geneval", detector=detector, threshold=2)


def test_doubles_of_a_class_are_dropped():
    from image_rewards.geneval import without_doubles
    from image_rewards.scene_rules import Found

    found = [
        Found("dog", (0, 0, 10, 10), 0.5),
        Found("dog", (0, 0, 10, 9), 0.9),
        Found("cat", (0, 0, 10, 10), 0.4),
        Found("dog", (20, 0, 30, 10), 0.3),
    ]
    assert [(f.name, f.confidence) for f in without_doubles(found, 0.7)] == [("dog", 0.9), ("cat", 0.4), ("dog", 0.3)]


def test_a_checkpoint_with_a_hole_is_refused(clip, tmp_path):
    from safetensors.torch import load_file, save_file

    state = load_file(f"{clip}/model.safetensors")
    state.pop("text_projection.weight")
    copy_settings(clip, tmp_path)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RewardConfigError, match=r"1 absent.*text_projection"):
        load("clip_score", path=str(tmp_path)).prepare()


def test_pickled_code_is_not_run(clip, tmp_path):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "pwned"), "w")

    (tmp_path / "head.pth").write_bytes(pickle.dumps(Evil()))
    torch.save({"layers.0.weight": Evil()}, tmp_path / "head2.pth")
    for name in ("head.pth", "head2.pth"):
        with pytest.raises(RewardConfigError, match="weights only"):
            load("aesthetic", path=clip, head=str(tmp_path / name)).prepare()
    assert not (tmp_path / "pwned").exists()


def test_bad_paths_and_options_are_named(clip, tmp_path):
    with pytest.raises(RewardConfigError, match="could not be loaded as CLIPModel"):
        load("clip_score", path=str(tmp_path / "nothing")).prepare()
    with pytest.raises(RewardConfigError, match="is no file"):
        load("hps", path=clip, checkpoint=str(tmp_path / "none.pt")).prepare()
    with pytest.raises(RewardConfigError, match="dtype='fp8'"):
        load("clip_score", path=clip, dtype="fp8")
    with pytest.raises(RewardTargetError, match="no prompt"):
        load("clip_score", path=clip).check_target("", {})
    loaded = load("clip_score", path=clip)
    assert pickle.loads(pickle.dumps(loaded)).path == clip
    loaded.prepare()
    with pytest.raises(RewardConfigError, match="name and options"):
        pickle.dumps(loaded)


def test_larger_batches_differ_by_rounding_only(clip, samples):
    exact = load("clip_score", path=clip).score(samples)
    for size in (3, 4, 16):
        batched = load("clip_score", path=clip, batch_size=size).score(samples)
        assert max(abs(a.score - b.score) for a, b in zip(exact, batched, strict=True)) < 1e-6


def test_half_precision_stays_near(clip, samples):
    full = load("clip_score", path=clip).score(samples)
    half = load("clip_score", path=clip, dtype="bfloat16").score(samples)
    assert max(abs(a.score - b.score) for a, b in zip(full, half, strict=True)) < 0.05


def test_configs_in_the_tests_are_the_released_architectures():
    from image_rewards.blip import RELEASED

    config = transformers.BlipConfig(**RELEASED)
    assert (config.vision_config.hidden_size, config.text_config.hidden_size) == (1024, 768)
    assert json.loads(config.to_json_string())["text_config"]["encoder_hidden_size"] == 1024
