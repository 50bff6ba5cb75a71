"""An out-of-tree CPU platform for vLLM-Omni."""

from typing import Any

import psutil
import torch
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from .base import CudaWheelCpuPlatform


class CpuOmniPlatform(OmniPlatform, CudaWheelCpuPlatform):
    """One CPU seen as one device whose memory is the machine's."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "vllm_omni.worker.gpu_ar_worker.GPUARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "vllm_omni.worker.gpu_generation_worker.GPUGenerationWorker"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        return "omni_rollout.vllm_omni.cpu.attention.CpuSDPABackend"

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        return "omni_rollout.vllm_omni.cpu.worker.CpuDiffusionWorker"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        return None

    @classmethod
    def get_free_memory(cls, device: Any = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)

    # The platform's __getattr__ would look the following up in torch.cpu, which has none of them.

    @classmethod
    def is_initialized(cls) -> bool:
        return True

    @classmethod
    def current_device(cls) -> int:
        return 0

    @classmethod
    def empty_cache(cls) -> None:
        return None

    @classmethod
    def reset_peak_memory_stats(cls, device: Any = None) -> None:
        return None

    @classmethod
    def max_memory_reserved(cls, device: Any = None) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, device: Any = None) -> int:
        return 0
