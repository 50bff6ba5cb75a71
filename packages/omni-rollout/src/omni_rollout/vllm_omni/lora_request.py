"""LoRA adapters that never touch a disk: the request carries the tensors, a hook of the engine reads them.

vLLM-Omni 0.30 asks a pipeline for `_load_diffusion_lora_adapter` before it looks at files, so nothing is patched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lora_sync import get_map
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm_omni.lora.request import LoRARequest

if TYPE_CHECKING:
    from lora_sync import LoRAPayload

_A, _B = ".lora_A.weight", ".lora_B.weight"


class OmniTensorLoRARequest(LoRARequest):
    """A `LoRARequest` (a msgspec struct) that holds its adapter.

    Args:
        lora_name, lora_int_id, lora_path: as in vLLM; the path must be absolute and is never opened.
        peft_config: r and lora_alpha.
        lora_tensors: `<component>.<diffusers module>.lora_A.weight` and `…lora_B.weight`; the pipeline that gets them
            knows what its own modules are called.
    """

    peft_config: dict | None = None
    lora_tensors: dict | None = None


def make_request(payload: LoRAPayload, lora_int_id: int, name: str) -> OmniTensorLoRARequest:
    """A request from a payload of the trainer.

    Each module's alpha / r is folded into its B, so that modules of different rank or alpha need no special care.
    """
    tensors: dict[str, Tensor] = {}
    for module in payload.modules:
        tensors[engine_name(module) + _A] = payload.tensors[module + _A]
        tensors[engine_name(module) + _B] = payload.tensors[module + _B] * payload.scale_of(module)
    rank = max(payload.rank_of(module) for module in payload.modules)
    return OmniTensorLoRARequest(
        lora_name=name,
        lora_int_id=lora_int_id,
        lora_path=f"/in-memory/{name}",
        peft_config={"r": rank, "lora_alpha": rank},  # equal: the scale is in B already
        lora_tensors=tensors,
    )


def engine_name(name: str) -> str:
    """A trainer's name below the engine's component: Wan's experts say which they are, all others are `transformer`."""
    return name if name.startswith(("transformer.", "transformer_2.")) else f"transformer.{name}"


class TensorLoRAMixin:
    """Gives a pipeline the engine's hook."""

    lora_architecture: str
    """Name of lora_sync's map for this transformer."""

    def engine_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors under the names of this pipeline's modules.

        A module that exists under its diffusers name keeps it; lora_sync's map says what the others are called here.
        """
        names, modules = get_map(self.lora_architecture), dict(self.named_modules())  # type: ignore[attr-defined]
        renamed = {}
        for key, value in tensors.items():
            module, _, part = key.rpartition(".lora_")
            if module not in modules:
                component, _, inner = module.partition(".")
                module = f"{component}.{names.to_vllm(inner)}"
            renamed[f"{module}.lora_{part}"] = value
        return renamed

    def _load_diffusion_lora_adapter(
        self, *, lora_request: LoRARequest, lora_path: str, dtype: Any
    ) -> tuple[LoRAModel, PEFTHelper] | None:
        sent = getattr(lora_request, "lora_tensors", None)
        if sent is None:
            return None  # an adapter on disk, for people who serve one
        tensors = {f"base_model.model.{key}": value for key, value in self.engine_tensors(sent).items()}
        targets = sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in tensors})
        config = {**(getattr(lora_request, "peft_config", None) or {}), "target_modules": targets, "bias": "none"}
        helper = PEFTHelper.from_dict(config)
        model = LoRAModel.from_lora_tensors(
            lora_model_id=lora_request.lora_int_id, tensors=tensors, peft_helper=helper, device="cpu", dtype=dtype
        )
        return model, helper
