"""Whether a pipeline folder can be trained, told from its small files and the headers of its weights, before anything is loaded.

Reads a few kilobytes of each file and imports no torch. The rules are those of the loaders that run later: diffusers and
transformers look for certain file names, `model_specs` for certain parts, and the samplers need the sigmas of a flow-matching Euler
scheduler.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from model_specs.base import ModelSpec
from model_specs.errors import UnknownArchitectureError
from model_specs.registry import available, find
from safetensors import SafetensorError, safe_open

from .errors import TrainerError

_EULER = "FlowMatchEulerDiscreteScheduler"
_RESPACED = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
_SHIFTS = (
    "shift",
    "flow_shift",
    "base_shift",
    "max_shift",
    "shift_terminal",
    "base_image_seq_len",
    "max_image_seq_len",
)
# What a scheduler's config may say, so that it steps along the flow that is trained; None is a key that it does not have.
_EULER_MAY = {"stochastic_sampling": (None, False), "invert_sigmas": (None, False), "num_train_timesteps": (None, 1000)}
_SOLVER_MAY: dict[str, tuple[Any, ...]] = dict.fromkeys(("use_dynamic_shifting", *_RESPACED), (None, False)) | {
    "use_flow_sigmas": (True,),
    "prediction_type": ("flow_prediction",),
    "final_sigmas_type": (None, "zero"),
    "num_train_timesteps": (None, 1000),
}
_WITHOUT_WEIGHTS = ("scheduler", "tokenizer", "processor", "feature_extractor", "image_processor")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".msgpack")
_LFS = b"version https://git-lfs"


def read_index(folder: Path) -> dict[str, Any]:
    """The content of `model_index.json`. Raises `TrainerError` when it is not a JSON object that names a class."""
    content = _read_json(folder / "model_index.json")
    if not isinstance(content.get("_class_name"), str):
        raise TrainerError(
            f"{folder / 'model_index.json'} is no pipeline index: it names no _class_name; save it again"
        )
    return content


def parts(folder: Path) -> list[str]:
    """Subfolders that the index names; parts that a pipeline was saved without are [null, null]."""
    return [name for name, entry in read_index(folder).items() if isinstance(entry, list) and entry[-1:] != [None]]


def transformers(folder: Path) -> list[str]:
    """The transformer, or both experts."""
    return [part for part in parts(folder) if part.startswith("transformer")]


def missing_parts(folder: Path) -> list[str]:
    """Parts of a pipeline folder that are not there in full: a download that was cut off leaves some."""
    missing = []
    for part in parts(folder):
        try:
            check_part(folder, part)
        except TrainerError:
            missing.append(part)
    return missing


def check_folder(folder: Path, architecture: str | None = None) -> ModelSpec:
    """The spec of a folder that can be trained: of `architecture` (`model.architecture`), else of the class in its index.

    Raises:
        TrainerError: the first fault, with its file and what to do.
    """
    index, named = read_index(folder), parts(folder)
    pipeline = str(index["_class_name"])
    try:
        spec = find(architecture or pipeline)
    except UnknownArchitectureError as error:
        known = ", ".join(sorted(find(name).pipeline_class for name in available()))
        raise TrainerError(f"{folder} is a {pipeline}, and no model spec trains that; known are {known}") from error
    if spec.__module__.partition(".")[0] != "model_specs":
        return spec(folder)  # it knows what it needs
    needed = ["transformer", "vae", "scheduler", *spec.text_parts]
    if index.get("boundary_ratio") is not None:
        needed.append("transformer_2")
    if lacking := [part for part in needed if part not in named]:
        raise TrainerError(
            f"{folder} lacks {', '.join(lacking)}: model_index.json gives no class for it; copy the whole pipeline folder"
        )
    for part in named:
        if part in needed or part.startswith(("transformer", "text_encoder", "tokenizer")):
            check_part(folder, part)
    for part, expected in (("transformer", spec.transformer_class), ("vae", spec.vae_class)):
        found = _read_json(folder / part / "config.json").get("_class_name", expected)
        if found != expected:
            raise TrainerError(f"{folder / part} holds a {found}, and a {pipeline} needs a {expected}")
    for part in transformers(folder):
        _check_blocks(folder, part)
    check_scheduler(folder, spec)
    return spec(folder)


def check_part(folder: Path, part: str) -> None:
    """Raise `TrainerError` unless the subfolder `part` holds what its loader will look for, in full."""
    here = folder / part
    files = sorted(here.iterdir()) if here.is_dir() else []
    if not files:
        raise TrainerError(f"{folder} has no {part}/, or nothing in it; copy the whole pipeline folder")
    for file in files:
        _refuse_pointer(file)
    if part.startswith("scheduler"):
        _read_json(here / "scheduler_config.json")
    elif part.startswith("tokenizer"):
        _read_json(here / "tokenizer_config.json")
        if not any(match.is_file() for name in _VOCABULARIES for match in here.glob(name)):
            raise TrainerError(
                f"{here} has no vocabulary ({', '.join(_VOCABULARIES)}); copy the whole tokenizer folder"
            )
    elif not part.startswith(_WITHOUT_WEIGHTS):
        config = _read_json(here / "config.json")
        if "quantization_config" in config and part.startswith(("transformer", "vae")):
            raise TrainerError(f"{here} holds quantized weights (quantization_config); give the folder in bf16 or fp32")
        part_shapes(folder, part)


def check_scheduler(folder: Path, spec: type[ModelSpec]) -> None:
    """Raise `TrainerError` unless the samplers can take the scheduler's sigmas as they are."""
    file = folder / "scheduler" / "scheduler_config.json"
    config = _read_json(file)
    name = config.get("_class_name")
    for key in _SHIFTS:
        value = config.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        if value is not None and not number:
            raise TrainerError(
                f"{file}: {key}={value!r} must be a number above 0; set it to what the published pipeline has"
            )
    if config.get("time_shift_type", "exponential") not in ("exponential", "linear"):
        raise TrainerError(f"{file}: time_shift_type={config['time_shift_type']!r} must be exponential or linear")
    respaced = [key for key in _RESPACED if config.get(key)]
    if name != _EULER and name not in spec.solvers:
        raise TrainerError(
            f"{file} names the scheduler {name!r}, whose steps the samplers cannot take for {spec.name}; put a {_EULER} there "
            "(its from_config takes this one's shift)"
        )
    if name == _EULER and respaced == ["use_beta_sigmas"] and find_spec("scipy") is None:
        raise TrainerError(f"{file}: use_beta_sigmas needs scipy; install it, or set it to false")
    wrong = [key for key, may in (_EULER_MAY if name == _EULER else _SOLVER_MAY).items() if config.get(key) not in may]
    if wrong or len(respaced) > 1:
        said = f"{wrong[0]}={config.get(wrong[0])!r}" if wrong else f"{' and '.join(respaced)}=True"
        raise TrainerError(
            f"{file}: {name} with {said} does not step along the flow that is trained; set it to what the published pipeline has, "
            f"or put a plain {_EULER} there"
        )


def part_shapes(folder: Path, part: str = "transformer") -> dict[str, tuple[int, ...]]:
    """Shapes of a part's tensors by name, from the headers of the safetensors files that its loader will choose: those of their
    table, else the single file.

    Raises:
        TrainerError: a file is not there, not whole, or of another kind.
    """
    here, stem = folder / part, "diffusion_pytorch_model" if read_index(folder)[part][0] == "diffusers" else "model"
    table, single = here / f"{stem}.safetensors.index.json", here / f"{stem}.safetensors"
    if single.is_file() and (stem == "model" or not table.is_file()):
        return _shapes(single)
    if not table.is_file():
        raise TrainerError(_why_no_weights(here, stem))
    weight_map = _read_json(table).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise TrainerError(f"{table} holds no weight_map from tensors to files; copy it again")
    names = sorted(set(weight_map.values()))
    if absent := [name for name in names if not (here / name).is_file()]:
        raise TrainerError(
            f"{table} names {absent[0]!r}, which is not there ({len(absent)} of {len(names)} missing); copy it"
        )
    held = {name: _shapes(here / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in held[name]:
            raise TrainerError(
                f"{table} says that {name!r} holds {tensor!r}, and it does not; copy the table and its files again"
            )
    return {tensor: shape for shapes in held.values() for tensor, shape in shapes.items()}


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a safetensors file, which must be whole."""
    try:
        with safe_open(file, framework="numpy") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    except (OSError, SafetensorError) as error:
        size = file.stat().st_size
        raise TrainerError(
            f"{file} ({size} bytes) is cut off, damaged or no safetensors file ({error}); copy it again"
        ) from error


def linear_layers(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Linear layers among a transformer's tensors, with the shapes of their weights."""
    return {name.removesuffix(".weight"): s for name, s in shapes.items() if name.endswith(".weight") and len(s) == 2}


# The lists of blocks of the transformers that are known here, and the key of their config.json that counts them.
_BLOCKS = {"transformer_blocks": "num_layers", "single_transformer_blocks": "num_single_layers", "blocks": "num_layers"}
_BLOCKS |= {"layers": "n_layers", "noise_refiner": "n_refiner_layers", "context_refiner": "n_refiner_layers"}


def _check_blocks(folder: Path, part: str) -> None:
    """Raise `TrainerError` unless the config of a transformer has as many blocks as its weights."""
    config, found = _read_json(folder / part / "config.json"), dict[str, set[str]]()
    for name in part_shapes(folder, part):
        blocks, number, *_ = [*name.split("."), ""]
        found.setdefault(blocks, set()).add(number)
    for blocks, numbers in found.items():
        key = _BLOCKS.get(blocks, "")
        if config.get(key, len(numbers)) != len(numbers):
            raise TrainerError(
                f"{folder / part / 'config.json'}: {key}={config[key]!r}, and the weights beside it hold {len(numbers)} {blocks}; "
                "copy both again"
            )


def size_multiple(spec: ModelSpec) -> int:
    """Pixels that height and width must be a multiple of."""
    try:
        return spec.size_multiple
    except (TypeError, ValueError) as error:
        file = spec.folder and spec.folder / "vae" / "config.json"
        raise TrainerError(f"{file} is no {spec.vae_class}'s ({error}); copy it again") from error


def _why_no_weights(here: Path, stem: str) -> str:
    """What is there instead, and what to do about it."""
    names = sorted(file.name for file in here.iterdir() if file.is_file())
    expected = f"{stem}.safetensors"
    for name in names:
        if found := re.fullmatch(
            rf"{stem}\.(?:safetensors\.index\.)?(\w+?)(?:-\d+-of-\d+)?\.(?:safetensors|json)", name
        ):
            return (
                f"{here} has only the {found[1]} variant of its weights ({name}); load the pipeline with "
                f"variant={found[1]!r} and save_pretrained it without one"
            )
    if shards := [name for name in names if re.fullmatch(rf"{stem}-\d+-of-\d+\.safetensors", name)]:
        return f"{here} has {shards[0]} but not {expected}.index.json, which says what lies where; copy it"
    if other := [name for name in names if name.endswith(".safetensors")]:
        return f"{here} has {other[0]}, and the loader looks for {expected}; rename it, or save the pipeline again"
    if pickled := [name for name in names if name.endswith(_PICKLED)]:
        return (
            f"{here} has pickled weights ({pickled[0]}), which are not read here; load the pipeline with diffusers and "
            "save_pretrained(folder, safe_serialization=True)"
        )
    return f"{here} has no weights ({expected} or {expected}.index.json); copy the whole pipeline folder"


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise TrainerError(f"there is no {file}; copy the whole pipeline folder")
    _refuse_pointer(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainerError(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise TrainerError(f"{file} is not JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise TrainerError(f"{file} must hold a JSON object and holds a {type(content).__name__}; copy it again")
    return content


def _refuse_pointer(file: Path) -> None:
    """A clone without git-lfs has small text files in place of the large ones."""
    if file.is_file() and file.stat().st_size < 1024:
        with file.open("rb") as opened:
            if opened.read(len(_LFS)) == _LFS:
                raise TrainerError(
                    f"{file} is a git-lfs pointer in place of the file; run `git lfs pull` in that clone"
                )
