"""Ray's object store: the sender puts bytes, a small mailbox actor tells receivers where."""

from __future__ import annotations

import os
from typing import Any

from ..codec import as_buffer, decode, unseal, write_into
from ..errors import MissingExtraError, TransportError
from ..message import Message, encode, restore
from .base import DEFAULT_TIMEOUT, Deadline, Transport


class _Mailbox:
    """Holds the references of the latest messages; runs as a Ray actor with no CPU reserved."""

    def __init__(self, keep: int) -> None:
        import asyncio

        self._items: list[tuple[int, list[Any]]] = []
        self._count, self._keep = 0, keep
        self._news = asyncio.Condition()

    async def put(self, boxed: list[Any]) -> int:
        async with self._news:
            self._items = [*self._items, (self._count, boxed)][-self._keep :]
            self._count += 1
            self._news.notify_all()
        return self._count

    async def get(self, after: int, timeout: float) -> tuple[int, list[Any]] | None:
        import asyncio

        async with self._news:
            try:
                await asyncio.wait_for(self._news.wait_for(lambda: self._count > after), timeout)
            except TimeoutError:
                return None
            return next(item for item in self._items if item[0] >= after)


class RayTransport(Transport):
    """Any number of receivers in a Ray cluster; pass the object itself to actors and tasks.

    Args:
        keep: messages that stay available to receivers that have not come yet.
    """

    def __init__(self, *, keep: int = 2) -> None:
        ray = _ray()
        self._mailbox = ray.remote(num_cpus=0)(_Mailbox).remote(keep)
        self._next = 0

    def send(self, message: Message, *, timeout: float = DEFAULT_TIMEOUT) -> None:
        import numpy as np

        ray, plan = _ray(), encode(message)
        data = np.empty(plan.total, dtype=np.uint8)
        write_into(as_buffer(data), plan, message.tensors)
        deadline = Deadline(timeout, f"sending version {message.version} through Ray")
        reference = ray.put(data)
        self._ask(self._mailbox.put.remote([reference]), deadline)

    def receive(self, *, timeout: float = DEFAULT_TIMEOUT, check: bool = True) -> Message:
        deadline = Deadline(timeout, "receiving through Ray")
        item = self._ask(
            self._mailbox.get.remote(self._next, timeout), Deadline(timeout + 5.0, "receiving through Ray")
        )
        if item is None:
            raise deadline.error()
        number, (reference,) = item
        data = self._ask(reference, Deadline(max(deadline.left, 5.0), "fetching a message from the object store"))
        tensors, metadata = decode(data, "Ray object")  # read-only views of the store's own memory
        message = restore(tensors, unseal(metadata, "Ray object"), check=check, origin="Ray object")
        self._next = number + 1
        return message

    def close(self) -> None:
        import contextlib

        with contextlib.suppress(Exception):  # Ray may be gone already
            _ray().kill(self._mailbox)

    @staticmethod
    def _ask(reference: Any, deadline: Deadline) -> Any:
        ray = _ray()
        try:
            return ray.get(reference, timeout=deadline.left)
        except ray.exceptions.GetTimeoutError:
            raise deadline.error() from None
        except ray.exceptions.RayError as error:
            raise TransportError(f"{deadline.doing}: {type(error).__name__}: {error}") from error


def _ray() -> Any:
    # Else Ray's hook, under `uv run`, starts every worker through `uv run` in an uploaded copy of the folder.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("RayTransport needs Ray: pip install 'lora-sync[ray]'.") from error
    return ray
