"""The Ray pool: same scores as without it, dead workers replaced, every sample once, failures as the policy says."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import numpy as np
import pytest
from image_rewards import PerSampleReward, Reward, RewardConfigError, RewardError, RewardResult, RewardSample, load
from image_rewards.errors import UnknownRewardError
from image_rewards.loop import RewardLoopManager, import_ray
from image_rewards.manager import ImageRewardManager, default_compute_score_image


@pytest.fixture(scope="module")
def ray():
    ray = import_ray()
    started = not ray.is_initialized()
    if started:
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    if started:
        ray.shutdown()


def numbered(n):
    return [RewardSample(np.full((3, 4, 4), i, np.uint8), uid="p", index=i) for i in range(n)]


def make(kind, folder=""):
    """Rewards as local classes, so that Ray sends them by value."""

    class Local(PerSampleReward):
        name = kind

        def __init__(self):
            self.folder = str(folder)

        def first_time(self, number):
            mark = os.path.join(self.folder, str(number))
            try:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
            return True

        def score_one(self, sample):
            number = int(sample.image.flat[0])
            if kind == "dies_once" and number % 10 == 0 and self.first_time(number):
                os._exit(1)
            if kind == "poison" and number == 3:
                os._exit(1)
            if kind == "bug" and number == 3:
                raise ZeroDivisionError("a bug in the reward")
            if kind == "hangs_once" and number == 2 and self.first_time(number):
                time.sleep(60)
            if kind == "fails_twice" and number == 1 and (self.first_time("a") or self.first_time("b")):
                raise ConnectionError("away")
            if kind == "slow":
                time.sleep(1.0)
            return RewardResult(float(number), {"pid": float(os.getpid())})

    return Local()


def test_pool_gives_the_same_results_for_any_worker_count(ray, shape_samples):
    samples = shape_samples(40)
    alone = load("shapes").score(samples)
    for workers, batch in ((1, 1), (3, 4)):
        with RewardLoopManager("shapes", num_workers=workers, batch_size=batch) as loop:
            assert loop.score_batch(samples) == alone
            order = np.random.default_rng(0).permutation(len(samples))

            async def one_by_one(loop=loop, order=order):
                return await asyncio.gather(*(loop.score(samples[i]) for i in order))

            assert asyncio.run(one_by_one()) == [alone[i] for i in order]
            assert asyncio.run(one_by_one()) == [alone[i] for i in order]  # a second event loop
            assert loop.stats.asked == loop.stats.scored == 120
            assert len(set(loop.health())) == workers


def test_workers_find_the_working_folder_and_take_functions(ray, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Ray's workers were started elsewhere
    (tmp_path / "my_pool_reward.py").write_text("def red(image, prompt):\n    return image[0].mean()\n")
    for reward in ("./my_pool_reward.py:red", "my_pool_reward:red", lambda image, prompt: image[0].mean()):
        with RewardLoopManager(reward, num_workers=1) as loop:
            assert [r.score for r in loop.score_batch(numbered(3))] == [0.0, 1.0, 2.0]


def test_a_worker_without_the_working_folder_says_so(tmp_path):
    from image_rewards.loop import RewardLoopWorker

    for name in ("my_reward_nowhere:red", str(tmp_path / "gone" / "my_rewards.py") + ":red"):
        result = RewardLoopWorker(name, {}, str(tmp_path / "gone")).score(numbered(1))[0]
        assert f"the working folder {str(tmp_path / 'gone')!r} is not on this machine" in str(result.error)


def test_dead_workers_are_replaced_and_each_sample_counts_once(ray, tmp_path):
    samples = numbered(20)
    with RewardLoopManager(make("dies_once", tmp_path), num_workers=2) as loop:
        results = loop.score_batch(samples)
        assert [r.score for r in results] == [float(i) for i in range(20)]
        assert loop.stats.workers_replaced == loop.stats.retried == 2
        assert loop.stats.scored == loop.stats.asked == 20
        assert loop.stats.failed == 0


def test_killing_a_worker_from_outside_loses_nothing(ray, tmp_path):
    with RewardLoopManager(make("slow"), num_workers=3, concurrency=2) as loop:
        victim = loop.health()[0]

        async def run():
            waiting = [asyncio.ensure_future(loop.score(s)) for s in numbered(12)]
            await asyncio.sleep(0.5)
            os.kill(victim, 9)
            return await asyncio.gather(*waiting)

        results = asyncio.run(run())
        assert [r.score for r in results] == [float(i) for i in range(12)]
        assert loop.stats.workers_replaced == 1
        assert loop.stats.scored == 12


def test_a_poison_sample_fails_alone(ray):
    with RewardLoopManager(make("poison"), num_workers=2, batch_size=4, policy="skip", max_retries=2) as loop:
        results = loop.score_batch(numbered(8))
        assert [r.ok for r in results] == [i != 3 for i in range(8)]
        assert "worker died" in str(results[3].error)
        assert np.isnan(results[3].score)


def test_required_stops_with_the_workers_traceback(ray):
    with RewardLoopManager(make("bug"), num_workers=1, max_retries=1) as loop:
        with pytest.raises(RewardError) as caught:
            loop.score_batch(numbered(4))
        assert "p[3]" in caught.value.message
        assert "ZeroDivisionError: a bug in the reward" in caught.value.message
        assert "in score_one" in caught.value.cause
        with pytest.raises(RewardError, match="ZeroDivisionError"):
            asyncio.run(loop.score(numbered(4)[3]))


def test_policies_skip_and_value(ray):
    for policy, expected in (("skip", float("nan")), ("value", -2.0)):
        with RewardLoopManager(make("bug"), num_workers=1, max_retries=0, policy=policy, value=-2.0) as loop:
            results = loop.score_batch(numbered(5))
        assert results[3].score == pytest.approx(expected, nan_ok=True)
        assert "ZeroDivisionError" in str(results[3].error)
        assert [r.score for i, r in enumerate(results) if i != 3] == [0, 1, 2, 4]
        assert loop.stats.errors == {"ZeroDivisionError": 1}


def test_failures_that_pass_are_tried_again_within_bounds(ray, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    with RewardLoopManager(make("fails_twice", tmp_path / "x"), num_workers=1, max_retries=2) as loop:
        assert [r.score for r in loop.score_batch(numbered(3))] == [0, 1, 2]
        assert loop.stats.retried == 2
    with (
        RewardLoopManager(make("fails_twice", tmp_path / "y"), num_workers=1, max_retries=1) as loop,
        pytest.raises(RewardError, match="away"),
    ):
        loop.score_batch(numbered(3))


def test_bad_pictures_are_not_tried_again(ray):
    with RewardLoopManager("jpeg_compressibility", num_workers=1, policy="skip") as loop:
        result = loop.score_batch([RewardSample(np.zeros((3, 4, 4)))])[0]
    assert "RewardInputError" in str(result.error)
    assert loop.stats.retried == 0


def test_a_hanging_worker_is_stopped_at_its_deadline(ray, tmp_path):
    with RewardLoopManager(make("hangs_once", tmp_path), num_workers=1, timeout_s=5) as loop:
        loop.health()
        start = time.monotonic()
        assert [r.score for r in loop.score_batch(numbered(4))] == [0, 1, 2, 3]
        assert time.monotonic() - start < 30
        assert loop.stats.workers_replaced == 1


def test_a_reward_that_cannot_be_built_says_why(ray):
    with (
        RewardLoopManager("shapes", {"strict_weight": -1}, num_workers=1) as loop,
        pytest.raises(RewardError, match="strict_weight=-1"),
    ):
        loop.score_batch(numbered(1))


def test_scores_overlap_with_generation(ray):
    """A 1 s reward per sample: after the last sample is generated, the reward phase adds less than 1.5 s."""
    with RewardLoopManager(make("slow"), num_workers=2, concurrency=4) as loop:
        loop.health()

        async def run():
            waiting = []
            for sample in numbered(16):
                await asyncio.sleep(0.15)  # generation of one sample
                waiting.append(asyncio.ensure_future(loop.score(sample)))
            generated = time.monotonic()
            await asyncio.gather(*waiting)
            return time.monotonic() - generated

        added = asyncio.run(run())
    print(f"added {added:.2f} s after generation; one after another: 16 s")
    assert added < 1.5


def test_work_spreads_over_the_workers(ray):
    with RewardLoopManager(make("slow"), num_workers=3) as loop:
        loop.health()
        start = time.monotonic()
        pids = {r.components["pid"] for r in loop.score_batch(numbered(3))}
        assert len(pids) == 3
        assert time.monotonic() - start < 2.5


def test_workers_go_into_a_given_placement_group(ray, shape_samples):
    samples = shape_samples(4)
    group = ray.util.placement_group([{"CPU": 1}])
    with RewardLoopManager("shapes", num_workers=2, num_cpus=0.5, placement_group=group) as loop:
        assert loop.score_batch(samples) == load("shapes").score(samples)
    ray.util.remove_placement_group(group)


def test_shutdown_fails_what_waits_and_refuses_what_comes(ray):
    loop = RewardLoopManager(make("slow"), num_workers=1)

    async def run():
        waiting = [asyncio.ensure_future(loop.score(s)) for s in numbered(3)]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(loop.shutdown)
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert all(isinstance(r, RewardError) for r in asyncio.run(run()))
    with pytest.raises(RewardError, match="shut down"):
        loop.score_batch(numbered(1))
    loop.shutdown()


def test_options_are_checked():
    with pytest.raises(RewardConfigError, match="policy='zero'"):
        RewardLoopManager("shapes", policy="zero")
    with pytest.raises(RewardConfigError, match="num_workers=0"):
        RewardLoopManager("shapes", num_workers=0)


def test_a_batch_that_breaks_is_taken_apart():
    class OnlySmall(Reward):
        name = "only_small"

        def score_valid(self, samples):
            if len(samples) > 1:
                raise MemoryError("too many")
            return [RewardResult(1.0) for _ in samples]

    assert [r.score for r in ImageRewardManager(OnlySmall()).score(numbered(3))] == [1, 1, 1]


def test_batches_and_samples_in_the_form_of_verl_omni(ray, shape_samples):
    from tensordict import NonTensorStack, TensorDict

    samples, names = shape_samples(4), ("prompt", "metadata")
    batch = {"responses": np.stack([s.image for s in samples]), **{k: [getattr(s, k) for s in samples] for k in names}}
    batch["responses"][3] = 0  # a black picture is a bad one, which still has a score
    rows = [{key: column[i] for key, column in batch.items()} for i in range(4)]
    manager = ImageRewardManager("shapes")
    alone = [asyncio.run(manager.run_single(row)) for row in rows]
    assert alone[0]["reward_score"] == load("shapes").score(samples)[0].score
    assert alone[0]["reward_extra_info"] == load("shapes").score(samples)[0].components
    table = TensorDict({"responses": batch["responses"]}, batch_size=[4])
    for name in names:
        table[name] = NonTensorStack(*batch[name])
    with RewardLoopManager("shapes", num_workers=1) as loop:
        for data in (batch, table):
            scored = loop.compute_rm_score(data)
            assert scored["rm_scores"].dtype == np.float32
            assert scored["rm_scores"].tolist() == [[np.float32(one["reward_score"])] for one in alone]
            assert scored["reward_extra_info"] == [one["reward_extra_info"] for one in alone]
    by_name = [default_compute_score_image("org/shapes", row["responses"], row["metadata"]) for row in rows]
    assert by_name == [one["reward_score"] for one in alone]
    broken = asyncio.run(manager.run_single({"responses": rows[0]["responses"], "prompt": "no shapes"}))
    assert np.isnan(broken["reward_score"])
    assert "RewardTargetError" in broken["reward_extra_info"]["error"]
    with pytest.raises(UnknownRewardError, match="jpeg_compressibility"):
        default_compute_score_image("jpeg_compresibility", rows[0]["responses"])


def test_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load("shapes")(RewardSample(np.zeros((3, 4, 4), np.uint8), "", {"path": "../../etc/passwd"}, uid="../../x"))
    assert list(Path().iterdir()) == []
