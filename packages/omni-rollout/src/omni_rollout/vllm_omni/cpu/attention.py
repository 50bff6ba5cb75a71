"""Attention on the CPU: the engine's SDPA implementation, called without its dispatch over device types."""

from typing import Any

from torch import Tensor
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSDPAImpl(SDPAImpl):
    """`AttentionImpl.forward` knows no out-of-tree platform and raises; the SDPA body itself is device-neutral."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
        return self._forward_impl(query, key, value, attn_metadata, mask_mode="broadcast_k")


class CpuSDPABackend(SDPABackend):
    """Names the implementation above."""

    @staticmethod
    def get_impl_cls() -> type[CpuSDPAImpl]:
        return CpuSDPAImpl
