"""A model may be shipped, a folder, or a Hub id in a cache; looking for it never downloads, fetching it does so once."""

import json
import subprocess
import sys

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from model_specs import FluxSpec
from ray_trainer.errors import TrainerError
from ray_trainer.model_folder import missing_parts
from ray_trainer.models import fetch, is_hub_id, locate, spec_class

HUB_ID = "someone/Some-Model"
INDEX = {
    "_class_name": "QwenImagePipeline",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
    "image_encoder": [None, None],
    "boundary_ratio": 0.9,
}


def write_pipeline(folder, without=()):
    """A pipeline folder as a download leaves it; the transformer in two files, with their table."""
    files = {
        "model_index.json": INDEX,
        "scheduler/scheduler_config.json": {},
        "tokenizer/tokenizer_config.json": {},
        "tokenizer/tokenizer.json": {},
        "transformer/config.json": {},
        "transformer/diffusion_pytorch_model.safetensors.index.json": {
            "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}
        },
        "transformer/1.safetensors": ["a"],
        "transformer/2.safetensors": ["b"],
        "vae/config.json": {},
        "vae/diffusion_pytorch_model.safetensors": ["a"],
    }
    for name, content in files.items():
        if name not in without:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(
                weights(content) if name.endswith(".safetensors") else json.dumps(content).encode()
            )
    return folder


def weights(names):
    """A safetensors file of one number for each name."""
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4 * len(names))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty Hub cache, and no way out of this machine."""

    def refuse(*args, **kwargs):
        raise AssertionError("nothing may be downloaded here")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    return tmp_path / "hub"


def put(cache, **options):
    """The cache's own layout: a reference names the commit whose snapshot holds the files."""
    repo = cache / "models--someone--Some-Model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c0ffee")
    return write_pipeline(repo / "snapshots" / "c0ffee", **options)


def test_a_cached_model_is_found_and_used_without_a_download(cache):
    folder = put(cache)
    assert locate(HUB_ID) == folder
    assert fetch(HUB_ID) == folder


@pytest.mark.parametrize(
    "gone",
    [
        "transformer/2.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "tokenizer/tokenizer_config.json",
    ],
)
def test_a_download_that_was_cut_off_does_not_count(cache, gone):
    folder = put(cache, without=(gone,))
    assert missing_parts(folder) == [gone.split("/")[0]]
    assert locate(HUB_ID) is None


def test_what_is_missing_is_downloaded_and_no_more(cache, tmp_path, monkeypatch):
    calls = []

    def download(hub_id, **options):
        calls.append((hub_id, options))
        return str(write_pipeline(tmp_path / "new"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate(HUB_ID) is None
    assert calls == []
    assert fetch(HUB_ID) == tmp_path / "new"
    (first, index), (second, rest) = calls
    assert first == second == HUB_ID
    assert index == {"allow_patterns": ["model_index.json"]}
    assert rest["allow_patterns"] == ["model_index.json", "scheduler/*", "tokenizer/*", "transformer/*", "vae/*"]
    assert "*.bin" in rest["ignore_patterns"]


def test_a_failed_or_incomplete_download_is_one_clear_error(cache, tmp_path, monkeypatch):
    def offline(hub_id, **options):
        raise errors.LocalEntryNotFoundError("no connection\nand a long tail")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(TrainerError, match=r"could not be downloaded .*: no connection\. Some models need") as failure:
        fetch(HUB_ID)
    assert "long tail" not in str(failure.value)
    part = write_pipeline(tmp_path / "part", without=("vae/diffusion_pytorch_model.safetensors",))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(part))
    with pytest.raises(TrainerError, match="lacks vae"):
        fetch(HUB_ID)


def test_what_looks_like_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("black-forest-labs/FLUX.1-dev")
    for other in ("/nowhere/at/all", "nowhere", "./a/b", "../a", "a/b/c", "a/.b", "~/x", "a b/c", ""):
        assert not is_hub_id(other), other
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert not is_hub_id("runs/mine")  # a folder that is there wins


def test_an_architecture_is_found_by_any_of_its_names():
    assert {spec_class(name) for name in ("flux", "FluxTransformer2DModel", "FluxPipeline")} == {FluxSpec}
    with pytest.raises(TrainerError, match="Did you mean 'qwen_image'"):
        spec_class("qwen_imag")


def test_looking_for_a_model_imports_no_torch(tmp_path):
    code = (
        "import sys; from ray_trainer.models import locate, spec_class; "
        f"assert locate({HUB_ID!r}) is None; spec_class('flux'); "
        "assert not {'torch', 'diffusers', 'transformers', 'ray'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_HUB_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
