"""An object in a Ray actor, called by its methods and not by their names.

    worker = Remote(actor, "worker-0")
    answer = await worker.call(Worker.method, argument)

An editor follows `Worker.method`, and a type checker sees its arguments and its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from lora_sync import LoRASyncError

from .errors import (
    AbortedError,
    LifecycleError,
    ReplicaDeadError,
    ReplicaError,
    RolloutConfigError,
    RolloutError,
    SyncError,
)

if TYPE_CHECKING:
    from ray import ObjectRef

P = ParamSpec("P")
R = TypeVar("R")

_OWN_ERRORS = (RolloutConfigError, LifecycleError, SyncError, AbortedError, LoRASyncError)
ASIDE = "aside"
"""Concurrency group of a synchronous actor for calls that do not wait for the work at hand; see `Remote.aside`."""


class Remote:
    """Handle of a Ray actor.

    Args:
        actor: Ray's handle.
        name: shown in errors.
        asynchronous: whether its methods are coroutines, which run beside each other; else `aside` needs an actor that was made
            with `concurrency_groups={ASIDE: 1}`.
    """

    def __init__(self, actor: Any, name: str, *, asynchronous: bool = False) -> None:
        self.actor, self.name, self.asynchronous = actor, name, asynchronous

    def submit(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """Start a call. The answer is Ray's reference, for `ray.get` or `await`; errors come out as Ray raises them."""
        reference: ObjectRef[R] = getattr(self.actor, method.__name__).remote(*args, **kwargs)
        return reference

    @overload
    async def call(
        self, method: Callable[Concatenate[Any, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    async def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R: ...
    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call and wait; errors are this package's (see `typed_error`)."""
        return await self._answer(self.submit(method, *args, **kwargs))

    async def parts(self, method: Callable[..., Any], *args: Any, returns: int) -> list[Any]:
        """`call` of a method that returns a tuple: its first part, and references to the others, which stay where they are."""
        several = getattr(self.actor, method.__name__).options(num_returns=returns)
        first, *others = several.remote(*args)
        return [await self._answer(first), *others]

    async def aside(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`call` that does not queue behind the actor's work."""
        return await self._answer(self.submit_aside(method, *args, **kwargs))

    def submit_aside(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """`submit` that does not queue behind the actor's work."""
        remote = getattr(self.actor, method.__name__)
        remote = remote if self.asynchronous else remote.options(concurrency_group=ASIDE)
        reference: ObjectRef[R] = remote.remote(*args, **kwargs)
        return reference

    async def _answer(self, reference: Any) -> Any:
        try:
            return await reference
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise typed_error(self.name, error) from error


def typed_error(name: str, error: BaseException) -> RolloutError | LoRASyncError:
    """Whatever a remote call raised, as one of this package's errors.

    A bad request stays a `RolloutConfigError`, a bad sync a `LoRASyncError` (no use in trying it elsewhere); a dead process becomes
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
