"""Where a model is: shipped, in a folder, or on the Hugging Face Hub (`Qwen/Qwen-Image`).

`locate` never uses the network: it is what validation and `--dry-run` call. `fetch` also downloads what is missing, and is
called where training starts. Neither imports torch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ray_trainer.assets import builtin
from ray_trainer.errors import TrainerError

# Short name, transformer class and pipeline class of each architecture, as `model_specs` knows them. Repeated here because that
# package needs torch and a check of the command line must not; a test holds the two together.
ARCHITECTURES = {
    "flux": ("FluxTransformer2DModel", "FluxPipeline"),
    "qwen_image": ("QwenImageTransformer2DModel", "QwenImagePipeline"),
    "sd3": ("SD3Transformer2DModel", "StableDiffusion3Pipeline"),
    "wan": ("WanTransformer3DModel", "WanPipeline"),
    "z_image": ("ZImageTransformer2DModel", "ZImagePipeline"),
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WITHOUT_WEIGHTS = ("scheduler", "tokenizer", "processor", "feature_extractor", "image_processor")
# Second copies of the same weights in other forms: half of some repositories.
_COPIES = ["*.bin", "*fp16*", "*.msgpack", "*.onnx*", "*.gguf"]


def pipeline_class(architecture: str) -> str:
    """The pipeline class behind any name of an architecture.

    Raises:
        TrainerError: `model_specs` has no such name either; third parties may have added it there.
    """
    for name, (transformer, pipeline) in ARCHITECTURES.items():
        if architecture in (name, transformer, pipeline):
            return pipeline
    from model_specs.errors import SpecError
    from model_specs.registry import find

    try:
        return find(architecture).pipeline_class
    except SpecError as error:
        raise TrainerError(f"model.architecture={architecture!r}: {error}") from error


def is_hub_id(location: str) -> bool:
    """Whether `location` can be a Hub id: OWNER/NAME, and no folder of that name here."""
    return bool(_HUB_ID.fullmatch(location)) and not Path(location).exists()


def locate(location: str) -> Path | None:
    """The folder of a model without any download: None for a Hub id of which the local cache lacks a part.

    Args:
        location: `builtin:NAME`, a folder (which need not exist: what it holds is the caller's to check), or a Hub id.
    """
    if location.startswith("builtin:"):
        return builtin("models", location.removeprefix("builtin:"))
    if not is_hub_id(location):
        return Path(location)
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(location, "model_index.json")
    if not isinstance(index, str):
        return None
    folder = Path(index).parent
    return None if missing_parts(folder) else folder


def fetch(location: str) -> Path:
    """The folder of a model; a Hub id is downloaded unless the local cache has all of it, which is then used as it is.

    Raises:
        TrainerError: the download failed or left something out.
    """
    return locate(location) or _download(location)


def read_index(folder: Path) -> dict[str, Any]:
    """The content of `model_index.json`. Raises `TrainerError` when it is not a JSON object that names a class."""
    file = folder / "model_index.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content["_class_name"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise TrainerError(f"{file} is no pipeline index ({error!r}); save the pipeline again") from error
    return dict(content)


def _parts(folder: Path) -> list[str]:
    """Subfolders that the index names; parts that a pipeline was saved without are [null, null]."""
    return [name for name, entry in read_index(folder).items() if isinstance(entry, list) and entry[-1:] != [None]]


def missing_parts(folder: Path) -> list[str]:
    """Parts of a pipeline folder that are not there in full: a download that was cut off leaves some."""
    missing = []
    for part in _parts(folder):
        here = folder / part
        if part.startswith(_WITHOUT_WEIGHTS):
            complete = here.is_dir() and any(here.iterdir())
        else:
            complete = (here / "config.json").is_file() and _has_weights(here)
        if not complete:
            missing.append(part)
    return missing


def _has_weights(part: Path) -> bool:
    for table in part.glob("*.safetensors.index.json"):
        files = set(json.loads(table.read_text(encoding="utf-8"))["weight_map"].values())
        return all((part / file).is_file() for file in files)
    return any(part.glob("*.safetensors"))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        # First the index alone: repositories hold files beside the pipeline's, some larger than the pipeline.
        folder = Path(snapshot_download(hub_id, allow_patterns=["model_index.json"]))
        wanted = ["model_index.json", *(f"{part}/*" for part in _parts(folder))]
        folder = Path(snapshot_download(hub_id, allow_patterns=wanted, ignore_patterns=_COPIES))
    except (OSError, ValueError) as error:
        if isinstance(error, TrainerError):
            raise
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise TrainerError(
            f"model.path={hub_id!r} could not be downloaded from the Hugging Face Hub: {reason}. Some models need their "
            "licence accepted there and HF_TOKEN set here; or give the folder of a pipeline"
        ) from error
    missing = missing_parts(folder)
    if missing:
        raise TrainerError(
            f"model.path={hub_id!r}: the download into {folder} lacks {', '.join(missing)}; try again with a connection, "
            "or give the folder of a whole pipeline"
        )
    return folder
