"""A `DiffusersBackend` with its own weights, as an asyncio object that a Ray actor holds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .backend import Health, WeightReceipt
from .diffusers_backend import DiffusersBackend
from .types import DiffusionOutput, GenerationRequest


class HostedDiffusersBackend:
    """Work goes through one thread, in order; `health` and `abort` answer while it runs.

    Args:
        path: diffusers pipeline folder.
        dtype: name of the transformer's dtype.
        cuda_visible_devices: the GPU it may use, beside a trainer; None leaves the environment as it is.
        options: for `DiffusersBackend.from_pretrained`.
    """

    def __init__(
        self, path: str, dtype: str = "float32", *, cuda_visible_devices: str | None = None, **options: Any
    ) -> None:
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices  # before CUDA is first used in this process
        self.backend = DiffusersBackend.from_pretrained(path, dtype=getattr(torch, dtype), **options)
        self._thread = ThreadPoolExecutor(max_workers=1)

    async def _run(self, method: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(method, *args))

    async def generate_sequences(self, requests: Sequence[GenerationRequest]) -> list[DiffusionOutput]:
        """See `DiffusersBackend.generate`."""
        outputs: list[DiffusionOutput] = await self._run(self.backend.generate, requests)
        return outputs

    async def update_lora(self, payload: Any, adapter: str = "default") -> Any:
        """See `DiffusersBackend.update_lora`."""
        return await self._run(self.backend.update_lora, payload, adapter)

    async def remove_lora(self, adapter: str = "default") -> bool:
        """See `DiffusersBackend.remove_lora`."""
        return bool(await self._run(self.backend.remove_lora, adapter))

    async def update_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> WeightReceipt:
        """See `DiffusersBackend.update_weights`."""
        receipt: WeightReceipt = await self._run(self.backend.update_weights, named, version)
        return receipt

    async def sleep(self, level: int = 1) -> None:
        """See `DiffusersBackend.sleep`."""
        await self._run(self.backend.sleep, level)

    async def wake_up(self) -> None:
        """See `DiffusersBackend.wake_up`."""
        await self._run(self.backend.wake_up)

    async def pause(self) -> None:
        """See `DiffusersBackend.pause`."""
        await self._run(self.backend.pause)

    async def resume(self) -> None:
        """See `DiffusersBackend.resume`."""
        await self._run(self.backend.resume)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """See `DiffusersBackend.abort`."""
        return self.backend.abort(request_ids)

    async def health(self) -> Health:
        """See `DiffusersBackend.health`."""
        return self.backend.health()

    async def pid(self) -> int:
        """Of this process."""
        return os.getpid()
