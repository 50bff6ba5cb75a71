"""vLLM's CPU platform on a wheel that was built for CUDA and therefore has no CPU kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.platforms.cpu import CpuPlatform


def _silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, value = x.chunk(2, dim=-1)
    out.copy_(F.silu(gate) * value)


def _gelu_new(out: Tensor, x: Tensor) -> None:
    out.copy_(F.gelu(x, approximate="tanh"))


# vLLM's layers look these up when they are built, also where they then compute with plain torch.
_KERNELS: dict[str, Callable[[Tensor, Tensor], None]] = {"silu_and_mul": _silu_and_mul, "gelu_new": _gelu_new}
_library = torch.library.Library("_C", "FRAGMENT")


class CudaWheelCpuPlatform(CpuPlatform):
    """vLLM's own CPU platform; plain torch does what its compiled kernels would do."""

    @classmethod
    def import_kernels(cls) -> None:
        """Register the few kernels that text encoders and transformers here ask for."""
        for name, function in _KERNELS.items():
            if not hasattr(torch.ops._C, name):
                _library.define(f"{name}(Tensor! out, Tensor x) -> ()")
                _library.impl(name, function, "CPU")

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """vLLM's settings, and nothing is compiled.

        vLLM compiles single activations even when a model runs eagerly. On a CPU that asks for a C++ compiler, and torch
        keeps the result in a cache whose key leaves out the vector width: another width then reads it and computes half.
        """
        from vllm.config import CompilationMode  # it imports this platform

        super().check_and_update_config(vllm_config)
        vllm_config.compilation_config.mode = CompilationMode.NONE
