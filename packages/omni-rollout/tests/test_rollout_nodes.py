"""Replicas as processes on two Ray nodes: placed as asked, refused at once when they do not fit, left when they hang.

What a killed or failing engine does to a batch is in `test_rollout_vllm_faults.py`, every fault of a backend without
processes in `test_rollout_router.py`.
"""

import asyncio
import copy
import os
import signal
import sys
import time

import cloudpickle
import psutil
import pytest
from omni_rollout.config import DiffusionRolloutConfig, RouterConfig, VllmOmniConfig
from omni_rollout.errors import RolloutConfigError
from omni_rollout.fleet import Fleet
from omni_rollout.hosted import HostedDiffusersBackend
from omni_rollout.router import Router
from omni_rollout.vllm_omni.replica import vLLMOmniReplica
from omni_rollout.vllm_omni.server import vLLMOmniHttpServer


def test_a_process_that_hangs_costs_one_deadline_and_is_ended(
    cluster, tiny, backend, embedded, runner, make_request, collect, difference
):
    """A process is stopped in the middle of its batch; its requests finish on another replica."""
    config = DiffusionRolloutConfig(dtype="float32", max_batch_size=4)
    embedded = copy.copy(embedded)
    embedded.batch_size = 4
    requests = [make_request(i, num_inference_steps=20) for i in range(16)]
    expected = backend.generate(requests)

    async def run():
        fleet = await Fleet.launch(config, tiny, cpus=0.5)
        (hosted,) = fleet.router.replicas
        router = Router([hosted, embedded], RouterConfig(request_timeout_s=2.0))
        pid = await hosted.backend.call(HostedDiffusersBackend.pid)
        task = asyncio.ensure_future(collect(router, requests))
        while not (await hosted.health()).generated:
            await asyncio.sleep(0.01)
        start = time.perf_counter()
        os.kill(pid, signal.SIGSTOP)
        outputs = await task
        seconds = time.perf_counter() - start
        await fleet.close()
        return pid, outputs, seconds, router.metrics()

    pid, outputs, seconds, metrics = runner.run(run())
    assert all(difference(a, b) <= 1e-4 for a, b in zip(outputs, expected, strict=True))
    assert (metrics["rollout/completed"], metrics["rollout/failed"], metrics["rollout/replicas_alive"]) == (16, 0, 1)
    assert 0 < metrics["rollout/timeouts"] == metrics["rollout/retried"] <= 8
    assert seconds < 30  # one deadline, and the other replica's work
    _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=20)
    assert not alive  # a stopped process too


class Listening(vLLMOmniHttpServer):
    """No engine: only what it would see."""

    async def launch_server(self):
        os.environ["CUDA_VISIBLE_DEVICES"] = self.cuda_visible_devices  # as `launch.start_engine` does
        return 0.0

    async def sees(self):
        import ray

        return os.environ["CUDA_VISIBLE_DEVICES"], ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()


def test_engines_beside_trainers_share_their_gpus(cluster, tiny, runner, monkeypatch):
    import ray

    monkeypatch.delenv("OMNI_ROLLOUT_CPU", raising=False)
    monkeypatch.setattr(vLLMOmniReplica, "server_class", Listening)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])

    @ray.remote(num_cpus=0, num_gpus=2)
    class Trainer:
        def place(self):
            return [(ray.get_runtime_context().get_node_id(), str(gpu)) for gpu in ray.get_gpu_ids()]

    def config(replicas, tensor_parallel):
        settings = VllmOmniConfig(tensor_model_parallel_size=tensor_parallel)
        return DiffusionRolloutConfig(backend="vllm_omni", num_replicas=replicas, vllm_omni=settings)

    async def run():
        start = time.perf_counter()
        with pytest.raises(RolloutConfigError, match="Missing: 3 GPUs"):
            await Fleet.launch(config(1, 3), tiny, cpus=0.1)  # no node has three
        with pytest.raises(RolloutConfigError, match="1 of them find no node.*Missing: 1 GPUs"):
            await Fleet.launch(config(5, 1), tiny, cpus=0.1)
        assert time.perf_counter() - start < 2.0
        trainers = [Trainer.remote() for _ in range(2)]
        held = [place for trainer in trainers for place in ray.get(trainer.place.remote())]
        with pytest.raises(RolloutConfigError, match="do not fit"):
            await Fleet.launch(config(1, 1), tiny, cpus=0.1)  # the trainers have them all
        fleet = await Fleet.launch(config(2, 2), tiny, cpus=0.1, beside=held)
        seen = [await replica.backend.call(Listening.sees) for replica in fleet.router.replicas]
        with pytest.raises(RolloutConfigError, match="beside the trainers: 1 of them find no node"):
            await Fleet.launch(config(3, 2), tiny, cpus=0.1, beside=held)
        await fleet.close()
        for trainer in trainers:
            ray.kill(trainer)
        return held, seen

    held, seen = runner.run(run())
    for (devices, node, reserved), own in zip(seen, (held[:2], held[2:]), strict=True):
        assert (node, devices) == (own[0][0], ",".join(gpu for _, gpu in own))
        assert reserved == []  # Ray's books show the trainers alone
    assert len({node for _, node, _ in seen}) == 2
