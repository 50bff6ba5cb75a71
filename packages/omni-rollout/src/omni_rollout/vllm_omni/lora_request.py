"""LoRA adapters that never touch a disk: the request carries the tensors, a hook of the engine reads them.

vLLM-Omni 0.30 asks a pipeline for `_load_diffusion_lora_adapter` before it looks at files, so nothing is patched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lora_sync import get_map
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
        peft_config: r, lora_alpha, target_modules.
        lora_tensors: `base_model.model.<component>.<engine module>.lora_A.weight` and `…lora_B.weight`.
    """

    peft_config: dict | None = None
    lora_tensors: dict | None = None


def make_request(payload: LoRAPayload, lora_int_id: int, *, name: str, architecture: str) -> OmniTensorLoRARequest:
    """A request from a payload of the trainer, under the engine's module names.

    Each module's alpha / r is folded into its B, so that modules of different rank or alpha need no special care.
    """
    names = get_map(architecture)
    tensors: dict[str, Any] = {}
    for module in payload.modules:
        component, _, inner = engine_name(module).partition(".")
        base = f"base_model.model.{component}.{names.to_vllm(inner)}"
        tensors[base + _A] = payload.tensors[module + _A]
        tensors[base + _B] = payload.tensors[module + _B] * payload.scale_of(module)
    rank = max(payload.rank_of(module) for module in payload.modules)
    targets = sorted({key.rsplit(".lora_", 1)[0].rsplit(".", 1)[-1] for key in tensors})
    # lora_alpha equal to r: the scale is in B already.
    config = {"r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    return OmniTensorLoRARequest(
        lora_name=name,
        lora_int_id=lora_int_id,
        lora_path=f"/in-memory/{name}",
        peft_config=config,
        lora_tensors=tensors,
    )


def engine_name(name: str) -> str:
    """A trainer's name below the engine's component: Wan's experts say which they are, all others are `transformer`."""
    return name if name.startswith(("transformer.", "transformer_2.")) else f"transformer.{name}"


class TensorLoRAMixin:
    """Gives a pipeline the engine's hook."""

    lora_architecture: str
    """Name of lora_sync's map for this transformer."""

    def _load_diffusion_lora_adapter(
        self, *, lora_request: LoRARequest, lora_path: str, dtype: Any
    ) -> tuple[LoRAModel, PEFTHelper] | None:
        tensors = getattr(lora_request, "lora_tensors", None)
        if tensors is None:
            return None  # an adapter on disk, for people who serve one
        helper = PEFTHelper.from_dict(lora_request.peft_config)
        model = LoRAModel.from_lora_tensors(
            lora_model_id=lora_request.lora_int_id, tensors=tensors, peft_helper=helper, device="cpu", dtype=dtype
        )
        return model, helper
