"""What is wrong with a model folder is said before anything starts: one line, exit code 2, and no torch needed to say it."""

import json
import re
import shutil

import pytest
from flowgrpo.cli import main
from fsdp_diffusers_engine.config import DiffusionModelConfig
from fsdp_diffusers_engine.targets import resolve_targets
from model_specs import available
from ray_trainer.assets import builtin
from ray_trainer.errors import TrainerError
from ray_trainer.model_folder import check_folder, linear_layers, part_shapes
from ray_trainer.validate import _warn_about_size
from safetensors import safe_open
from safetensors.torch import load_file, save_file

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path):
    """A copy of the shipped pipeline, to be broken."""
    return shutil.copytree(builtin("models", "tiny_qwen_image"), tmp_path / "model")


def edit(file, **changes):
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | changes))


def shard(folder):
    """The transformer in two files, as large models come."""
    tensors = sorted(load_file(folder / WEIGHTS).items())
    (folder / WEIGHTS).unlink()
    table = {}
    for number, part in enumerate((tensors[::2], tensors[1::2]), start=1):
        name = f"diffusion_pytorch_model-{number:05d}-of-00002.safetensors"
        save_file(dict(part), folder / "transformer" / name)
        table |= {key: name for key, _ in part}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder / "transformer" / name


def cut(file, count=-100):
    file.write_bytes(file.read_bytes()[:count])


def scheduler(**config):
    def change(folder):
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))

    return change


def only_variant(folder):
    (folder / WEIGHTS).rename(folder / "transformer" / "diffusion_pytorch_model.fp16.safetensors")


def only_sharded_variant(folder):
    shard(folder)
    for file in (folder / "transformer").glob("*-of-*"):
        file.rename(file.with_name(file.name.replace("model-", "model.fp16-")))
    table = folder / f"{WEIGHTS}.index.json"
    table.rename(table.with_name("diffusion_pytorch_model.safetensors.index.fp16.json"))


def pickled(part):
    def change(folder):
        for file in (folder / part).glob("*.safetensors"):
            file.rename(file.with_suffix(".bin"))

    return change


def pointer(name):
    def change(folder):
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 41\n")

    return change


def no_table(folder):
    shard(folder)
    (folder / f"{WEIGHTS}.index.json").unlink()


def table_of(weight_map):
    def change(folder):
        shard(folder)
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def wrong_tensor(folder):
    shard(folder)
    file = folder / f"{WEIGHTS}.index.json"
    table = json.loads(file.read_text())["weight_map"]
    edit(file, weight_map=table | {"proj_out.wheight": next(iter(table.values()))})


def index(**changes):
    return lambda folder: edit(folder / "model_index.json", **changes)


def remove(name):
    def change(folder):
        place = folder / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()

    return change


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def config_of(name, **changes):
    return lambda folder: edit(folder / name, **changes)


EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True}
FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
FAULTS = {
    "UniPC": (
        scheduler(_class_name="UniPCMultistepScheduler", **FLOW),
        "names the scheduler 'UniPCMultistepScheduler'",
    ),
    "DPM++": (scheduler(_class_name="DPMSolverMultistepScheduler", **FLOW), "whose steps the samplers cannot take"),
    "DPM++ single": (scheduler(_class_name="DPMSolverSinglestepScheduler"), "whose steps the samplers cannot take"),
    "Heun": (scheduler(_class_name="FlowMatchHeunDiscreteScheduler"), "put a FlowMatchEulerDiscreteScheduler there"),
    "DDIM": (scheduler(_class_name="DDIMScheduler"), "'DDIMScheduler'"),
    "Euler": (scheduler(_class_name="EulerDiscreteScheduler"), "'EulerDiscreteScheduler'"),
    "LCM": (scheduler(_class_name="FlowMatchLCMScheduler"), "'FlowMatchLCMScheduler'"),
    "scheduler without a class": (scheduler(shift=3.0), "names the scheduler None"),
    "stochastic sampling": (
        scheduler(**EULER, stochastic_sampling=True),
        "stochastic_sampling=True does not step along",
    ),
    "inverted sigmas": (scheduler(**EULER, invert_sigmas=True), "invert_sigmas=True"),
    "another time": (scheduler(**EULER, num_train_timesteps=100), "num_train_timesteps=100"),
    "a shift that is NaN": (scheduler(**EULER, shift=float("nan")), "shift=nan must be a number above 0"),
    "a shift of 0": (scheduler(**EULER, shift=0), "shift=0 must be a number above 0"),
    "a shift in text": (scheduler(**EULER, base_shift="0.5"), "base_shift='0.5' must be a number"),
    "another curve of shifts": (scheduler(**EULER, time_shift_type="cubic"), "must be exponential or linear"),
    "two spacings": (
        scheduler(**EULER, use_karras_sigmas=True, use_beta_sigmas=True),
        "use_karras_sigmas and use_beta_sigmas",
    ),
    "missing shard": (
        lambda f: shard(f).unlink(),
        "names 'diffusion_pytorch_model-00002-of-00002.safetensors', which is not",
    ),
    "truncated shard": (lambda f: cut(shard(f)), "is cut off, damaged or no safetensors file"),
    "table of nothing": (table_of({}), "holds no weight_map"),
    "table of numbers": (table_of({"a": 1}), "holds no weight_map"),
    "tensor in no shard": (wrong_tensor, "holds 'proj_out.wheight', and it does not"),
    "shards without their table": (no_table, "has diffusion_pytorch_model-00001-of-00002.safetensors but not"),
    "fp16 variant": (only_variant, "has only the fp16 variant"),
    "fp16 variant in shards": (only_sharded_variant, "has only the fp16 variant"),
    "pickled transformer": (pickled("transformer"), "has pickled weights (diffusion_pytorch_model.bin)"),
    "pickled text encoder": (pickled("text_encoder"), "has pickled weights (model.bin)"),
    "pickled vae": (pickled("vae"), "has pickled weights"),
    "weights of another name": (
        lambda f: (f / WEIGHTS).rename(f / "transformer" / "qwen.safetensors"),
        "has qwen.safetensors, and the loader looks for diffusion_pytorch_model.safetensors",
    ),
    "no weights": (remove(WEIGHTS), "transformer has no weights"),
    "pointer for weights": (pointer(WEIGHTS), "is a git-lfs pointer in place of the file"),
    "pointer for a vocabulary": (pointer("tokenizer/tokenizer.json"), "run `git lfs pull`"),
    "pointer for a table": (lambda f: (shard(f), pointer(f"{WEIGHTS}.index.json")(f)), "git-lfs pointer"),
    "truncated weights": (lambda f: cut(f / WEIGHTS), "is cut off, damaged or no safetensors file"),
    "truncated in the header": (lambda f: cut(f / WEIGHTS, 50), "(50 bytes) is cut off, damaged"),
    "empty weights": (lambda f: cut(f / WEIGHTS, 0), "(0 bytes) is cut off, damaged"),
    "a page instead of weights": (
        write(WEIGHTS, b"<html>404 Not Found</html>"),
        "is cut off, damaged or no safetensors file",
    ),
    "truncated vae": (
        lambda f: cut(f / "vae" / "diffusion_pytorch_model.safetensors"),
        "is cut off, damaged or no safetensors file",
    ),
    "truncated text encoder": (
        lambda f: cut(f / "text_encoder" / "model.safetensors"),
        "is cut off, damaged or no safetensors file",
    ),
    "edit pipeline": (
        index(_class_name="QwenImageEditPipeline"),
        "is a QwenImageEditPipeline, and no model spec trains that",
    ),
    "SDXL": (index(_class_name="StableDiffusionXLPipeline"), "known are FluxPipeline, QwenImagePipeline"),
    "no class": (index(_class_name=None), "names no _class_name"),
    "no tokenizer": (remove("tokenizer"), "has no tokenizer/"),
    "no vocabulary": (remove("tokenizer/tokenizer.json"), "has no vocabulary"),
    "no text encoder": (remove("text_encoder"), "has no text_encoder/"),
    "no vae": (remove("vae"), "has no vae/"),
    "no scheduler": (remove("scheduler"), "has no scheduler/"),
    "saved without text encoder": (
        index(text_encoder=[None, None]),
        "lacks text_encoder: model_index.json gives no class",
    ),
    "no transformer config": (remove("transformer/config.json"), "transformer/config.json; copy the whole"),
    "broken config": (write("transformer/config.json", b'{"a": 1,'), "transformer/config.json is not JSON"),
    "broken text config": (write("text_encoder/config.json", b"\xff\xfe{"), "text_encoder/config.json is not JSON"),
    "broken scheduler config": (write("scheduler/scheduler_config.json", b"["), "scheduler_config.json is not JSON"),
    "broken index": (write("model_index.json", b"{"), "model_index.json is not JSON"),
    "index of another kind": (write("model_index.json", b"[]"), "must hold a JSON object"),
    "another transformer": (
        config_of("transformer/config.json", _class_name="FluxTransformer2DModel"),
        "holds a FluxTransformer",
    ),
    "another vae": (
        config_of("vae/config.json", _class_name="AutoencoderKL"),
        "holds a AutoencoderKL, and a QwenImagePipeline",
    ),
    "more layers than weights": (
        config_of("transformer/config.json", num_layers=99),
        "num_layers=99, and the weights beside it hold 4 transformer_blocks",
    ),
    "quantized": (
        config_of("transformer/config.json", quantization_config={"load_in_4bit": True}),
        "quantized weights",
    ),
}


@pytest.mark.parametrize(("break_it", "complaint"), FAULTS.values(), ids=list(FAULTS))
def test_a_fault_is_one_line_before_the_start(break_it, complaint, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    break_it(folder)
    assert main(["--dry-run", f"model.path={folder}"]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert f"model.path={str(folder)!r}: " in error or complaint.startswith(("names no", "model_index", "must hold"))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_whole_folder_passes_and_is_counted(sharded, folder):
    if sharded:
        shard(folder)
    assert check_folder(folder).pipeline_class == "QwenImagePipeline"
    with safe_open(str(builtin("models", "tiny_qwen_image") / WEIGHTS), framework="pt") as file:
        assert part_shapes(folder) == {key: tuple(file.get_tensor(key).shape) for key in file.keys()}


@pytest.mark.parametrize("name", sorted({*available(), "sd35", "wan_5b", "wan_unipc", "flux_schnell"}))
def test_what_diffusers_saves_passes(name, tmp_path):
    from model_specs import tiny

    if name not in tiny.names():
        return
    folder = tiny.build(name, tmp_path / "m")
    spec, shapes = check_folder(folder), part_shapes(folder)
    assert len(resolve_targets(list(linear_layers(shapes)), DiffusionModelConfig("m"), spec)) >= 4
    config = folder / "transformer" / "config.json"
    for key in [
        key for key, value in json.loads(config.read_text()).items() if key.endswith("_layers") and type(value) is int
    ]:
        before = config.read_text()
        edit(config, **{key: 99})
        with pytest.raises(TrainerError, match=f"{key}=99, and the weights beside it hold"):
            check_folder(folder)
        config.write_text(before)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"use_flow_sigmas": False}, "use_flow_sigmas=False"),
        ({"prediction_type": "epsilon"}, "prediction_type='epsilon'"),
        ({"final_sigmas_type": "sigma_min"}, "final_sigmas_type='sigma_min'"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas=True"),
    ],
)
def test_wans_solvers_must_step_along_the_flow(change, complaint, tmp_path):
    from model_specs import tiny

    folder = tiny.build("wan_unipc", tmp_path / "m")
    check_folder(folder)
    edit(folder / "scheduler" / "scheduler_config.json", **change)
    with pytest.raises(TrainerError, match=re.escape(complaint)):
        check_folder(folder)


def test_wan_with_a_boundary_needs_both_experts(tmp_path):
    from model_specs import tiny

    folder = tiny.build("wan_5b", tmp_path / "m")
    edit(folder / "model_index.json", boundary_ratio=0.9, transformer_2=[None, None])
    with pytest.raises(TrainerError, match="lacks transformer_2"):
        check_folder(folder)


def test_a_full_size_model_on_a_tiny_recipe_is_warned_about():
    from flowgrpo.cli import APP
    from ray_trainer.cli import parse

    tiny, _ = parse(APP, [])
    assert _warn_about_size(tiny, 3_000_000) == []
    (line,) = _warn_about_size(tiny, 20_430_000_000)
    for key in (
        "enable_gradient_checkpointing=true",
        "micro_batch_size_per_gpu=8 (now 48)",
        "lr=3e-4 (now 0.001)",
        "82 GB",
    ):
        assert key in line
    published, _ = parse(APP, ["recipe=qwen_image_ocr"])
    assert _warn_about_size(published, 20_430_000_000) == []
