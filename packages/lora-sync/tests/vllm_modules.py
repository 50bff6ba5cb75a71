"""Record the linear layers of vLLM-Omni's own transformers: ``OMNI_ROLLOUT_CPU=1 python vllm_modules.py > FILE``.

Builds every supported architecture on the meta device. Takes half a minute (importing vLLM does), so the tests read the
recording and check that it belongs to the installed version.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from types import SimpleNamespace

os.environ.setdefault("OMNI_ROLLOUT_CPU", "1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29777", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
stdout, sys.stdout = sys.stdout, sys.stderr  # vLLM logs to stdout

import torch  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.linear import LinearBase  # noqa: E402
from vllm_omni.diffusion.data import OmniDiffusionConfig  # noqa: E402
from vllm_omni.diffusion.distributed import parallel_state  # noqa: E402
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


def main() -> None:
    found: dict[str, dict[str, list[str]]] = {}
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
            "wan i2v": lambda: WanTransformer3DModel(**WAN, image_dim=16, added_kv_proj_dim=32),
            "flux": lambda: FluxTransformer2DModel(flux, **FLUX),
        }
        for name, build in builders.items():
            with torch.device("meta"):
                modules = list(build().named_modules())
            found[name] = {
                "adaptable": [n for n, m in modules if isinstance(m, LinearBase)],
                "plain": [n for n, m in modules if isinstance(m, torch.nn.Linear)],
            }
    version = importlib.metadata.version("vllm-omni")
    print(json.dumps({"vllm-omni": version, "architectures": found}, indent=1), file=stdout)


if __name__ == "__main__":
    main()
