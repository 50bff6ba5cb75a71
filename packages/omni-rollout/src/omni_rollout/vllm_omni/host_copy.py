"""The copy of an engine's weights in host memory: made while the first samples are drawn, and kept while the weights stay.

The engine itself asks for page-locked memory when it falls asleep, which takes seconds for every ten gigabytes, and copies its
weights there each time. Weights that did not change since need neither.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

_TAG = "weights"
"""Of what the engine allocates while it loads."""


class HostCopy:
    """Args:
    allocator: vLLM's `CuMemAllocator`, whose `pointer_to_data` says what lies where, and what is asleep.
    copy: (to, from, bytes) of two addresses, waited for.
    release: gives the device's memory of an allocation's handle back.
    """

    def __init__(self, allocator: Any, copy: Callable[[int, int, int], Any], release: Callable[[Any], Any]) -> None:
        self.allocator, self._copy, self._release = allocator, copy, release
        self._kept: dict[int, Tensor] = {}
        self._filling: Future[None] | None = None

    def begin(self) -> None:
        """Copy all weights, in a thread."""
        self.forget()
        pool = ThreadPoolExecutor(1, "host-copy")
        self._filling = pool.submit(self._fill)
        pool.shutdown(wait=False)

    def _fill(self) -> None:
        for address, data in list(self.allocator.pointer_to_data.items()):
            if data.tag == _TAG:
                size = data.handle[1]
                host = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
                self._copy(host.data_ptr(), address, size)
                self._kept[address] = host

    def put_away(self) -> int:
        """Give the memory of all weights that have a copy back to the device; the engine's own `wake_up` brings them back.

        Nothing may run on the device. Returns the bytes.
        """
        self._filled()
        freed = 0
        for address, host in self._kept.items():
            data = self.allocator.pointer_to_data.get(address)
            if data is not None and not data.is_asleep:
                data.cpu_backup_tensor = host
                self._release(data.handle)
                data.is_asleep = True
                freed += host.nbytes
        return freed

    def forget(self) -> None:
        """The weights change: the next sleep copies them as the engine does."""
        self._filled()
        self._kept.clear()

    def _filled(self) -> None:
        if self._filling is not None:
            self._filling.result()
