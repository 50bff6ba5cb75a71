"""Getting a transformer's weights: whole through diffusers, or shard by shard onto a module built on the meta device.

A 20 B transformer in bf16 is 41 GB; eight ranks that each load all of it before sharding would need 330 GB of host
memory. On the meta path each rank builds the module without storage, FSDP2 shards that, and then each rank reads from
the safetensors files only the rows that it will hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lora_sync.layers import base_name, local, local_slices
from model_specs.folders import empty_diffusers, load_diffusers
from sde_samplers import seed_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .adapters import draw_initial
from .config import DiffusionModelConfig
from .errors import EngineError, nearest

if TYPE_CHECKING:
    from model_specs import ModelSpec

_INDEX = "diffusion_pytorch_model.safetensors.index.json"
_SINGLE = "diffusion_pytorch_model.safetensors"


class WeightSource(Protocol):
    """Where a parameter's values come from."""

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        """The part `index` of tensor `name`, whose whole shape is `shape`, on any device."""
        ...


class SafetensorsSource:
    """A diffusers folder with one safetensors file, or several and an index. Files are opened once and read by slice."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            parts = sorted(p.name for p in folder.parent.iterdir() if p.is_dir()) if folder.parent.is_dir() else []
            raise EngineError(
                f"there is no folder {str(folder)!r}; "
                + (f"beside it are {parts}" if parts else "give the folder of a diffusers pipeline as model.path")
            )
        self.folder = folder
        self._open: dict[str, Any] = {}
        if (folder / _INDEX).is_file():
            self.files: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
        elif (folder / _SINGLE).is_file():
            from safetensors import safe_open

            with safe_open(str(folder / _SINGLE), framework="pt") as file:
                self.files = dict.fromkeys(file.keys(), _SINGLE)
        else:
            raise EngineError(
                f"{str(folder)!r} has neither {_SINGLE} nor {_INDEX}; save the model with safetensors "
                f"(`save_pretrained(..., safe_serialization=True)`)"
            )
        missing = sorted({file for file in self.files.values() if not (folder / file).is_file()})
        if missing:
            raise EngineError(
                f"{str(folder)!r}: the index names the shard {missing[0]!r}, which is not there "
                f"({len(missing)} missing of {len(set(self.files.values()))}); copy the missing files"
            )

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        """See `WeightSource`; refuses a tensor that is missing or has another shape."""
        from safetensors import safe_open

        if name not in self.files:
            raise EngineError(f"{str(self.folder)!r} has no tensor {name!r}; nearest: {nearest(name, self.files, 3)}")
        file = self.files[name]
        if file not in self._open:
            self._open[file] = safe_open(str(self.folder / file), framework="pt")
        view = self._open[file].get_slice(name)
        found = tuple(view.get_shape())
        if found != tuple(shape):
            raise EngineError(
                f"{name!r} is {list(found)} in {file!r} and {list(shape)} in the model; config.json and weights differ"
            )
        return view[index] if shape else self._open[file].get_tensor(name)


class FolderSource:
    """Several folders, each for the parameters whose names begin with its prefix (Wan keeps two experts in two)."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.sources = {prefix: SafetensorsSource(folder) for prefix, folder in folders.items()}

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        """See `WeightSource`."""
        prefix = max((p for p in self.sources if name.startswith(p)), key=len)
        return self.sources[prefix].read(name.removeprefix(prefix), shape, index)


class RandomSource:
    """Random weights of a sane size for a model without a checkpoint, each tensor from (seed, its name).

    Drawn on `device`: twenty billion numbers take minutes on a CPU and seconds on a GPU (which draws others).
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.device = device

    def read(self, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> Tensor:
        """See `WeightSource`. Matrices N(0, 0.02²), norm weights 1, biases 0."""
        if len(shape) < 2:
            whole = torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
            return whole[index] if shape else whole
        generator = torch.Generator(self.device).manual_seed(seed_of(self.seed, name))
        # In fp32 whatever the default dtype is: an engine loads under its own, and would draw other numbers.
        return torch.randn(*shape, generator=generator, device=self.device, dtype=torch.float32)[index] * 0.02


def build(
    spec: ModelSpec, config: DiffusionModelConfig, dtype: torch.dtype, device: torch.device, *, meta: bool
) -> tuple[nn.Module, WeightSource | None]:
    """The transformer without adapters.

    Returns the module and, when it still lies on the meta device, the source of its weights; then `materialise`
    has to follow once adapters are in and the module is sharded.
    """
    name = spec.transformer_class
    if config.transformer_config is not None:
        return empty_diffusers(name, dict(config.transformer_config), dtype), RandomSource(config.lora_seed, device)
    path = Path(config.path)
    try:
        if config.transformer_subfolder is None:
            files = FolderSource(spec.transformer_folders(path))
            module = spec.empty_transformer(path, dtype) if meta else spec.load_transformer(path, dtype, device)
        else:
            alone = path / config.transformer_subfolder
            files = FolderSource({"": alone})
            module = empty_diffusers(name, alone, dtype) if meta else load_diffusers(name, alone, dtype, device)
        return module, files if meta else None
    except EngineError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise EngineError(f"cannot load {name} from {config.path!r}: {error}") from error


@torch.no_grad()
def materialise(module: nn.Module, source: WeightSource, config: DiffusionModelConfig, device: torch.device) -> None:
    """Give every meta parameter of `module` (sharded or not) storage on `device` and its values."""
    for owner, leaf, name, parameter in _meta_parameters(module):
        shape = tuple(parameter.shape)
        # Not DTensor.from_local: that would move a shard kept on the CPU (offload_policy) to the mesh's device.
        value = torch.empty_like(parameter, device=device)
        own, index = local(value), local_slices(value)
        if own.numel():
            if ".lora_A." in name or ".lora_B." in name:
                own.copy_(draw_initial(name, shape, config)[index])
            else:
                own.copy_(source.read(base_name(name), shape, index))
        new = nn.Parameter(value, requires_grad=parameter.requires_grad)
        if isinstance(parameter, DTensor):
            # FSDP2 holds on to the parameter object: swap what is inside it.
            torch.utils.swap_tensors(parameter, new)
        else:
            setattr(owner, leaf, new)
    for owner in module.modules():
        for leaf, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, leaf, buffer.to(device))


def _meta_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    for prefix, owner in list(module.named_modules()):
        for leaf, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                yield owner, leaf, f"{prefix}.{leaf}" if prefix else leaf, parameter
