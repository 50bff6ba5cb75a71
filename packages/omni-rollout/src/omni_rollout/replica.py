"""The driver's side of a backend: requests in, micro-batched remote calls out.

A replica turns many small `await generate(request)` into few remote calls. Calls made in the same turn of the event
loop travel together, in call order, in chunks of at most `max_batch_size`; chunks leave in order. So a driver that
asks for the same samples in the same order makes the same batches, which is what makes runs repeatable.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import Tensor

from .backend import Health, WeightReceipt
from .errors import LifecycleError, ReplicaDeadError, ReplicaError, RolloutConfigError, RolloutError, SyncError
from .placement import import_ray
from .types import DiffusionOutput, GenerationRequest

_OWN_ERRORS = (RolloutConfigError, LifecycleError, SyncError)


class Replica(ABC):
    """What the router and the trainer need from a replica, whichever backend is behind it."""

    name: str
    handle: Any

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> DiffusionOutput:
        """One sample. Raises `ReplicaError` for a failure of the replica, `RolloutConfigError` for a bad request."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Any backend method by name; errors are typed as for `generate`."""
        if self.handle is None:
            raise ReplicaDeadError(f"{self.name} is not running: it was closed, or never launched.")
        try:
            return await getattr(self.handle, method).remote(*args, **kwargs)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise typed_error(self.name, error) from error

    async def update_lora(self, payload: Any, adapter: str = "default") -> Any:
        """Bind a `LoRAPayload`, or the one that a Ray reference stands for; returns its `LoRAReceipt`."""
        return await self.call("update_lora", payload, adapter)

    async def update_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> WeightReceipt:
        """Replace all transformer weights."""
        receipt: WeightReceipt = await self.call("update_weights", list(named), version)
        return receipt

    async def sleep(self) -> None:
        """Give the device's memory back."""
        await self.call("sleep")

    async def wake_up(self) -> None:
        """Bring the weights back."""
        await self.call("wake_up")

    async def pause(self) -> None:
        """Take no new requests."""
        await self.call("pause")

    async def resume(self) -> None:
        """Take requests again."""
        await self.call("resume")

    async def health(self) -> Health:
        """State and counters."""
        health: Health = await self.call("health")
        return health

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Cancel requests; 0 when the replica is gone."""
        try:
            return int(await self.handle.abort.remote(list(request_ids)))
        except Exception:
            return 0

    async def close(self) -> None:
        """End whatever runs behind the handle."""
        handle, self.handle = self.handle, None
        if isinstance(handle, LocalHandle):
            handle.close()
        elif handle is not None:
            import_ray().kill(handle)


class LocalHandle:
    """An object in this process behind the call form of a Ray actor handle: `handle.method.remote(*args)` is awaitable.

    One worker thread runs generation and weight updates in order; `abort` and `health` answer at once, as they would
    from an actor with a second concurrency group.
    """

    _IMMEDIATE = ("abort", "health")

    def __init__(self, target: Any) -> None:
        self.target = target
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")

    def __getattr__(self, name: str) -> _LocalMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        return _LocalMethod(getattr(self.target, name), None if name in self._IMMEDIATE else self._pool)

    def close(self) -> None:
        """End the worker thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _LocalMethod:
    def __init__(self, method: Any, pool: ThreadPoolExecutor | None) -> None:
        self._method, self._pool = method, pool

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Start the call; the future holds its result or error."""
        if inspect.iscoroutinefunction(self._method):
            return asyncio.ensure_future(self._method(*args, **kwargs))
        return asyncio.get_running_loop().run_in_executor(self._pool, partial(self._method, *args, **kwargs))


class DiffusersReplica(Replica):
    """Client of one backend actor (or `LocalHandle`).

    Args:
        handle: has `generate_sequences.remote(list[GenerationRequest])` that returns an awaitable of the outputs.
        max_batch_size: most requests in one remote call.
        name: shown in errors and metrics.
    """

    def __init__(self, handle: Any, max_batch_size: int = 64, name: str = "replica-0") -> None:
        if max_batch_size < 1:
            raise RolloutConfigError(f"max_batch_size={max_batch_size!r} must be at least 1.")
        self.handle, self.max_batch_size, self.name = handle, max_batch_size, name
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[DiffusionOutput]]] = []
        self._chunks: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerationRequest) -> DiffusionOutput:
        """One sample, denoised together with whatever else was asked for in the same turn of the event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[DiffusionOutput] = loop.create_future()
        self._waiting.append((request, future))
        if len(self._waiting) == 1:
            loop.call_soon(self._flush_when_quiet, 1)
        return await future

    def _flush_when_quiet(self, seen: int) -> None:
        """Send once a turn of the loop brought no further request."""
        if len(self._waiting) > seen:
            asyncio.get_running_loop().call_soon(self._flush_when_quiet, len(self._waiting))
            return
        waiting = [item for item in self._waiting if not item[1].done()]  # callers may have given up meanwhile
        self._waiting = []
        for start in range(0, len(waiting), self.max_batch_size):
            chunk = waiting[start : start + self.max_batch_size]
            # Sent here, not inside the task: chunks must leave in order whatever the task scheduler does.
            try:
                reply = self.handle.generate_sequences.remote([request for request, _ in chunk])
            except Exception as error:  # a dead handle may fail at once
                self._fail(chunk, error)
                continue
            task = asyncio.ensure_future(self._collect(chunk, reply))
            self._chunks.add(task)
            task.add_done_callback(self._chunks.discard)

    async def _collect(
        self, chunk: list[tuple[GenerationRequest, asyncio.Future[DiffusionOutput]]], reply: Any
    ) -> None:
        try:
            outputs = await reply
            if len(outputs) != len(chunk):
                raise ReplicaError(f"{self.name} answered {len(chunk)} requests with {len(outputs)} outputs.")
        except Exception as error:
            self._fail(chunk, error)
            return
        for (_, future), output in zip(chunk, outputs, strict=True):
            if not future.done():
                future.set_result(output)

    def _fail(self, chunk: list[tuple[GenerationRequest, asyncio.Future[DiffusionOutput]]], error: Exception) -> None:
        typed = typed_error(self.name, error)
        for _, future in chunk:
            if not future.done():
                future.set_exception(typed)


def typed_error(name: str, error: BaseException) -> RolloutError:
    """Whatever a remote call raised, as one of this package's errors.

    A bad request stays a `RolloutConfigError` (no use in trying it elsewhere); a dead process becomes
    `ReplicaDeadError`; everything else `ReplicaError`. Ray's own classes are recognised by name so that ray need not
    be installed.
    """
    cause = getattr(error, "cause", None)
    inner = cause if isinstance(cause, BaseException) else error
    if isinstance(inner, _OWN_ERRORS):
        return inner
    kinds = {base.__name__ for base in type(error).__mro__}
    if kinds & {"RayActorError", "ActorDiedError", "ActorUnavailableError", "WorkerCrashedError"}:
        return ReplicaDeadError(f"{name} is gone: {error}")
    if isinstance(inner, ReplicaError):
        return inner
    if isinstance(inner, ConnectionError):
        return ReplicaDeadError(f"{name} is gone: {inner}")
    return ReplicaError(f"{name} failed: {type(inner).__name__}: {inner}")
