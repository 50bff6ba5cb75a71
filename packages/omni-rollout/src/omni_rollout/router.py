"""Spreads requests over replicas: least loaded first, a prompt's group kept together, failures tried again elsewhere.

A group (all samples of one uid) stays on one replica as long as it is alive, because there its prompt is encoded
already. A sample's noise depends on (seed, uid, index) alone, so a request tried again on another replica gives the
same picture, and nothing is lost or drawn twice: each caller waits for exactly one output.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from .config import RouterConfig
from .errors import DeadlineError, LifecycleError, ReplicaDeadError, ReplicaError, RolloutError
from .replica import Replica
from .types import DiffusionOutput, GenerationRequest

Restart = Callable[[int], Awaitable[Replica]]


class Router:
    """Client of several replicas; the `llm_client` of the agent loop.

    Args:
        replicas: one or more.
        config: limits, deadlines, retries.
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
        self._load = [0] * len(replicas)
        self._alive = [True] * len(replicas)
        self._home: dict[str, int] = {}
        self._group: Counter[str] = Counter()
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._lost: set[int] = set()
        self.last_restart_error = ""
        self._open = True
        self._waiters: list[asyncio.Future[None]] = []

    async def generate(self, request: GenerationRequest) -> DiffusionOutput:
        """One sample, from whichever replica can give it.

        Raises `DeadlineError` or the last `ReplicaError` once all attempts failed; `RolloutConfigError` at once.
        """
        self._group[request.uid] += 1
        self._revive()
        try:
            failure: RolloutError | None = None
            name = request.request_id
            for attempt in range(self.config.max_retries + 1):
                if attempt:
                    self.counts["retried"] += 1
                    # A name of its own: the last attempt may still be cancelled somewhere under its old one.
                    request = request.replace(request_id=f"{name}~{attempt}")
                place = await self._place(request.uid)
                try:
                    output = await self._attempt(place, request)
                except (ReplicaError, DeadlineError) as error:
                    failure = error
                    continue
                self.counts["completed" if output.stop_reason == "completed" else "aborted"] += 1
                return output
            self.counts["failed"] += 1
            assert failure is not None
            raise failure
        finally:
            self._group[request.uid] -= 1
            if not self._group[request.uid]:
                del self._group[request.uid]
                self._home.pop(request.uid, None)

    async def _attempt(self, place: int, request: GenerationRequest) -> DiffusionOutput:
        replica = self.replicas[place]
        self._load[place] += 1
        try:
            timeout = self.config.request_timeout_s
            if not timeout:
                return await replica.generate(request)
            return await asyncio.wait_for(replica.generate(request), timeout)
        except TimeoutError as error:
            self.counts["timeouts"] += 1
            self._leave(place, replica, "timeouts_replicas")  # a replica that hangs takes its whole queue with it
            await self._abort(replica, request)
            raise DeadlineError(
                f"request {request.request_id!r} got no answer in {self.config.request_timeout_s} s: the replica "
                "hangs or is overloaded. Look at its log, or raise rollout.router.request_timeout_s."
            ) from error
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            await self._abort(replica, request)
            raise
        except ReplicaDeadError:
            self._leave(place, replica, "deaths")
            raise
        except ReplicaError:
            self.counts["errors"] += 1
            self._home.pop(request.uid, None)  # try the next attempt wherever there is least load
            raise
        finally:
            self._load[place] -= 1
            self._wake()

    async def _abort(self, replica: Replica, request: GenerationRequest) -> None:
        # Shielded and short: an abort must not hang on the very replica that hangs.
        try:
            await asyncio.wait_for(replica.abort([request.request_id]), 1.0)
        except (TimeoutError, RolloutError):
            self.counts["aborts_lost"] += 1

    async def _place(self, uid: str) -> int:
        """Position of a replica with room: the group's own, else the least loaded. Waits while there is none."""
        limit = self.config.max_queue_per_replica
        while True:
            if self._open:
                home = self._home.get(uid)
                if home is not None and self._alive[home] and self._load[home] < limit:
                    return home
                ready = [i for i, alive in enumerate(self._alive) if alive and self._load[i] < limit]
                if ready and (home is None or not self._alive[home]):
                    place = min(ready, key=lambda i: (self._load[i], i))
                    self._home[uid] = place
                    return place
                if not any(self._alive) and not self._restarts:
                    why = f" Last restart: {self.last_restart_error}." if self.last_restart_error else ""
                    raise ReplicaDeadError(f"no replica is left: all are dead and none is being started again.{why}")
                self.counts["waited"] += 1
            await self._change()

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
            return  # another request of the same replica was here first
        self.counts[reason] += 1
        if self._restart is None and sum(self._alive) == 1 and reason != "deaths":
            return  # the last one: slow is better than nobody
        self._alive[place] = False
        self._home = {uid: home for uid, home in self._home.items() if home != place}
        self._revive()
        self._wake()

    def _revive(self) -> None:
        """Start every dead replica again that nobody is starting and that has not failed for good.

        Asked for with each request, because a restart is a task of the event loop that saw the death: a driver that runs
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

    async def broadcast(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a backend method on every living replica; the first error is raised after all have answered."""
        return await self.each(lambda replica: replica.call(method, *args, **kwargs))

    async def each(self, work: Callable[[Replica], Awaitable[Any]]) -> list[Any]:
        """Do something with every living replica; answers of those that did it.

        One that turns out to be dead leaves, as when a request finds it dead. Any other error is raised, the first of
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
        """Hold new requests and wait until nothing is in flight; `admit` lets them through again."""
        self._open = False
        try:
            async with asyncio.timeout(timeout_s):
                while any(self._load):
                    await self._change()
        except TimeoutError as error:
            raise LifecycleError(f"{sum(self._load)} requests are still in flight after {timeout_s} s.") from error

    def admit(self) -> None:
        """Let requests through again after `drain`."""
        self._open = True
        self._wake()

    def metrics(self) -> dict[str, float]:
        """Counters since the start, named for the metrics file."""
        names = (
            "completed",
            "aborted",
            "retried",
            "errors",
            "timeouts",
            "deaths",
            "restarts",
            "failed",
            "cancelled",
            "waited",
        )
        values = {f"rollout/{name}": float(self.counts[name]) for name in names}
        return values | {"rollout/replicas_alive": float(sum(self._alive))}
