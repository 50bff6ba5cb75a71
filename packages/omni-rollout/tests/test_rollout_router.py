"""Whole batches, even load, and every way a replica can fail: nothing lost, nothing twice."""

import asyncio
import time

import pytest
import torch
from omni_rollout.config import RouterConfig
from omni_rollout.errors import DeadlineError, LifecycleError, ReplicaDeadError, ReplicaError, RolloutConfigError
from omni_rollout.router import Router


@pytest.fixture
def assert_right(arithmetic_replica):
    def assert_right(samples, requests):
        expected = torch.stack([arithmetic_replica().row(request)["responses"] for request in requests])
        assert torch.equal(samples["responses"], expected)

    return assert_right


def drawn(router, requests, collect):
    return asyncio.run(collect(router, requests))


def test_a_call_travels_in_order_and_in_whole_batches(arithmetic_replica, make_request, collect, assert_right):
    replica = arithmetic_replica()
    requests = [make_request(i) for i in range(20)]
    assert_right(drawn(Router([replica]), requests, collect), requests)
    ids = [r.request_id for r in requests]
    assert replica.calls == [ids[:8], ids[8:16], ids[16:]]


def test_load_is_even_and_no_replica_idles(arithmetic_replica, make_request, collect, assert_right):
    replicas = [arithmetic_replica(name, delay=0.01, batch_size=4) for name in "abc"]
    requests = [make_request(i) for i in range(48)]
    router = Router(replicas)
    assert_right(drawn(router, requests, collect), requests)
    assert [len(replica.calls) for replica in replicas] == [4, 4, 4]
    assert router.metrics()["rollout/completed"] == 48


def test_a_slow_replica_takes_less(arithmetic_replica, make_request, collect, assert_right):
    fast, slow = arithmetic_replica("fast", delay=0.005, batch_size=2), arithmetic_replica("slow", 0.1, batch_size=2)
    requests = [make_request(i) for i in range(32)]
    assert_right(drawn(Router([fast, slow]), requests, collect), requests)
    assert len(slow.calls) <= 4 <= len(fast.calls)


def test_batches_come_as_they_are_finished(arithmetic_replica, make_request):
    replicas = [arithmetic_replica("slow", delay=0.1), arithmetic_replica("fast")]

    async def run():
        requests = [make_request(i) for i in range(16)]
        return [places async for places, _ in Router(replicas).stream(requests)]

    assert asyncio.run(run()) == [list(range(8, 16)), list(range(8))]


def test_an_error_is_retried_elsewhere_with_the_same_result(arithmetic_replica, make_request, collect, assert_right):
    replicas = [arithmetic_replica("a", batch_size=4), arithmetic_replica("b", batch_size=4)]
    replicas[0].errors = [RuntimeError("CUDA error: something")]
    router = Router(replicas)
    requests = [make_request(i) for i in range(8)]
    assert_right(drawn(router, requests, collect), requests)
    metrics = router.metrics()
    assert (metrics["rollout/errors"], metrics["rollout/retried"], metrics["rollout/completed"]) == (4, 4, 8)
    assert metrics["rollout/replicas_alive"] == 2
    names = [name for replica in replicas for call in replica.calls for name in call]
    assert sum(name.endswith("~1") for name in names) == 4  # under names of their own


def test_a_dead_replica_is_replaced_and_its_requests_finish(arithmetic_replica, make_request, collect, assert_right):
    replicas = [arithmetic_replica("a", batch_size=4), arithmetic_replica("b", delay=0.02, batch_size=4)]
    replicas[0].errors = [ConnectionError("process gone")] * 9
    fresh = arithmetic_replica("c", batch_size=4)

    async def restart(place):
        assert place == 0
        await asyncio.sleep(0.01)
        return fresh

    router = Router(replicas, restart=restart)
    requests = [make_request(i) for i in range(16)]

    async def run():
        first = await collect(router, requests)
        await asyncio.sleep(0.05)
        await collect(router, [make_request(i) for i in range(100, 108)])
        return first

    assert_right(asyncio.run(run()), requests)
    metrics = router.metrics()
    assert (metrics["rollout/deaths"], metrics["rollout/restarts"], metrics["rollout/replicas_alive"]) == (1, 1, 2)
    assert fresh.calls  # it works again


def test_a_restart_that_ended_with_its_event_loop_is_taken_up_again(arithmetic_replica, make_request, collect):
    replicas = [arithmetic_replica("a"), arithmetic_replica("b")]
    replicas[0].errors = [ConnectionError("process gone")]
    starts = []

    async def restart(place):
        starts.append(place)
        await asyncio.sleep(0.05)
        return arithmetic_replica("c")

    router = Router(replicas, restart=restart)
    drawn(router, [make_request(i) for i in range(8)], collect)  # ends while the replica is being started
    assert router.metrics()["rollout/replicas_alive"] == 1

    async def later():
        await collect(router, [make_request(50)])
        await asyncio.sleep(0.1)

    asyncio.run(later())
    assert starts == [0, 0]
    assert router.metrics()["rollout/replicas_alive"] == 2


def test_a_replica_that_cannot_be_started_is_given_up(arithmetic_replica, make_request, collect):
    replica = arithmetic_replica("a")
    replica.errors = [ConnectionError("gone")] * 9

    async def restart(place):
        raise OSError("no such machine")

    router = Router([replica], RouterConfig(max_retries=1), restart=restart)
    with pytest.raises(ReplicaDeadError, match="no replica is left.*OSError: no such machine"):
        drawn(router, [make_request()], collect)
    assert router.counts["restart_failures"] == 2


def test_a_hanging_replica_costs_one_deadline(arithmetic_replica, make_request, collect, assert_right):
    replicas = [arithmetic_replica("a", batch_size=4), arithmetic_replica("b", batch_size=4)]
    replicas[0].hang = 60.0
    router = Router(replicas, RouterConfig(request_timeout_s=0.25))
    requests = [make_request(i) for i in range(8)]

    async def run():
        start = asyncio.get_running_loop().time()
        return await collect(router, requests), asyncio.get_running_loop().time() - start

    samples, seconds = asyncio.run(run())
    assert_right(samples, requests)
    assert seconds < 30.0  # nobody waited for the one that hangs
    assert router.metrics()["rollout/timeouts"] == 4
    assert router.metrics()["rollout/replicas_alive"] == 1


def test_waiting_for_a_turn_costs_no_deadline(arithmetic_replica, make_request, collect, assert_right):
    replica = arithmetic_replica("a", delay=0.05, batch_size=1)
    router = Router([replica], RouterConfig(request_timeout_s=0.35, max_retries=0))
    requests = [make_request(i) for i in range(30)]  # 1.5 seconds of work, four times the deadline of one batch
    assert_right(drawn(router, requests, collect), requests)
    assert router.metrics()["rollout/timeouts"] == 0


def test_a_slow_replica_is_not_a_dead_one(arithmetic_replica, make_request, collect, assert_right):
    """Every batch takes 1.25 times the limit, so the one behind it has its answer after 2.5 times."""
    replicas = [arithmetic_replica(name, delay=0.5, batch_size=1) for name in "ab"]
    router = Router(replicas, RouterConfig(request_timeout_s=0.4, max_retries=0))
    requests, began = [make_request(i) for i in range(6)], time.monotonic()
    assert_right(drawn(router, requests, collect), requests)
    metrics = router.metrics()
    assert (metrics["rollout/timeouts"], metrics["rollout/replicas_alive"]) == (0, 2)
    assert 0.4 < metrics["rollout/queued_s"] < time.monotonic() - began  # two wait until the first four are half done


def test_nothing_is_queued_where_there_is_room(arithmetic_replica, make_request, collect):
    router = Router([arithmetic_replica(delay=0.05)])
    drawn(router, [make_request(i) for i in range(8)], collect)
    assert router.metrics()["rollout/queued_s"] == 0.0


def test_failures_are_typed_and_final(arithmetic_replica, make_request, collect):
    slow = arithmetic_replica("slow")
    slow.hang = 0.2
    router = Router([slow], RouterConfig(request_timeout_s=0.01, max_retries=1))
    with pytest.raises(DeadlineError, match="replica-slow gave no answer to 1 requests .'r0~1'"):
        drawn(router, [make_request()], collect)
    broken = arithmetic_replica("broken")
    broken.errors = [ValueError("shape mismatch")] * 5
    router = Router([broken], RouterConfig(max_retries=2))
    with pytest.raises(ReplicaError, match="replica-broken failed: ValueError: shape mismatch"):
        drawn(router, [make_request()], collect)
    assert len(broken.calls) == 3
    assert router.metrics()["rollout/failed"] == 1
    dead = arithmetic_replica("dead")
    dead.errors = [ConnectionError("gone")] * 5
    with pytest.raises(ReplicaDeadError, match="no replica is left"):
        drawn(Router([dead]), [make_request()], collect)
    bad = arithmetic_replica("bad")
    bad.errors = [RolloutConfigError("height=63")]
    with pytest.raises(RolloutConfigError, match="height=63"):
        drawn(Router([bad]), [make_request()], collect)
    assert len(bad.calls) == 1  # a bad request is bad everywhere


def test_a_caller_that_gives_up_cancels_its_batches(arithmetic_replica, make_request, collect):
    replica = arithmetic_replica(delay=0.05, batch_size=1)
    router = Router([replica])

    async def run():
        task = asyncio.ensure_future(collect(router, [make_request(i) for i in range(3)]))
        await asyncio.sleep(0.02)
        task.cancel()
        return await asyncio.gather(task, return_exceptions=True)

    assert isinstance(asyncio.run(run())[0], asyncio.CancelledError)
    assert replica.cancelled == {"r0", "r1"}  # the third was never sent
    assert router.metrics()["rollout/cancelled"] == 2
    assert not any(router._load)


def test_two_calls_share_the_replicas(arithmetic_replica, make_request, collect, assert_right):
    router = Router([arithmetic_replica("a", 0.01, batch_size=2), arithmetic_replica("b", 0.01, batch_size=2)])
    calls = [[make_request(i) for i in range(10)], [make_request(i) for i in range(100, 110)]]

    async def run():
        return await asyncio.gather(*(collect(router, requests) for requests in calls))

    for samples, requests in zip(asyncio.run(run()), calls, strict=True):
        assert_right(samples, requests)


def test_drain_waits_and_holds_new_batches(arithmetic_replica, make_request, collect):
    replica = arithmetic_replica(delay=0.03)
    router = Router([replica])

    async def run():
        first = asyncio.ensure_future(collect(router, [make_request(0)]))
        await asyncio.sleep(0.01)
        await router.drain()
        late = asyncio.ensure_future(collect(router, [make_request(1)]))
        await asyncio.sleep(0.02)
        assert first.done()
        assert len(replica.calls) == 1
        await router.each(lambda one: one.update_lora(3))
        router.admit()
        return await late

    assert asyncio.run(run())["policy_version"].tolist() == [3]

    router = Router([arithmetic_replica(delay=2.0)])  # long, so that a busy machine changes nothing

    async def stuck():
        task = asyncio.ensure_future(collect(router, [make_request(2)]))
        await asyncio.sleep(0.01)
        with pytest.raises(LifecycleError, match="1 batches are still in flight"):
            await router.drain(timeout_s=0.001)
        router.admit()
        await task

    asyncio.run(stuck())
