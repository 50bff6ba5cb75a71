"""The weights of one engine, changed from outside: adapters by new ids, full weights by buckets, each with proof.

Everything here runs under the lifecycle's `syncing`, so nothing samples meanwhile, and asks the worker by RPC.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lora_sync import LoRAReceipt, WeightReceipt

from ..errors import SyncError
from ..lifecycle import Lifecycle
from .shared import write_bucket

if TYPE_CHECKING:
    from lora_sync import LoRAPayload, WeightBucket
    from lora_sync.one_copy import LentLoRA


class EngineWeights:
    """Args:
    rpc: calls a method of the worker extension.
    lifecycle: of the server.
    names: lora_sync's map of the model's layers, as `ModelSpec.lora_names`.
    use_shm: the worker is another process, which reads buckets from shared memory.
    """

    def __init__(self, rpc: Callable[..., Awaitable[Any]], lifecycle: Lifecycle, names: str, *, use_shm: bool) -> None:
        self._rpc, self._lifecycle, self._names, self._use_shm = rpc, lifecycle, names, use_shm
        self.adapters: dict[str, int] = {}
        """Name → the engine's number. Every version of an adapter has a number of its own."""
        self.seconds = 0.0
        """Spent on syncs so far."""
        self._numbers = itertools.count(1)
        self._stream = ExitStack()
        self._sent = self._due = 0

    async def bind(self, payload: LoRAPayload | LentLoRA, adapter: str) -> LoRAReceipt:
        """See `vLLMOmniHttpServer.update_lora`."""
        from .lora_request import make_request

        sent = payload.promise
        with self._lifecycle.syncing(sent.version), self._timed():
            number = next(self._numbers)
            facts = await self._rpc("bind_lora", make_request(payload, number, adapter, self._names), sent.version)
            if facts["equal"] != sent.numel:
                await self._rpc("drop_lora", number)
                raise SyncError(
                    f"adapter {adapter!r}, version {sent.version}: {facts['equal']} of {sent.numel} elements read back "
                    "as they were sent; sync again."
                )
            old = self.adapters.get(adapter)
            self.adapters[adapter] = number
            if old is not None:
                await self._rpc("drop_lora", old)
            return LoRAReceipt(sent.version, None, facts["modules"], facts["tensors"], 0, facts["equal"])

    async def drop(self, adapter: str) -> bool:
        """See `vLLMOmniHttpServer.remove_lora`."""
        if adapter not in self.adapters:
            return False
        with self._lifecycle.syncing(self._lifecycle.policy_version):
            return bool(await self._rpc("drop_lora", self.adapters.pop(adapter)))

    async def replace(self, stream: Iterable[WeightBucket]) -> WeightReceipt:
        """See `vLLMOmniHttpServer.update_weights`."""
        for bucket in stream:
            if receipt := await self.take(bucket):
                return receipt
        raise SyncError("full weights: the stream ended without its last message; send it again.")

    async def take(self, message: WeightBucket) -> WeightReceipt | None:
        """See `vLLMOmniHttpServer.update_weights_bucket`."""
        version, bucket, last = message.version, list(message.tensors.items()), message.last
        if message.index == 0:
            self._stream.enter_context(self._lifecycle.syncing(version, full=True))
            self._sent, self._due = 0, 0
        if message.index != self._due:
            raise SyncError(f"full weights, version {version}: message {message.index} came where {self._due} was due.")
        self._due += 1
        block = write_bucket(bucket) if self._use_shm else None
        options = {"use_shm": self._use_shm, "first": message.index == 0, "last": last, "version": version}
        try:
            with self._timed(), ExitStack() as stack:
                if block is not None:
                    stack.callback(block.unlink)
                    stack.callback(block.close)
                facts = await self._rpc(
                    "update_weights_from_ipc", bucket=block.name if block is not None else bucket, **options
                )
            self._sent += len(bucket)
            if not last:
                return None
            if facts["unwritten"] or (facts["sent"] is not None and facts["sent"] != facts["held"]):
                raise SyncError(
                    f"full weights, version {version}: {facts['unwritten']} of {facts['elements']} elements were not "
                    f"written, sum sent {facts['sent']}, held {facts['held']}. The stream must hold every transformer "
                    "weight of this architecture exactly once."
                )
        except BaseException as error:
            self._stream.__exit__(type(error), error, error.__traceback__)
            raise
        self._stream.close()
        return WeightReceipt(version, self._sent, facts["held"])

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start
