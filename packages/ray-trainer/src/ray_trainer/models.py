"""Where a model is: shipped, in a folder, or on the Hugging Face Hub (`Qwen/Qwen-Image`).

`locate` never uses the network: it is what validation and `--dry-run` call. `fetch` also downloads what is missing, and is
called where training starts. Neither imports torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from model_specs.base import ModelSpec
from model_specs.errors import SpecError
from model_specs.registry import find

from .assets import builtin
from .errors import TrainerError
from .model_folder import missing_parts, parts

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Second copies of the same weights in other forms: half of some repositories.
_COPIES = ["*.bin", "*fp16*", "*.msgpack", "*.onnx*", "*.gguf"]


def spec_class(architecture: str) -> type[ModelSpec]:
    """The spec behind `model.architecture`: any name of it, or "module:Class".

    Raises:
        TrainerError: there is none.
    """
    try:
        return find(architecture)
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


def check_present(location: str, folder: Path) -> Path:
    """The folder, or `TrainerError` where this machine has no pipeline in it."""
    if (folder / "model_index.json").is_file():
        return folder
    raise TrainerError(
        f"model.path={location!r} is not there (no {folder / 'model_index.json'}); copy it to the same path on every machine, "
        "mount it, or give a Hugging Face Hub id"
    )


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        # First the index alone: repositories hold files beside the pipeline's, some larger than the pipeline.
        folder = Path(snapshot_download(hub_id, allow_patterns=["model_index.json"]))
        wanted = ["model_index.json", *(f"{part}/*" for part in parts(folder))]
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
