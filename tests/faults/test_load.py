"""More work than there is room for: queues stay bounded, and whoever waits gets an answer of their own."""

import asyncio
import http.client
import socket
import statistics
import threading
import time

import numpy as np
import psutil
from harness import Service
from image_rewards import PerSampleReward, RewardResult, RewardSample
from image_rewards.batching import Batcher, Limits, OverloadedError
from image_rewards.errors import RewardTimeoutError
from image_rewards.http import HttpReward
from image_rewards.manager import ImageRewardManager
from image_rewards.wire import TENSOR_TYPE, encode_samples

PICTURE = np.zeros((3, 2, 2), np.uint8)


def memory_mb(process=None):
    """Of a process, this one by default, now."""
    return psutil.Process(process).memory_info().rss / 2**20


class Number(PerSampleReward):
    """The sample's own number, once `open` is set."""

    name, batch_size = "number", 64

    def __init__(self):
        self.open = threading.Event()

    def score_one(self, sample):
        self.open.wait()
        return RewardResult(float(sample.index))


def test_ten_thousand_requests_at_once_wait_in_a_bounded_queue_and_all_are_answered(record_property):
    """A third of the callers give up on the way, as clients that die do."""

    async def run():
        reward, limits, largest, turned_away, most = Number(), Limits(queue_samples=512), 0, 0, 0.0
        reward.open.set()
        batcher = Batcher(ImageRewardManager(reward), reward.batch_size, limits)
        batcher.start()

        async def client(number):
            nonlocal largest, turned_away, most
            while True:
                try:
                    (result,) = await batcher.score([RewardSample(PICTURE, index=number)])
                    return result.score
                except OverloadedError:
                    turned_away += 1
                    await asyncio.sleep(0.1)
                finally:
                    largest = max(largest, batcher.pending, batcher._queue.qsize())
                    most = max(most, memory_mb()) if number % 100 == 1 else most

        clients = [asyncio.create_task(client(number)) for number in range(10_000)]
        await asyncio.sleep(0)
        for one in clients[::3]:
            one.cancel()
        answers = await asyncio.gather(*clients, return_exceptions=True)
        await batcher.stop()
        return answers, largest, turned_away, batcher.pending, most

    began, before = time.monotonic(), memory_mb()
    answers, largest, turned_away, left, most = asyncio.run(run())
    record_property("seconds", round(time.monotonic() - began, 1))
    record_property("memory taken, MB, callers and all", round(most - before))
    record_property("longest queue", largest)
    record_property("turned away", turned_away)
    assert all(answer == number for number, answer in enumerate(answers) if number % 3)
    assert largest <= 512
    assert most - before < 200
    assert turned_away > 0
    assert left == 0


def test_a_back_end_that_hangs_does_not_collect_the_pictures_of_those_who_gave_up():
    async def run():
        reward, limits = Number(), Limits(queue_samples=32, timeout_s=0.05)
        batcher = Batcher(ImageRewardManager(reward), 1, limits)
        batcher.start()
        refused = 0
        for _ in range(8):
            calls = [batcher.score([RewardSample(PICTURE, index=0)]) for _ in range(32)]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(end, OverloadedError | RewardTimeoutError) for end in ends)
            refused += sum(isinstance(end, OverloadedError) for end in ends)
            assert batcher._queue.qsize() <= 32
        reward.open.set()
        await batcher.stop()
        return refused

    assert asyncio.run(run()) > 100


SLOW = """
import time
from image_rewards import PerSampleReward, RewardResult

class Slow(PerSampleReward):
    name, batch_size = "slow", 8
    def score_one(self, sample):
        time.sleep(0.002)
        return RewardResult(float(sample.image[0, 0, 0]))
"""


def dies(service, sample, half):
    """A client that sends half a request, or all of it, and is gone before the answer."""
    body = encode_samples([sample], TENSOR_TYPE)
    head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: {TENSOR_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        connection.sendall(head.encode() + body[: len(body) // 2 if half else None])


def numbers_of(service):
    """What the scorer says of itself."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_two_hundred_clients_of_a_scorer_of_which_some_die_are_served_alike(tmp_path, record_property):
    (tmp_path / "slow.py").write_text(SLOW)
    service = Service(f"{tmp_path}/slow.py:Slow")
    waits, sizes, wrong = [], [], []

    def client(number):
        sample = RewardSample(np.full((3, 256, 256), number, np.uint8), "x")
        for attempt in range(3):
            if number % 4 == 3:
                dies(service, sample, half=attempt == 0)
                continue
            reward = HttpReward(url=f"http://127.0.0.1:{service.port}/score", deadline_s=100, max_retries=50)
            asked = time.monotonic()
            if reward(sample).score != number:
                wrong.append(number)
            waits.append(time.monotonic() - asked)
            sizes.append(memory_mb(service.process.pid))

    try:
        idle, began = memory_mb(service.process.pid), time.monotonic()
        clients = [threading.Thread(target=client, args=(number,)) for number in range(200)]
        for one in clients:
            one.start()
        for one in clients:
            one.join(200)
        record_property("seconds", round(time.monotonic() - began, 1))
        record_property("memory of the scorer, MB: idle", round(idle))
        record_property("memory of the scorer, MB: most", round(max(sizes)))
        record_property("median wait, s", round(statistics.median(waits), 2))
        record_property("longest wait, s", round(max(waits), 2))
        assert wrong == []
        assert len(waits) == 450
        end = time.monotonic() + 30
        while numbers_of(service)["image_rewards_pending_samples"] and time.monotonic() < end:
            time.sleep(0.1)
        told = numbers_of(service)
        assert told['image_rewards_requests_total{status="499"}'] == 50  # half a request, and gone
        assert len(service.said) == 1  # nobody's death fills the log
        assert told["image_rewards_pending_samples"] == told["image_rewards_inflight_bytes"] == 0
        assert max(sizes) < idle + 200
        assert max(waits) < 30  # nobody starves
    finally:
        service.stop()
