"""The scorer service's queue: samples of many requests become batches for one reward, within fixed bounds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .base import RewardResult, RewardSample
from .errors import RewardServiceError, RewardTimeoutError, require
from .manager import ImageRewardManager


class OverloadedError(RewardServiceError):
    """The queue is full; ask again later."""


@dataclass(frozen=True)
class Limits:
    """What the service accepts.

    Args:
        body_bytes: of one request
        inflight_bytes: of all requests being read or scored
        request_samples: in one request
        queue_samples: waiting or being scored
        timeout_s: from a request's arrival to its answer
        threads: batches scored at a time (1 for models; more for rewards that wait or leave the interpreter lock)
        batch_wait_s: how long a batch that is not full waits for more samples
    """

    body_bytes: int = 64 << 20
    inflight_bytes: int = 512 << 20
    request_samples: int = 256
    queue_samples: int = 2048
    timeout_s: float = 120.0
    threads: int = 1
    batch_wait_s: float = 0.003

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(0 < value < float("inf"), f"{name}={value!r} must be a positive number")


class Batcher:
    """Lives in one event loop; the reward runs in `limits.threads` threads."""

    def __init__(self, manager: ImageRewardManager, batch_size: int, limits: Limits) -> None:
        self._manager, self._batch_size, self._limits = manager, batch_size, limits
        self._queue: asyncio.Queue[tuple[RewardSample, asyncio.Future[RewardResult]]] = asyncio.Queue()
        self._threads = ThreadPoolExecutor(limits.threads, "scorer")
        self._tasks: list[asyncio.Task[None]] = []
        self._started: dict[int, float] = {}  # start of the batch that each task is scoring
        self.pending = 0
        self.counts: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to work; call inside the event loop."""
        self._tasks = [asyncio.create_task(self._work(i)) for i in range(self._limits.threads)]

    async def stop(self) -> None:
        """Stop working; whatever still waits is cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def stuck_s(self) -> float:
        """How long the oldest running batch has been running, in seconds."""
        return max((time.monotonic() - start for start in self._started.values()), default=0.0)

    async def score(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Results of one request, in order. Raises `OverloadedError` at once when there is no room, and
        `RewardTimeoutError` when the time is up."""
        # Those whose caller has gone stay in the queue until their turn, with their pictures.
        waiting = max(self.pending, self._queue.qsize())
        if waiting + len(samples) > self._limits.queue_samples:
            self.counts["rejected"] += len(samples)
            raise OverloadedError(
                f"{waiting} samples wait already, and {len(samples)} more would pass {self._limits.queue_samples}."
            )
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in samples]
        self.pending += len(samples)
        try:
            for pair in zip(samples, futures, strict=True):
                self._queue.put_nowait(pair)
            return await asyncio.wait_for(asyncio.gather(*futures), self._limits.timeout_s)
        except TimeoutError as error:
            self.counts["timed_out"] += len(samples)
            raise RewardTimeoutError(f"no score in {self._limits.timeout_s} s.") from error
        finally:
            for future in futures:
                future.cancel()  # of no effect on those that are done; the others are skipped when their turn comes
            self.pending -= len(samples)

    async def _work(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [item for item in await self._collect() if not item[1].done()]
            if not batch:
                continue
            self._started[number] = start = time.monotonic()
            results = await loop.run_in_executor(self._threads, self._manager.score, [sample for sample, _ in batch])
            del self._started[number]
            self.counts["batches"] += 1
            self.counts["batch_us"] += round((time.monotonic() - start) * 1e6)
            for (_, future), result in zip(batch, results, strict=True):
                self.counts["scored" if result.ok else "failed"] += 1
                if not future.done():
                    future.set_result(result)

    async def _collect(self) -> list[tuple[RewardSample, asyncio.Future[RewardResult]]]:
        batch = [await self._queue.get()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.batch_wait_s):
                while len(batch) < self._batch_size:
                    batch.append(await self._queue.get())
        return batch
