"""The engine's worker on a CPU: weights stay loadable, and sleep is emulated."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import vllm.model_executor.layers.utils as layer_utils
from torch import nn
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker


def _plain_linear(layer: nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = nn.functional.linear  # type: ignore[assignment]  # a function, as vLLM's own code puts there


@contextmanager
def _unpacked_weights() -> Iterator[None]:
    """While a model loads: leave Linear weights as they are.

    vLLM's CPU path repacks each Linear weight after loading and empties the original, after which no weight sync can
    work. The function it calls for that is looked up at each call, so it is swapped for the time of loading only.
    """
    repack = layer_utils.dispatch_cpu_unquantized_gemm
    layer_utils.dispatch_cpu_unquantized_gemm = _plain_linear
    try:
        yield
    finally:
        layer_utils.dispatch_cpu_unquantized_gemm = repack


class CpuDiffusionWorker(DiffusionWorker):
    """Same RPC names and answers as the GPU worker. Sleeping moves parameter storage aside, as the GPU's allocator does."""

    _stash: dict[str, torch.Tensor]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with _unpacked_weights():
            super().load_model(*args, **kwargs)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()

    def sleep(self, level: int = 1) -> int:
        self._stash, freed = {}, 0
        for name, parameter in self.model_runner.pipeline.named_parameters():
            freed += parameter.numel() * parameter.element_size()
            self._stash[name] = parameter.data
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        return freed

    def wake_up(self, tags: list[str] | None = None) -> bool:
        for name, parameter in self.model_runner.pipeline.named_parameters():
            if name in getattr(self, "_stash", {}):
                parameter.data = self._stash.pop(name)
        return True
