"""More work than there is room for: queues stay bounded, and whoever waits gets an answer of their own."""

import asyncio
import threading

import numpy as np
from image_rewards import PerSampleReward, RewardResult, RewardSample
from image_rewards.batching import Batcher, Limits, OverloadedError
from image_rewards.errors import RewardTimeoutError
from image_rewards.manager import ImageRewardManager

PICTURE = np.zeros((3, 2, 2), np.uint8)


class Number(PerSampleReward):
    """The sample's own number, once `open` is set."""

    name, batch_size = "number", 64

    def __init__(self):
        self.open = threading.Event()

    def score_one(self, sample):
        self.open.wait()
        return RewardResult(float(sample.index))


def test_ten_thousand_requests_at_once_wait_in_a_bounded_queue_and_all_are_answered():
    """A third of the callers give up on the way, as clients that die do."""

    async def run():
        reward, limits, largest, turned_away = Number(), Limits(queue_samples=512), 0, 0
        reward.open.set()
        batcher = Batcher(ImageRewardManager(reward), reward.batch_size, limits)
        batcher.start()

        async def client(number):
            nonlocal largest, turned_away
            while True:
                try:
                    (result,) = await batcher.score([RewardSample(PICTURE, index=number)])
                    return result.score
                except OverloadedError:
                    turned_away += 1
                    await asyncio.sleep(0.1)
                finally:
                    largest = max(largest, batcher.pending, batcher._queue.qsize())

        clients = [asyncio.create_task(client(number)) for number in range(10_000)]
        await asyncio.sleep(0)
        for one in clients[::3]:
            one.cancel()
        answers = await asyncio.gather(*clients, return_exceptions=True)
        await batcher.stop()
        return answers, largest, turned_away, batcher.pending

    answers, largest, turned_away, left = asyncio.run(run())
    assert all(answer == number for number, answer in enumerate(answers) if number % 3)
    assert largest <= 512
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
