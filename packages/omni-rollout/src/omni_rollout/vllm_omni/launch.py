"""Starting an engine. Nothing of vllm or vllm_omni is imported before this."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import DiffusionRolloutConfig
from ..errors import MissingExtraError
from ..specs import pipeline_class
from .cpu_platform import enabled

if TYPE_CHECKING:
    from model_specs import ModelSpec

_EXTENSION = "omni_rollout.vllm_omni.worker_extension.vLLMOmniColocateWorkerExtension"


def start_engine(config: DiffusionRolloutConfig, path: str, spec: ModelSpec, cuda_visible_devices: str = "") -> Any:
    """An `AsyncOmni` that serves this package's pipeline for the folder.

    Args:
        config: of the rollout.
        path: of the folder.
        spec: of its model.
        cuda_visible_devices: the engine's GPUs; "" leaves the environment as it is.

    Raises:
        MissingExtraError: vLLM-Omni is not installed.
    """
    settings = config.vllm_omni
    if cuda_visible_devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
    cudnn = not enabled() and config.dtype != "float32"
    attention = settings.rollout_attn_backend or ("CUDNN_ATTN" if cudnn else "TORCH_SDPA")
    os.environ.setdefault("DIFFUSION_ATTENTION_BACKEND", attention)
    # The first sleep makes pinned memory for all weights: by default one thread asks for it page by page, about 1 GB/s.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "pinned_use_cuda_host_register:True,pinned_num_register_threads:8")
    # Compiled graphs stay for the next start; the default folder is emptied with /tmp.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "omni-rollout" / "gelu"))
    if enabled():
        # A kernel library that vLLM imports compiles for CUDA in background processes, which only cost time here.
        os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
    try:
        from vllm_omni import AsyncOmni
    except ImportError as error:
        raise MissingExtraError(
            "The vllm_omni backend needs vLLM-Omni: uv run --extra vllm …, or uv pip install './packages/omni-rollout[vllm]'"
        ) from error
    # The engine collects garbage again and again while it starts, each time over all that these imports made: set it
    # aside. A start takes a seventh of the time.
    gc.freeze()
    keywords: dict[str, Any] = {
        "dtype": config.dtype,
        "enforce_eager": settings.enforce_eager,
        "max_num_seqs": settings.max_num_seqs,
        "request_batch_max_wait_ms": settings.request_batch_max_wait_ms,
        "enable_sleep_mode": settings.enable_sleep_mode is not False,
        "step_execution": settings.step_execution,
        "custom_pipeline_args": {"pipeline_class": pipeline_class(spec, settings.step_execution)},
        "worker_extension_cls": _EXTENSION,
        "max_cpu_loras": 4,
        **({"quantization": "fp8"} if config.fp8 else {}),
        **settings.engine_kwargs,
    }
    if settings.gpus > 1:
        keywords["tensor_parallel_size"] = settings.gpus
    return AsyncOmni(model=path, **keywords)
