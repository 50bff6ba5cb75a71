"""Fixtures: requests, a backend made of arithmetic (no model), the tiny policy and its adapters, a Ray cluster of two nodes."""

import asyncio
import dataclasses
import hashlib
import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from omni_rollout.config import DiffusionRolloutConfig, RouterConfig, VllmOmniConfig
from omni_rollout.fleet import Fleet
from omni_rollout.lifecycle import Lifecycle
from omni_rollout.replica import DiffusersReplica, LocalHandle
from omni_rollout.types import DiffusionOutput, GenerationRequest, aborted
from omni_rollout.vllm_omni.replica import vLLMOmniReplica
from omni_rollout.vllm_omni.server import vLLMOmniHttpServer

TINY = Path(__file__).resolve().parents[2] / "ray-trainer" / "src" / "ray_trainer" / "assets" / "tiny_qwen_image"


def pytest_configure():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> str:
    """Folder of the tiny Qwen-Image policy."""
    return str(TINY)


@pytest.fixture
def make_request():
    """Builds requests with the defaults of the tiny policy; uid, index and id follow from the number."""

    def make(number: int = 0, **changes) -> GenerationRequest:
        fields = {
            "request_id": f"r{number}", "uid": f"u{number // 4}", "index": number % 4, "seed": 7,
            "prompt": "three red circles on a black background", "height": 64, "width": 64, "num_inference_steps": 6,
            "kind": "flow_sde", "noise_level": 0.7, "window": (0, 1),
        }  # fmt: skip
        return GenerationRequest(**{**fields, **changes})

    return make


class ArithmeticBackend:
    """Pictures are a hash of (seed, uid, index). It can be told to fail, hang or die, which is all the router sees."""

    def __init__(self, name: str = "a", delay: float = 0.0):
        self.name, self.delay = name, delay
        self.lifecycle = Lifecycle()
        self.lifecycle.load()
        self.lifecycle.loaded()
        self.calls: list[list[str]] = []
        self.errors: list[BaseException] = []
        self.cancelled: set[str] = set()
        self.hang = 0.0

    @property
    def policy_version(self):
        return self.lifecycle.policy_version

    def generate_sequences(self, requests):
        self.calls.append([r.request_id for r in requests])
        if self.errors:
            raise self.errors.pop(0)
        time.sleep(self.hang + self.delay)
        return [self._one(r) for r in requests]

    def _one(self, request):
        if request.request_id in self.cancelled:
            return aborted(request, self.policy_version)
        word = hashlib.sha256(f"{request.seed}|{request.uid}|{request.index}".encode()).digest()
        picture = torch.tensor(list(word[:12]), dtype=torch.uint8).view(3, 2, 2)
        latents = picture.float()
        W = len(request.window)
        extra = {
            "latents": latents.expand(W, 3, 2, 2), "next_latents": latents.expand(W, 3, 2, 2) + 1,
            "step_index": torch.tensor(request.window), "std": torch.ones(W), "final_latents": latents,
            "sigmas": torch.linspace(1, 0, request.num_inference_steps + 1),
            "prompt_embeds": torch.ones(len(request.prompt.split()), 5),
            "prompt_embeds_mask": torch.ones(len(request.prompt.split())).bool(),
            "policy_version": self.policy_version, "seed": request.seed, "schedule_hash": "h", "batch_size": 1,
            "forwards": 6.0,
        }  # fmt: skip
        return DiffusionOutput(picture, torch.arange(W).float(), "completed", 0, extra)

    def update_lora(self, payload, adapter="default"):
        self.lifecycle.policy_version = payload
        return payload

    def abort(self, request_ids):
        self.cancelled |= set(request_ids)
        return len(request_ids)


@pytest.fixture
def arithmetic_backend():
    """The class, so that a test can make several."""
    return ArithmeticBackend


@pytest.fixture(scope="session")
def runner():
    """One event loop for all that outlives a test."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def cluster():
    """Two Ray nodes on this machine, with GPUs that exist only in Ray's books."""
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 2})
    cluster.add_node(num_cpus=2, num_gpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def embedded(tiny):
    """The tiny policy in this process, as a replica; `.backend` is the backend itself."""
    from omni_rollout.diffusers_backend import DiffusersBackend

    backend = DiffusersBackend.from_pretrained(tiny)
    replica = DiffusersReplica(LocalHandle(backend), 8)
    replica.backend = backend
    return replica


@pytest.fixture
def draw(runner):
    """Samples of several requests that are in flight together."""

    def draw(client, requests):
        async def together():
            return await asyncio.gather(*(client.generate(request) for request in requests))

        return runner.run(together())

    return draw


@pytest.fixture(scope="session")
def difference():
    """Largest absolute difference of two outputs, over the tensors that they have."""

    def difference(a, b, keys=("latents", "next_latents", "std", "sigmas", "final_latents")):
        present = [key for key in keys if key in a.extra_fields or key in b.extra_fields]
        return max(float((a.extra_fields[key] - b.extra_fields[key]).abs().max()) for key in present)

    return difference


@pytest.fixture(scope="session")
def adapter():
    """Random adapters of the tiny policy: `adapter(version, seed)`."""
    from lora_sync import LoRAPayload

    def adapter(version, seed, modules=None):
        names = ("attn.to_q", "attn.to_k", "attn.to_out.0", "attn.add_q_proj", "attn.to_add_out", "img_mlp.net.2")
        modules = modules or [f"transformer_blocks.{i}.{name}" for i in range(4) for name in names]
        generator, tensors = torch.Generator().manual_seed(seed), {}
        for module in modules:
            wide = 512 if "mlp" in module else 128
            tensors[f"{module}.lora_A.weight"] = torch.randn(4, wide, generator=generator) * 0.2
            tensors[f"{module}.lora_B.weight"] = torch.randn(128, 4, generator=generator) * 0.2
        return LoRAPayload.build(tensors, alphas=8.0, version=version)

    return adapter


class LendingServer(vLLMOmniHttpServer):
    """A real engine that can also lend its process, in which vLLM is imported, and be told to fail."""

    def __init__(self, *args):
        super().__init__(*args)
        self._arguments = args

    async def tour(self, stops):
        """Engines of other models, one after the other in this process, and what each answered; then its own again."""
        await self.shutdown()
        answers = {name: await self._visit(**stop) for name, stop in stops.items()}
        self.__init__(*self._arguments)
        await self.launch_server()
        return answers

    async def _visit(self, path, requests, payload, weights, stepwise):
        settings = dataclasses.replace(self.config.vllm_omni, step_execution=stepwise, openai_port=None)
        config = dataclasses.replace(self.config, vllm_omni=settings)
        server = vLLMOmniHttpServer(config, SimpleNamespace(path=path, algorithm="flow_grpo"))
        await server.launch_server()
        try:
            base = await server.generate_sequences(requests)
            lora = await server.update_lora(payload)
            adapted = await server.generate_sequences(requests)
            return {"base": base, "lora": lora, "adapted": adapted, "weights": await server.update_weights(weights, 2)}
        finally:
            await server.shutdown()

    async def fail_next(self, count):
        """Let the engine raise for that many requests."""
        generate, left = self.engine.generate, iter(range(count - 1, -1, -1))

        def failing(**_):
            if not next(left):
                self.engine.generate = generate
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        self.engine.generate = failing


@pytest.fixture(scope="session")
def fleet(cluster, tiny, runner):
    """One replica of a real engine on the CPU platform, for all tests of a process."""
    os.environ["OMNI_ROLLOUT_CPU"] = "1"
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = VllmOmniConfig(enforce_eager=True, max_num_seqs=8, request_batch_max_wait_ms=20.0, openai_port=port)
    config = DiffusionRolloutConfig(
        backend="vllm_omni", dtype="float32", vllm_omni=settings, router=RouterConfig(request_timeout_s=120)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vLLMOmniReplica, "server_class", LendingServer)
        fleet = runner.run(Fleet.launch(config, SimpleNamespace(path=tiny), cpus=0.5))
        yield fleet
        runner.run(fleet.close())


@pytest.fixture
def engine(fleet):
    """The fleet's replica, whichever it is now."""
    return fleet.router.replicas[0]
