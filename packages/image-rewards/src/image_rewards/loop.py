"""`RewardLoopManager`: a pool of reward processes that scores each sample the moment it is finished.

    driver: score(sample) -> queue -> the least loaded worker -> result     (each sample's set once)

A worker gets a sample only when it has room. So when it dies, exactly its samples are known: they are queued again and the
worker is replaced. Nobody waits for the late answer of a worker that was replaced, so no sample counts twice. `policy` says
what a failure means for training; the default is to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

import numpy as np

from .base import Inputs, Reward, RewardResult, RewardSample, check_image
from .errors import (
    RewardError,
    RewardTimeoutError,
    RewardWorkerError,
    check_counts,
    missing_extra,
    require,
)
from .manager import ImageRewardManager, samples_of
from .quality import look_of
from .registry import absolute, use_folder

Policy = Literal["required", "skip", "value"]


@dataclass(frozen=True)
class Stored:
    """A sample in Ray's store, in the place of `RewardSample.image`: row `row` of the arrays behind `reference`, {inputs: array}.

    The reward worker fetches it, not the process that asks for the score.
    """

    reference: Any
    row: int


class _Call:
    """Samples that were asked for together, until all have results."""

    def __init__(self, count: int) -> None:
        self.results: list[Any] = [None] * count
        self.left = count
        self.done: Future[list[RewardResult]] = Future()

    def put(self, place: int, result: RewardResult) -> None:
        self.results[place] = result
        self.left -= 1
        if not self.left and not self.done.done():  # a cancelled caller has no use for it
            self.done.set_result(self.results)


@dataclass
class _Job:
    sample: RewardSample
    call: _Call
    place: int
    attempts: int = 0
    alone: bool = False  # after a crash: never again in one batch with others


@dataclass
class _Slot:
    """One place in the pool; its worker is replaced when it dies."""

    actor: Any
    busy: int = 0
    replaced: int = 0


@dataclass
class LoopStats:
    """What happened so far. `scored` counts results: it equals `asked` once all is done."""

    asked: int = 0
    scored: int = 0
    failed: int = 0
    retried: int = 0
    workers_replaced: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class RewardLoopManager:
    """Owns `num_workers` Ray actors that score samples.

    Args:
        reward, options: a name and its options, as for `image_rewards.load`; or a `Reward`, its class, or a function. Workers
            search this process's working folder too, so on another machine it must be a shared one
        policy: "required": a sample without a score raises `RewardError`; "skip": its result has score NaN and
            the error (the trainer leaves it out); "value": its score is `value`, with the error
        max_retries: further attempts after a crash, a timeout or a failure that may be gone the next time
        timeout_s: longest time for one attempt; the worker is then killed and replaced. None = no limit
        num_cpus, num_gpus: what each worker reserves in Ray; fractions share
        concurrency: samples in flight per worker; more than 1 is for rewards that wait (servers, judges)
        batch_size: most samples handed over at once; None = the reward's own
        placement_group: put worker i into bundle i of this Ray placement group (colocated with whoever else is in it)
        beside: (Ray node id, GPU id) of a GPU for each worker that somebody else has reserved; it sees that one alone
    """

    def __init__(
        self,
        reward: str | Reward | type[Reward] | Callable[..., Any],
        options: Mapping[str, Any] | None = None,
        *,
        num_workers: int = 2,
        policy: Policy = "required",
        value: float = 0.0,
        max_retries: int = 2,
        timeout_s: float | None = 300.0,
        num_cpus: float = 0.1,
        num_gpus: float = 0.0,
        concurrency: int = 1,
        batch_size: int = 1,
        placement_group: Any = None,
        beside: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        known = get_args(Policy)
        require(policy in known, f"policy={policy!r} is unknown. Choose one of {', '.join(map(repr, known))}.")
        require(max_retries >= 0, f"max_retries={max_retries!r} must be at least 0.")
        check_counts(num_workers=num_workers, concurrency=concurrency, batch_size=batch_size)
        self.policy, self.value, self.max_retries, self.timeout_s = policy, value, max_retries, timeout_s
        self.concurrency, self.batch_size = concurrency, batch_size
        self.stats = LoopStats()
        ray = import_ray()
        self._own_ray = not ray.is_initialized()
        if self._own_ray:
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        name = absolute(reward) if isinstance(reward, str) else reward
        self._arguments, self._group = (name, dict(options or {}), os.getcwd()), placement_group
        self._beside = beside
        self._actor = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_concurrency=concurrency)(RewardLoopWorker)
        self._slots = [_Slot(self._start(i)) for i in range(num_workers)]
        self._queue: deque[_Job] = deque()
        self._closed = False
        # Its own thread and event loop: callers may come from any loop, from several, or from none.
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True)
        self._thread.start()

    async def score(self, sample: RewardSample) -> RewardResult:
        """Score one sample; returns when it is done. Raises `RewardError` under policy "required"."""
        return (await self.score_all([sample]))[0]

    async def score_all(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """`score` of several, in order; returns when all are done."""
        results = await asyncio.wrap_future(self._submit(samples))
        return [self._apply_policy(sample, result) for sample, result in zip(samples, results, strict=True)]

    def score_batch(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score samples and wait for all, in order. Not for use inside a running event loop (it blocks)."""
        results = self._submit(samples).result()
        return [self._apply_policy(sample, result) for sample, result in zip(samples, results, strict=True)]

    def compute_rm_score(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """`score_batch` for a batch of columns; see `manager.samples_of` for `data`.

        Returns:
            `rm_scores` fp32 [B, 1], NaN for what has no score, and `reward_extra_info`: of each sample its components.
        """
        results = self.score_batch(samples_of(data))
        scores = np.array([[result.score] for result in results], np.float32)
        return {"rm_scores": scores, "reward_extra_info": [result.components for result in results]}

    def health(self, timeout_s: float = 30.0) -> list[int]:
        """Process ids of the workers. Raises when one does not answer; waits for workers that are starting."""
        ray = import_ray()
        try:
            return [int(pid) for pid in ray.get([slot.actor.pid.remote() for slot in self._slots], timeout=timeout_s)]
        except ray.exceptions.RayError as error:
            raise RewardWorkerError(f"a reward worker does not answer: {_last_line(error)}", str(error)) from error

    async def sleep(self) -> None:
        """Let every worker's reward give its GPU memory back until the next sample. A dead one has given it already."""
        await asyncio.gather(*(slot.actor.sleep.remote() for slot in self._slots), return_exceptions=True)

    def shutdown(self) -> None:
        """Stop the workers. Samples still waiting fail with `RewardError`."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        ray = import_ray()
        if ray.is_initialized():
            for slot in self._slots:
                self._kill(slot.actor)
            if self._own_ray:
                ray.shutdown()

    def __enter__(self) -> RewardLoopManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _start(self, index: int) -> Any:
        """Start worker `index` and return its handle at once; calls wait until it is up."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        if self._beside is not None:
            node, gpu = self._beside[index]
            there = self._actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            return there.remote(*self._arguments, gpu)
        if self._group is None:
            return self._actor.remote(*self._arguments)
        bundle = index % len(self._group.bundle_specs)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return self._actor.options(scheduling_strategy=strategy).remote(*self._arguments)

    def _kill(self, actor: Any) -> None:
        """Kill a worker, dead or alive."""
        with contextlib.suppress(Exception):
            import_ray().kill(actor, no_restart=True)

    # From here on everything runs in the manager's own loop, so no state needs a lock.

    def _submit(self, samples: Sequence[RewardSample]) -> Future[list[RewardResult]]:
        if self._closed:
            raise RewardError("this RewardLoopManager was shut down.")
        call = _Call(len(samples))
        if not samples:
            call.done.set_result([])
        jobs = [_Job(sample, call, place) for place, sample in enumerate(samples)]
        self._loop.call_soon_threadsafe(self._enqueue, jobs)
        return call.done

    def _enqueue(self, jobs: list[_Job]) -> None:
        self.stats.asked += len(jobs)
        self._queue.extend(jobs)
        self._pump()

    def _pump(self) -> None:
        while self._queue and not self._closed:
            slot = min(self._slots, key=lambda s: s.busy)
            if slot.busy >= self.concurrency:
                return
            jobs = self._next_jobs()
            if not jobs:
                return
            slot.busy += 1
            task = self._loop.create_task(self._attempt(slot, slot.replaced, jobs))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next_jobs(self) -> list[_Job]:
        """A batch from the front of the queue; a job that must be alone is one."""
        jobs: list[_Job] = []
        while self._queue and len(jobs) < self.batch_size and not (jobs and (self._queue[0].alone or jobs[0].alone)):
            job = self._queue.popleft()
            if job.call.done.cancelled():  # its caller gave up
                self.stats.asked -= 1
            else:
                jobs.append(job)
        return jobs

    async def _attempt(self, slot: _Slot, replaced: int, jobs: list[_Job]) -> None:
        ray = import_ray()
        try:
            reference = slot.actor.score.remote(*_by_number([job.sample for job in jobs]))
            results = await asyncio.wait_for(asyncio.wrap_future(reference.future()), self.timeout_s)
        except asyncio.CancelledError:
            for job in jobs:
                self._finish(job, _shut_down())
            raise
        except TimeoutError:
            error: RewardError = RewardTimeoutError(f"the reward gave no answer in {self.timeout_s} s.")
            self._replace(slot, replaced)
            self._again(jobs, error)
        except ray.exceptions.RayActorError as dead:
            self._replace(slot, replaced)
            self._again(jobs, RewardWorkerError(f"the reward worker died: {_last_line(dead)}", str(dead)))
        except Exception as unexpected:  # never leave a caller waiting
            self._again(jobs, RewardWorkerError(f"scoring failed: {_last_line(unexpected)}", traceback.format_exc()))
        else:
            for job, result in zip(jobs, results, strict=True):
                if result.error is not None and result.retryable and job.attempts < self.max_retries:
                    self._again([job], RewardError(result.error))
                else:
                    self._finish(job, result)
        finally:
            slot.busy -= 1
            self._pump()

    def _again(self, jobs: list[_Job], error: RewardError) -> None:
        for job in reversed(jobs):
            job.attempts += 1
            job.alone = True
            if job.attempts > self.max_retries:
                self._finish(job, RewardResult.failed(f"{type(error).__name__}: {error} ({job.attempts} attempts)"))
            else:
                self.stats.retried += 1
                self._queue.appendleft(job)

    def _replace(self, slot: _Slot, replaced: int) -> None:
        if slot.replaced != replaced or self._closed:  # another attempt on the same worker already did
            return
        index = self._slots.index(slot)
        self._kill(slot.actor)
        slot.actor = self._start(index)
        slot.replaced += 1
        self.stats.workers_replaced += 1

    def _finish(self, job: _Job, result: RewardResult) -> None:
        self.stats.scored += 1
        if result.error is not None:
            self.stats.failed += 1
            self.stats.errors[result.error.split(":", 1)[0]] += 1
        job.call.put(job.place, result)

    async def _drain(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._queue:
            self._finish(self._queue.popleft(), _shut_down())

    def _apply_policy(self, sample: RewardSample, result: RewardResult) -> RewardResult:
        if result.error is None or self.policy == "skip":
            return result
        if self.policy == "value":
            return replace(result, score=self.value)
        first, _, cause = result.error.partition("\n")
        raise RewardError(
            f"{sample.label} has no score, and policy 'required' stops training: {first} "
            "Use policy='skip' or 'value' to go on without it.",
            cause,
        )


class RewardLoopWorker:
    """One process of the pool: builds the reward once and scores what it is given. Runs as a Ray actor."""

    def __init__(
        self,
        reward: str | Reward | type[Reward] | Callable[..., Any],
        options: Mapping[str, Any],
        folder: str,
        gpu: str | None = None,
    ) -> None:
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is first used in this process
        self._manager: ImageRewardManager | None = None
        self._broken = ""
        try:
            use_folder(folder)
            self._manager = ImageRewardManager(reward, options)
        except Exception as error:  # told with every sample: an actor that fails to start only says that it died
            lost = "" if os.path.isdir(folder) else f" (the working folder {folder!r} is not on this machine; share it)"
            self._broken = f"{type(error).__name__}: {error}{lost}\n{traceback.format_exc()}"

    def score(self, samples: Sequence[RewardSample], *stores: Mapping[str, np.ndarray]) -> list[RewardResult]:
        """Results of `samples`, in order. Never raises: a failure is a failed result with the traceback's text.

        A `Stored` sample is a row of one of the `stores`, whose number stands where its reference was.
        """
        if self._manager is None:
            return [RewardResult.failed(self._broken) for _ in samples]
        given = [_with_inputs(sample, stores, self._manager.reward.inputs) for sample in samples]
        return [_with_look(result, sample) for result, sample in zip(self._manager.score(given), given, strict=True)]

    def sleep(self) -> None:
        """See `Reward.sleep`."""
        if self._manager is not None:
            self._manager.reward.sleep()

    def pid(self) -> int:
        """This process's id."""
        return os.getpid()


def _by_number(samples: Sequence[RewardSample]) -> list[Any]:
    """Samples whose `Stored` places name their store by number, and then the stores: Ray fetches arguments alone."""
    stored = [(i, image) for i, s in enumerate(samples) if isinstance(image := cast(Any, s.image), Stored)]
    numbers = {reference: n for n, reference in enumerate(dict.fromkeys(image.reference for _, image in stored))}
    bare: list[Any] = list(samples)
    for i, image in stored:
        bare[i] = replace(bare[i], image=Stored(numbers[image.reference], image.row))
    return [bare, *numbers]


def _with_inputs(sample: RewardSample, stores: Sequence[Mapping[str, np.ndarray]], inputs: Inputs) -> RewardSample:
    image: Any = sample.image
    return replace(sample, image=stores[image.reference][inputs][image.row]) if isinstance(image, Stored) else sample


def _with_look(result: RewardResult, sample: RewardSample) -> RewardResult:
    try:
        check_image(sample, allow_video=True)
    except RewardError:  # nothing to look at
        return result
    return replace(result, look=look_of(sample.image))


def import_ray() -> Any:
    """Import ray, with its hook for `uv run` off: that hook would give each worker an environment of its own."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
    except ImportError as error:
        raise missing_extra("ray", "ray", "RewardLoopManager") from error
    return ray


def _shut_down() -> RewardResult:
    return RewardResult.failed(RewardError("the RewardLoopManager was shut down before this sample was scored."))


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
