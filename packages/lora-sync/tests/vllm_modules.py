"""What vLLM-Omni's own transformers are made of, and what its LoRA manager makes of our names, as JSON on stdout.

    OMNI_ROLLOUT_CPU=1 python vllm_modules.py > data/vllm_omni_linears.json

Builds every supported architecture, notes its linear layers, and binds an adapter on every layer that can have one with the
engine's `DiffusionLoRAManager`: what then lies in the engine's buffers is multiplied out and compared with the adapter.
Takes half a minute (importing vLLM does): one test runs it, the others read the recording.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

gc.disable()  # the imports make much and drop little
os.environ.setdefault("OMNI_ROLLOUT_CPU", "1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29777", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
stdout, sys.stdout = sys.stdout, sys.stderr  # vLLM logs to stdout

import diffusers  # noqa: E402
import torch  # noqa: E402
from lora_sync import LoRAPayload, NameMapError, get_map, to_vllm  # noqa: E402
from lora_sync.payload import A, B  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.lora.lora_model import LoRAModel  # noqa: E402
from vllm.lora.peft_helper import PEFTHelper  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.model_executor.layers.linear import LinearBase  # noqa: E402
from vllm_omni.diffusion.data import OmniDiffusionConfig  # noqa: E402
from vllm_omni.diffusion.distributed import parallel_state  # noqa: E402
from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager  # noqa: E402
from vllm_omni.diffusion.models.flux.flux_transformer import FluxTransformer2DModel  # noqa: E402
from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageTransformer2DModel  # noqa: E402
from vllm_omni.diffusion.models.sd3.sd3_transformer import SD3Transformer2DModel  # noqa: E402
from vllm_omni.diffusion.models.wan2_2.wan2_2_transformer import WanTransformer3DModel  # noqa: E402
from vllm_omni.diffusion.models.z_image.z_image_transformer import ZImageTransformer2DModel  # noqa: E402

SD3 = SimpleNamespace(
    **{"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8},
    **{"num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32, "patch_size": 2},
    **{"pooled_projection_dim": 16, "pos_embed_max_size": 16, "dual_attention_layers": (0,), "qk_norm": "rms_norm"},
)
FLUX = {
    **{"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2},
    **{"joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6)},
}
Z_IMAGE = {
    **{"dim": 64, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 32},
    **{"axes_dims": [8, 12, 12], "axes_lens": [64, 64, 64], "in_channels": 4},
}
QWEN = {
    **{"num_layers": 1, "attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": 64},
    **{"axes_dims_rope": (8, 12, 12)},
}
WAN = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64, "text_dim": 32}


WAN_I2V = {**WAN, "image_dim": 16, "added_kv_proj_dim": 32}
DIFFUSERS = {"qwen_image": QWEN, "sd3": vars(SD3), "z_image": Z_IMAGE, "wan": WAN, "wan i2v": WAN_I2V, "flux": FLUX}


def random_adapter(name: str) -> LoRAPayload:
    """Rank 2, alpha 6, on every layer of the diffusers class that the engine can adapt."""
    names = get_map(name.split()[0])
    with torch.device("meta"):
        modules = dict(getattr(diffusers, names.transformer_class)(**DIFFUSERS[name]).named_modules())
    draw, tensors = torch.Generator().manual_seed(0), {}
    for layer, module in modules.items():
        if not isinstance(module, torch.nn.Linear):
            continue
        try:
            names.vllm_layer(layer)
        except NameMapError:
            continue
        tensors[layer + A] = torch.randn(2, module.in_features, generator=draw)
        tensors[layer + B] = torch.randn(module.out_features, 2, generator=draw)
    return LoRAPayload.build(tensors, alphas=6.0, version=1)


class Pipeline(torch.nn.Module):
    """As much of a pipeline as the engine's LoRA manager looks at."""

    def __init__(self, transformer: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.transformer = transformer
        self._tensors = {f"base_model.model.transformer.{key}": tensor for key, tensor in tensors.items()}

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str, dtype: Any) -> Any:
        rank = max(tensor.shape[0] for key, tensor in self._tensors.items() if key.endswith(A))
        targets = sorted({key.rpartition(".lora_")[0].rpartition(".")[2] for key in self._tensors})
        helper = PEFTHelper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"})
        kind = {"lora_model_id": lora_request.lora_int_id, "device": "cpu", "dtype": dtype}
        return LoRAModel.from_lora_tensors(tensors=self._tensors, peft_helper=helper, **kind), helper


def bound(name: str, transformer: torch.nn.Module) -> dict[str, Any]:
    """Binds a random adapter and compares each layer's product in the engine with the adapter's own."""
    names, payload = get_map(name.split()[0]), random_adapter(name)
    manager = DiffusionLoRAManager(
        Pipeline(transformer, to_vllm(payload, names.name)), torch.device("cpu"), torch.float32
    )
    manager.set_active_adapter(LoRARequest("random", 1, "/in-memory/random"), 1.0)
    apart = 0.0
    for module in payload.modules:
        layer, index, _ = names.vllm_layer(module)
        held = manager._lora_modules[f"transformer.{layer}"]
        assert held._diffusion_lora_active_slices[index or 0], layer
        down, up = held.lora_a_stacked[index or 0][0, 0], held.lora_b_stacked[index or 0][0, 0]
        wanted = payload.scale_of(module) * payload.tensors[module + B] @ payload.tensors[module + A]
        apart = max(apart, float((up @ down - wanted).abs().max()))
    return {"layers": len(payload.modules), "engine_layers": len(manager._lora_modules), "apart": apart}


def main() -> None:
    layers: dict[str, dict[str, list[str]]] = {}
    bindings: dict[str, Any] = {}
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0)
        parallel_state.initialize_model_parallel()
        config = OmniDiffusionConfig(dtype=torch.float32)
        sd3, flux = (OmniDiffusionConfig(dtype=torch.float32) for _ in range(2))
        sd3.tf_model_config, flux.tf_model_config = SD3, SimpleNamespace(**FLUX)
        builders = {
            "qwen_image": lambda: QwenImageTransformer2DModel(config, **QWEN),
            "sd3": lambda: SD3Transformer2DModel(sd3),
            "z_image": lambda: ZImageTransformer2DModel(**Z_IMAGE),
            "wan": lambda: WanTransformer3DModel(**WAN),
            "wan i2v": lambda: WanTransformer3DModel(**WAN_I2V),
            "flux": lambda: FluxTransformer2DModel(flux, **FLUX),
        }
        for name, build in builders.items():
            transformer = build()
            modules = list(transformer.named_modules())
            layers[name] = {
                "adaptable": [n for n, m in modules if isinstance(m, LinearBase)],
                "plain": [n for n, m in modules if isinstance(m, torch.nn.Linear)],
            }
            transformer.load_weights(iter(()))  # the manager reads how layers are fused from what this leaves behind
            bindings[name] = bound(name, transformer)
    version = importlib.metadata.version("vllm-omni")
    print(json.dumps({"vllm-omni": version, "architectures": layers, "bound": bindings}, indent=1), file=stdout)


if __name__ == "__main__":
    main()
