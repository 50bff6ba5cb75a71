"""Micro-batching, sticky groups, back-pressure, and every way a replica can fail: nothing lost, nothing twice."""

import asyncio

import pytest
import torch
from omni_rollout.config import RouterConfig
from omni_rollout.errors import DeadlineError, LifecycleError, ReplicaDeadError, ReplicaError, RolloutConfigError
from omni_rollout.replica import DiffusersReplica, LocalHandle
from omni_rollout.router import Router


def replica(backend, size=8):
    return DiffusersReplica(LocalHandle(backend), size, name=f"replica-{backend.name}")


async def all_of(client, requests):
    return await asyncio.gather(*(client.generate(request) for request in requests))


def assert_right(outputs, requests, backend_class):
    reference = backend_class("reference")
    for output, request in zip(outputs, requests, strict=True):
        assert torch.equal(output.diffusion_output, reference._one(request).diffusion_output)


def test_calls_of_one_turn_travel_in_order_and_in_chunks(arithmetic_backend, make_request):
    backend = arithmetic_backend()
    requests = [make_request(i) for i in range(20)]
    outputs = asyncio.run(all_of(replica(backend), requests))
    ids = [r.request_id for r in requests]
    assert backend.calls == [ids[:8], ids[8:16], ids[16:]]
    assert_right(outputs, requests, arithmetic_backend)
    again = arithmetic_backend()
    asyncio.run(all_of(Router([replica(again)]), requests))
    assert again.calls == backend.calls  # the router in between changes nothing


def test_groups_stay_together_and_load_is_even(arithmetic_backend, make_request):
    backends = [arithmetic_backend(name) for name in "abc"]
    requests = [make_request(i) for i in range(24)]  # six groups of four
    router = Router([replica(b) for b in backends])
    asyncio.run(all_of(router, requests))
    places = {}
    for backend in backends:
        ids = [request_id for call in backend.calls for request_id in call]
        assert len(ids) == 8
        for request_id in ids:
            places.setdefault(next(r.uid for r in requests if r.request_id == request_id), set()).add(backend.name)
    assert all(len(names) == 1 for names in places.values())
    assert router.metrics()["rollout/completed"] == 24


def test_back_pressure_bounds_what_a_replica_holds(arithmetic_backend, make_request):
    backend = arithmetic_backend(delay=0.01)
    router = Router([replica(backend)], RouterConfig(max_queue_per_replica=3))
    requests = [make_request(i) for i in range(10)]
    outputs = asyncio.run(all_of(router, requests))
    assert max(len(call) for call in backend.calls) <= 3
    assert_right(outputs, requests, arithmetic_backend)
    assert router.metrics()["rollout/waited"] > 0


def test_an_error_is_retried_elsewhere_with_the_same_result(arithmetic_backend, make_request):
    backends = [arithmetic_backend("a"), arithmetic_backend("b")]
    backends[0].errors = [RuntimeError("CUDA error: something")]
    router = Router([replica(b) for b in backends])
    requests = [make_request(i) for i in range(8)]
    outputs = asyncio.run(all_of(router, requests))
    assert_right(outputs, requests, arithmetic_backend)
    metrics = router.metrics()
    assert (metrics["rollout/errors"], metrics["rollout/retried"], metrics["rollout/completed"]) == (4, 4, 8)
    assert metrics["rollout/replicas_alive"] == 2


def test_a_dead_replica_is_replaced_and_its_requests_finish(arithmetic_backend, make_request):
    backends = [arithmetic_backend("a"), arithmetic_backend("b")]
    backends[0].errors = [ConnectionError("process gone")] * 9
    fresh = arithmetic_backend("c")

    async def restart(place):
        assert place == 0
        await asyncio.sleep(0.01)
        return replica(fresh)

    router = Router([replica(b) for b in backends], restart=restart)
    requests = [make_request(i) for i in range(16)]

    async def run():
        first = await all_of(router, requests)
        await asyncio.sleep(0.05)
        await all_of(router, [make_request(i) for i in range(100, 108)])
        return first

    assert_right(asyncio.run(run()), requests, arithmetic_backend)
    metrics = router.metrics()
    assert (metrics["rollout/deaths"], metrics["rollout/restarts"], metrics["rollout/replicas_alive"]) == (1, 1, 2)
    assert fresh.calls  # it works again


def test_a_restart_that_ended_with_its_event_loop_is_taken_up_again(arithmetic_backend, make_request):
    backends = [arithmetic_backend("a"), arithmetic_backend("b")]
    backends[0].errors = [ConnectionError("process gone")]
    starts = []

    async def restart(place):
        starts.append(place)
        await asyncio.sleep(0.05)
        return replica(arithmetic_backend("c"))

    router = Router([replica(b) for b in backends], restart=restart)
    asyncio.run(all_of(router, [make_request(i) for i in range(8)]))  # ends while the replica is being started
    assert router.metrics()["rollout/replicas_alive"] == 1

    async def later():
        await router.generate(make_request(50))
        await asyncio.sleep(0.1)

    asyncio.run(later())
    assert starts == [0, 0]
    assert router.metrics()["rollout/replicas_alive"] == 2


def test_a_replica_that_cannot_be_started_is_given_up(arithmetic_backend, make_request):
    backend = arithmetic_backend("a")
    backend.errors = [ConnectionError("gone")] * 9

    async def restart(place):
        raise OSError("no such machine")

    router = Router([replica(backend)], RouterConfig(max_retries=1), restart=restart)
    with pytest.raises(ReplicaDeadError, match="no replica is left.*OSError: no such machine"):
        asyncio.run(router.generate(make_request()))
    assert router.counts["restart_failures"] == 2


def test_a_hanging_replica_costs_one_deadline(arithmetic_backend, make_request):
    backends = [arithmetic_backend("a"), arithmetic_backend("b")]
    backends[0].hang = 4.0
    router = Router([replica(b) for b in backends], RouterConfig(request_timeout_s=1.0))
    requests = [make_request(i) for i in range(8)]

    async def run():
        start = asyncio.get_running_loop().time()
        return await all_of(router, requests), asyncio.get_running_loop().time() - start

    outputs, seconds = asyncio.run(run())
    assert_right(outputs, requests, arithmetic_backend)
    assert seconds < 3.5
    assert router.metrics()["rollout/timeouts"] == 4
    backends[0].hang = 0.0
    assert router.metrics()["rollout/replicas_alive"] == 1


def test_failures_are_typed_and_final(arithmetic_backend, make_request):
    slow = arithmetic_backend("slow")
    slow.hang = 0.2
    router = Router([replica(slow)], RouterConfig(request_timeout_s=0.02, max_retries=1))
    with pytest.raises(DeadlineError, match="'r0~1' got no answer in"):
        asyncio.run(router.generate(make_request()))
    broken = arithmetic_backend("broken")
    broken.errors = [ValueError("shape mismatch")] * 5
    router = Router([replica(broken)], RouterConfig(max_retries=2))
    with pytest.raises(ReplicaError, match="replica-broken failed: ValueError: shape mismatch"):
        asyncio.run(router.generate(make_request()))
    assert len(broken.calls) == 3
    dead = arithmetic_backend("dead")
    dead.errors = [ConnectionError("gone")] * 5
    with pytest.raises(ReplicaDeadError, match="no replica is left"):
        asyncio.run(Router([replica(dead)]).generate(make_request()))
    bad = arithmetic_backend("bad")
    bad.errors = [RolloutConfigError("height=63")]
    with pytest.raises(RolloutConfigError, match="height=63"):
        asyncio.run(Router([replica(bad)]).generate(make_request()))
    assert len(bad.calls) == 1  # a bad request is bad everywhere


def test_cancelling_a_caller_cancels_its_request(arithmetic_backend, make_request):
    backend = arithmetic_backend(delay=0.05)
    router = Router([replica(backend, size=1)])

    async def run():
        tasks = [asyncio.ensure_future(router.generate(make_request(i))) for i in range(3)]
        await asyncio.sleep(0.02)
        tasks[2].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    outputs = asyncio.run(run())
    assert isinstance(outputs[2], asyncio.CancelledError)
    assert [o.stop_reason for o in outputs[:2]] == ["completed", "completed"]
    assert backend.cancelled == {"r2"}
    assert router.metrics()["rollout/cancelled"] == 1


def test_drain_waits_and_holds_new_requests(arithmetic_backend, make_request):
    backend = arithmetic_backend(delay=0.03)
    router = Router([replica(backend)])

    async def run():
        first = asyncio.ensure_future(router.generate(make_request(0)))
        await asyncio.sleep(0.01)
        await router.drain()
        assert first.done()
        late = asyncio.ensure_future(router.generate(make_request(1)))
        await asyncio.sleep(0.02)
        assert len(backend.calls) == 1
        await router.broadcast("update_lora", 3)
        router.admit()
        return await late

    assert asyncio.run(run()).extra_fields["policy_version"] == 3

    async def stuck():
        task = asyncio.ensure_future(router.generate(make_request(2)))
        await asyncio.sleep(0.01)
        with pytest.raises(LifecycleError, match="1 requests are still in flight"):
            await router.drain(timeout_s=0.001)
        router.admit()
        await task

    asyncio.run(stuck())
