"""Spreads the requests of a call over replicas in whole batches, and gives batches that failed to another replica.

A sample's noise depends on (seed, uid, index) alone, so a batch that is tried again on another replica gives the same pictures.
Every request of a call is answered exactly once, or the call fails.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .config import RouterConfig
from .errors import DeadlineError, LifecycleError, ReplicaDeadError, ReplicaError, RolloutError
from .replica import Replica
from .types import GenerationRequest

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

Restart = Callable[[int], Awaitable[Replica]]
DEPTH = 2
"""Batches that a replica holds: one is drawn, the next one waits beside it, so that no replica idles between two."""


@dataclass
class _Work:
    """A batch on its way: positions of its requests in the call, and attempts made so far."""

    places: list[int]
    attempt: int = 0


class Router:
    """Client of several replicas.

    Args:
        replicas: one or more.
        config: deadlines and retries.
        restart: makes a new replica for a position, already at the newest weights; None leaves dead replicas out.
    """

    def __init__(
        self, replicas: Sequence[Replica], config: RouterConfig | None = None, *, restart: Restart | None = None
    ) -> None:
        if not replicas:
            raise RolloutError("Router([]) has nobody to send requests to: give at least one replica.")
        self.replicas: list[Replica] = list(replicas)
        self.config = config or RouterConfig()
        self.counts: Counter[str] = Counter()
        self._restart = restart if self.config.restart else None
        self._load = [0] * len(replicas)  # batches
        self._waiting: dict[Replica, set[asyncio.Timeout]] = defaultdict(set)
        self.queued_s = 0.0
        """Seconds in which requests waited because every replica was full."""
        self._alive = [True] * len(replicas)
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._lost: set[int] = set()
        self.last_restart_error = ""
        self._open = True
        self._waiters: list[asyncio.Future[None]] = []

    async def stream(
        self, requests: Sequence[GenerationRequest], owners: Sequence[int] | None = None
    ) -> AsyncIterator[Any]:
        """Draw all of them; batches come as they are finished, from `Replica.generate`, or with `owners` from `Replica.draw`.

        Raises `DeadlineError` or the last `ReplicaError` once all attempts of a batch failed; `RolloutConfigError` at once.
        """
        size = min(replica.batch_size for replica in self.replicas)
        todo = deque(_Work([*range(i, min(i + size, len(requests)))]) for i in range(0, len(requests), size))
        running: dict[asyncio.Task[Any], _Work] = {}
        try:
            while todo or running:
                self._revive()
                while todo and (place := self._free()) is not None:
                    work = todo.popleft()
                    batch = [requests[i] for i in work.places]
                    if work.attempt:  # a name of its own: the last attempt may still be cancelled under its old one
                        batch = [r.replace(request_id=f"{r.request_id}~{work.attempt}") for r in batch]
                    theirs = owners and [owners[i] for i in work.places]
                    running[self._send(place, batch, theirs)] = work
                change, began = asyncio.ensure_future(self._change()), time.monotonic()
                try:
                    await asyncio.wait({*running, change}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    change.cancel()
                    self.queued_s += (time.monotonic() - began) * bool(todo)
                for task in [task for task in running if task.done()]:
                    work = running.pop(task)
                    try:
                        samples = task.result()
                    except (ReplicaError, DeadlineError):
                        work.attempt += 1
                        if work.attempt > self.config.max_retries:
                            self.counts["failed"] += len(work.places)
                            raise
                        self.counts["retried"] += len(work.places)
                        todo.appendleft(work)
                        continue
                    self.counts["completed"] += len(work.places)
                    yield work.places, samples
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def final_latents(self, samples: TensorDict) -> Sequence[Tensor]:
        """See `loop_base.Client`."""
        return list(samples["final_latents"])

    def _send(self, place: int, batch: list[GenerationRequest], owners: Sequence[int] | None) -> asyncio.Task[Any]:
        replica = self.replicas[place]

        def done(_: asyncio.Task[Any]) -> None:
            if self.replicas[place] is replica:  # and not another one, which came in its place
                self._load[place] -= 1
            self._wake()

        task = asyncio.ensure_future(self._attempt(place, replica, batch, owners))
        self._load[place] += 1
        task.add_done_callback(done)
        return task

    async def _attempt(
        self, place: int, replica: Replica, batch: list[GenerationRequest], owners: Sequence[int] | None
    ) -> Any:
        # The deadline is that of a batch's own work and of the one batch that may lie before it. It starts again whenever the
        # replica finishes a batch: one that is slow is not one that hangs.
        limit, waiting = DEPTH * self.config.request_timeout_s, self._waiting[replica]
        try:
            async with asyncio.timeout(limit or None) as deadline:
                waiting.add(deadline)
                samples = await (replica.draw(batch, owners) if owners else replica.generate(batch))
                for other in waiting if limit else ():
                    if not other.expired():
                        other.reschedule(asyncio.get_running_loop().time() + limit)
                return samples
        except TimeoutError as error:
            self.counts["timeouts"] += len(batch)
            self._leave(place, replica, "timeouts_replicas")  # a replica that hangs takes its whole queue with it
            await self._abort(replica, batch)
            raise DeadlineError(
                f"{replica.name} gave no answer to {len(batch)} requests ({batch[0].request_id!r}, …) in "
                f"{DEPTH} x {self.config.request_timeout_s} s: it hangs or is overloaded. Look at its log, or raise "
                "rollout.router.request_timeout_s."
            ) from error
        except asyncio.CancelledError:
            self.counts["cancelled"] += len(batch)
            await self._abort(replica, batch)
            raise
        except ReplicaDeadError:
            self._leave(place, replica, "deaths")
            raise
        except ReplicaError:
            self.counts["errors"] += len(batch)
            raise
        finally:
            waiting.discard(deadline)

    async def _abort(self, replica: Replica, batch: list[GenerationRequest]) -> None:
        # Short: an abort must not hang on the very replica that hangs.
        try:
            await asyncio.wait_for(replica.abort([request.request_id for request in batch]), 1.0)
        except (TimeoutError, RolloutError):
            self.counts["aborts_lost"] += len(batch)

    def _free(self) -> int | None:
        """Position of the least loaded replica with room; None while there is none."""
        if self._open:
            ready = [i for i, alive in enumerate(self._alive) if alive and self._load[i] < DEPTH]
            if ready:
                return min(ready, key=lambda i: (self._load[i], i))
            if not any(self._alive) and not self._restarts:
                why = f" Last restart: {self.last_restart_error}." if self.last_restart_error else ""
                raise ReplicaDeadError(f"no replica is left: all are dead and none is being started again.{why}")
        return None

    async def _change(self) -> None:
        """Wait until anything about load, life or admission changes."""
        # Futures, not an asyncio.Event: a driver may call asyncio.run once per training step, each with its own loop.
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done() and not waiter.get_loop().is_closed():
                waiter.set_result(None)

    # ---------------------------------------------------------------------------------- replicas coming and going

    def _leave(self, place: int, replica: Replica, reason: str) -> None:
        """Take a replica out once, and start another in its place when that is possible."""
        if self.replicas[place] is not replica or not self._alive[place]:
            return  # another batch of the same replica was here first
        self.counts[reason] += 1
        if self._restart is None and sum(self._alive) == 1 and reason != "deaths":
            return  # the last one: slow is better than nobody
        self._alive[place] = False
        self._revive()
        self._wake()

    def _revive(self) -> None:
        """Start every dead replica again that nobody is starting and that has not failed for good.

        Asked for with each call, because a restart is a task of the event loop that saw the death: a driver that runs
        one loop per step may have ended that loop before the replica was back.
        """
        if self._restart is None:
            return
        for place, alive in enumerate(self._alive):
            task = self._restarts.get(place)
            running = task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop()
            if not alive and not running and place not in self._lost:
                task = asyncio.ensure_future(self._bring_back(place))
                self._restarts[place] = task
                task.add_done_callback(partial(self._came_back, place))

    def _came_back(self, place: int, task: asyncio.Task[None]) -> None:
        if self._restarts.get(place) is task:
            del self._restarts[place]
        self._wake()

    async def _bring_back(self, place: int) -> None:
        assert self._restart is not None
        for _ in range(self.config.max_retries + 1):
            try:
                self.replicas[place] = await self._restart(place)
            except Exception as error:
                self.counts["restart_failures"] += 1
                self.last_restart_error = f"{type(error).__name__}: {error}"
                continue
            self._load[place] = 0
            self._alive[place] = True
            self.counts["restarts"] += 1
            return
        self._lost.add(place)

    def living(self) -> list[Replica]:
        """Replicas that take requests now."""
        return [replica for replica, alive in zip(self.replicas, self._alive, strict=True) if alive]

    async def each(self, work: Callable[[Replica], Awaitable[Any]]) -> list[Any]:
        """Do something with every living replica; answers of those that did it.

        One that turns out to be dead leaves, as when a batch finds it dead. Any other error is raised, the first of
        them, after all have answered.
        """
        living = [(place, self.replicas[place]) for place, alive in enumerate(self._alive) if alive]
        answers = await asyncio.gather(*(work(replica) for _, replica in living), return_exceptions=True)
        done = []
        for (place, replica), answer in zip(living, answers, strict=True):
            if isinstance(answer, ReplicaDeadError):
                self._leave(place, replica, "deaths")
            elif isinstance(answer, BaseException):
                raise answer
            else:
                done.append(answer)
        return done

    async def drain(self, timeout_s: float = 60.0) -> None:
        """Hold new batches and wait until nothing is in flight; `admit` lets them through again."""
        self._open = False
        try:
            async with asyncio.timeout(timeout_s):
                while any(self._load):
                    await self._change()
        except TimeoutError as error:
            raise LifecycleError(f"{sum(self._load)} batches are still in flight after {timeout_s} s.") from error

    def admit(self) -> None:
        """Let batches through again after `drain`."""
        self._open = True
        self._wake()

    def metrics(self) -> dict[str, float]:
        """Counters since the start, in requests (replicas for deaths and restarts, seconds for `queued_s`), as metrics."""
        names = ("completed", "retried", "errors", "timeouts", "deaths", "restarts", "failed", "cancelled")
        values = {f"rollout/{name}": float(self.counts[name]) for name in names}
        values["rollout/queued_s"] = self.queued_s
        return values | {"rollout/replicas_alive": float(sum(self._alive))}
