"""Fixtures: requests, a backend made of arithmetic (no model), the tiny policy and its adapters, a Ray cluster of two nodes."""

import asyncio
import dataclasses
import hashlib
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import cloudpickle
import pytest
import torch
from omni_rollout.config import DiffusionRolloutConfig, RouterConfig, VllmOmniConfig
from omni_rollout.fleet import Fleet
from omni_rollout.remote import typed_error
from omni_rollout.replica import DiffusersReplica, Replica
from omni_rollout.samples import in_order, stacked
from omni_rollout.types import GenerationRequest
from omni_rollout.vllm_omni.replica import vLLMOmniReplica
from omni_rollout.vllm_omni.server import vLLMOmniHttpServer
from sde_samplers import SamplerSettings

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "packages" / "ray-trainer" / "src" / "ray_trainer" / "assets" / "tiny_qwen_image"


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
        """`changes` of the request or of its settings."""
        fields = {
            "request_id": f"r{number}", "uid": f"u{number // 4}", "index": number % 4, "seed": 7,
            "prompt": "three red circles on a black background",
        }  # fmt: skip
        settings = {
            "height": 64, "width": 64, "num_inference_steps": 6, "kind": "flow_sde", "noise_level": 0.7, "window": (0, 1),
        }  # fmt: skip
        for name, value in changes.items():
            (settings if name in SamplerSettings.__dataclass_fields__ else fields)[name] = value
        return GenerationRequest(**fields, settings=SamplerSettings(**settings))

    return make


class ArithmeticReplica(Replica):
    """Pictures are a hash of (seed, uid, index). It can be told to fail, hang or die, which is all the router sees."""

    def __init__(self, name: str = "a", delay: float = 0.0, batch_size: int = 8):
        self.name, self.delay, self.batch_size, self.remote = f"replica-{name}", delay, batch_size, None
        self.calls: list[list[str]] = []
        self.errors: list[Exception] = []
        self.cancelled: set[str] = set()
        self.hang, self.version = 0.0, 0
        self._turn = asyncio.Semaphore(1)

    async def generate(self, requests):
        async with self._turn:  # one batch after the other, as a backend works
            self.calls.append([r.request_id for r in requests])
            if self.errors:
                raise typed_error(self.name, self.errors.pop(0))
            await asyncio.sleep(self.hang + self.delay)
            return stacked([self.row(r) for r in requests])

    def row(self, request):
        word = hashlib.sha256(f"{request.seed}|{request.uid}|{request.index}".encode()).digest()
        picture = torch.tensor(list(word[:12]), dtype=torch.uint8).view(3, 2, 2)
        latents, settings = picture.float(), request.settings
        W, words = len(settings.window), len(request.prompt.split())
        row = {
            "responses": picture, "final_latents": latents, "sigmas": torch.linspace(1, 0, settings.num_inference_steps + 1),
            "policy_version": torch.tensor(self.version), "forwards": torch.tensor(6.0), "batch_rows": torch.tensor(1),
        }  # fmt: skip
        if request.return_trajectory:
            row |= {
                "latents": latents.expand(W, 3, 2, 2), "next_latents": latents.expand(W, 3, 2, 2) + 1,
                "step_index": torch.tensor(settings.window), "std": torch.ones(W), "rollout_log_probs": torch.arange(W).float(),
                "prompt_embeds": torch.ones(words, 5), "prompt_embeds_mask": torch.ones(words).bool(),
            }  # fmt: skip
        return row

    async def update_lora(self, payload, adapter="default"):
        self.version = payload

    async def abort(self, request_ids):
        self.cancelled |= set(request_ids)
        return len(request_ids)

    async def close(self):
        pass


@pytest.fixture
def arithmetic_replica():
    """The class, so that a test can make several."""
    return ArithmeticReplica


@pytest.fixture(scope="session")
def runner():
    """One event loop for all that outlives a test."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def cluster(forked_engine):
    """Two Ray nodes on this machine, with GPUs that exist only in Ray's books. Its workers are forks."""
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORKS", forked_engine.args[0])
        patch.setenv(
            "RAY_kill_worker_timeout_milliseconds", "500"
        )  # a process that is stopped would cost the usual 5 s
        node = {"num_gpus": 2, "setup_worker_path": str(ROOT / "tests" / "forks.py")}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **node})
        cluster.add_node(num_cpus=2, **node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


class InProcess:
    """A backend of this process where a replica has a `Remote`."""

    def __init__(self, backend):
        self.backend, self.name = backend, "in-process"
        self.thread = ThreadPoolExecutor(max_workers=1)  # calls run one after the other, as in an actor

    async def call(self, method, *args, **kwargs):
        work = partial(getattr(self.backend, method.__name__), *args, **kwargs)
        try:
            return await asyncio.get_running_loop().run_in_executor(self.thread, work)
        except Exception as error:
            raise typed_error(self.name, error) from error

    async def aside(self, method, *args):
        return getattr(self.backend, method.__name__)(*args)


@pytest.fixture(scope="session")
def backend(tiny):
    """The tiny policy in this process."""
    from omni_rollout.diffusers_backend import DiffusersBackend

    return DiffusersBackend.from_pretrained(tiny, max_batch_size=8)


@pytest.fixture(scope="session")
def embedded(backend):
    """The same behind the face of a replica."""
    replica = DiffusersReplica(None, 8)
    replica.remote = InProcess(backend)
    return replica


@pytest.fixture(scope="session")
def collect():
    """All samples of a client's stream, in the order of the requests."""

    async def collect(client, requests):
        return in_order([chunk async for chunk in client.stream(requests)])

    return collect


@pytest.fixture
def draw(runner):
    """Samples of one call to a replica, one by one."""
    return lambda replica, requests: list(runner.run(replica.generate(requests)))


@pytest.fixture
def draw_apart(runner):
    """Samples of several calls that are in flight together, for requests of different shapes."""

    def draw_apart(replica, requests):
        async def together():
            return await asyncio.gather(*(replica.generate([request]) for request in requests))

        return [samples[0] for samples in runner.run(together())]

    return draw_apart


@pytest.fixture(scope="session")
def difference():
    """Largest absolute difference of two samples, over the tensors that they have; prompts without their padding."""

    def of(sample, key):
        mask = sample.get(f"{key}_mask", None)
        return sample[key] if mask is None else sample[key][mask]

    def difference(a, b, keys=("latents", "next_latents", "std", "sigmas", "final_latents")):
        present = [key for key in keys if a.get(key, None) is not None or b.get(key, None) is not None]
        return max(float((of(a, key) - of(b, key)).abs().max()) for key in present)

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

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._arguments = args, options

    async def tour(self, stops):
        """Engines of other models, one after the other in this process, and what each answered; then its own again."""
        await self.shutdown()
        answers = {name: await self._visit(**stop) for name, stop in stops.items()}
        self.__init__(*self._arguments[0], **self._arguments[1])
        await self.launch_server()
        return answers

    def do(self, function):
        """What a function returns here."""
        return function()

    def compiled(self):
        """How many graphs torch has compiled in this process."""
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]

    async def _visit(self, path, calls, payload, weights, stepwise):
        settings = dataclasses.replace(self.config.vllm_omni, step_execution=stepwise, openai_port=None)
        config = dataclasses.replace(self.config, vllm_omni=settings)
        server = vLLMOmniHttpServer(config, path)
        await server.launch_server()
        try:
            base = [await server.generate(requests) for requests in calls]
            lora = await server.update_lora(payload)
            adapted = [await server.generate(requests) for requests in calls]
            answers = {
                "base": base,
                "lora": lora,
                "adapted": adapted,
                "weights": await server.update_weights(weights, 2),
            }
            return answers | await self._borrowing(server, path, calls[0], weights, payload)
        finally:
            await server.shutdown()

    @staticmethod
    async def _borrowing(server, path, requests, weights, payload):
        """Samples before and after the engine took another module's weights and adapter in the place of its own, and after those
        changed."""
        from lora_sync import apply_lora
        from lora_sync.one_copy import lend, lend_adapter, lent_adapter
        from omni_rollout.diffusers_backend import DiffusersBackend

        transformer = DiffusersBackend.from_pretrained(path).transformer
        transformer.load_state_dict(dict(weights), strict=False)
        apply_lora(transformer, payload)
        own = await server.generate(requests)
        layout = await server.base_layout()
        loans = lend(transformer, layout, server.spec.lora_names)
        shares = await server.borrow_base(loans, {"default": lend_adapter(transformer, "default")})
        lent = await server.generate(requests)
        receipts = [
            (sent.promise, await server.update_lora(sent)) for sent in (lent_adapter(transformer, "default", 2),)
        ]
        bound = await server.generate(requests)
        with torch.no_grad():
            for parameter in transformer.parameters():
                parameter.mul_(1.02)
        sent = lent_adapter(transformer, "default", 3)
        receipts.append((sent.promise, await server.update_lora(sent)))
        changed = await server.generate(requests)
        try:
            await server.update_weights(weights, 4)
            refused = ""
        except Exception as error:
            refused = str(error)
        answers = {"shares": shares, "receipts": receipts, "refused": refused}
        return answers | {"own": own, "lent": lent, "bound": bound, "changed": changed}

    async def moved(self):
        """Whether a pipeline that was built on the CPU can be moved while a layer has no values yet, and where they will come."""
        from omni_rollout.vllm_omni.denoise import RolloutMixin
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        class Engines(torch.nn.Module):
            def __init__(self, *, od_config):
                super().__init__()

        class Pipeline(RolloutMixin, Engines):
            pass

        late, there = torch.nn.Linear(2, 2, device="meta"), torch.nn.Linear(2, 2)
        pipeline, kept = Pipeline(od_config=SimpleNamespace(enforce_eager=True)), there.weight.detach().clone()
        pipeline.transformer = torch.nn.ModuleDict({"late": late, "there": there})
        get_layerwise_info(late).restore_device = torch.device("meta")
        pipeline.to(torch.device("cpu"))
        return late.weight.is_meta, str(get_layerwise_info(late).restore_device), torch.equal(there.weight, kept)

    async def bound_to_a_turned_weight(self, payload):
        """What the engine's adapters answer for a layer [6 → 4] whose weight lies as fp8 has it, [in, out], and its product."""
        from omni_rollout.vllm_omni.lora_request import make_request
        from omni_rollout.vllm_omni.worker_adapters import WorkerAdapters
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.linear import ReplicatedLinear

        with set_current_vllm_config(VllmConfig()):
            layer = ReplicatedLinear(6, 4, bias=False, params_dtype=torch.float32)

        class Turned:
            def apply(self, layer, x, bias=None):
                return x @ layer.weight

        layer.weight, layer.quant_method = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False), Turned()
        pipeline = torch.nn.ModuleDict({"transformer": torch.nn.ModuleDict({"proj": layer})})
        adapters = WorkerAdapters(pipeline, {}, torch.device("cpu"), torch.float32)
        facts = adapters.bind(make_request(payload, 1, "default", "any"))
        return facts, layer.quant_method.apply(layer, torch.eye(6))

    async def attended_jointly(self, mask):
        """Largest difference between Qwen-Image's attention as the engine has it and as its compiled blocks have it; the largest
        value. The kernel's part is done by plain operations."""
        from omni_rollout.vllm_omni.pipelines.qwen_attention import JoinedAttention
        from torch import nn
        from vllm_omni.diffusion.layers.rope import RotaryEmbedding
        from vllm_omni.diffusion.models.qwen_image.qwen_image_transformer import QwenImageCrossAttention

        B, T, S, H, D, C = 2, 3, 5, 2, 8, 6

        def joined(text, image, text_norm, image_norm, text_angle, image_angle, eps):
            parts = []
            for x, norm, angle in ((text, text_norm, text_angle), (image, image_norm, image_angle)):
                heads = nn.functional.rms_norm(x.unflatten(-1, (H, D)), (D,), norm, eps).unflatten(-1, (-1, 2))
                turned = torch.view_as_complex(heads.contiguous()) * torch.view_as_complex(angle)[:, None]
                parts.append(torch.view_as_real(turned).flatten(-2))
            return torch.cat(parts, dim=1)

        def attend(query, key, value, metadata):
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            mask = None if metadata is None else metadata.attn_mask[:, None, None]
            return nn.functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)

        torch.manual_seed(0)
        norms = {name: nn.RMSNorm(D) for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")}
        for norm in norms.values():
            nn.init.normal_(norm.weight, 1.0, 0.2)
        of_image, of_text = nn.Linear(C, 3 * H * D), nn.Linear(C, 3 * H * D)
        layer = SimpleNamespace(
            to_qkv=lambda x: (of_image(x), None), add_kv_proj=lambda x: (of_text(x), None), **norms, eps=1e-6, qk_norm=True,
            query_num_heads=H, kv_num_heads=H, add_query_num_heads=H, add_kv_num_heads=H, head_dim=D, parallel_config=None,
            rope=RotaryEmbedding(is_neox_style=False), attn=attend, to_out=nn.Linear(H * D, C), to_add_out=nn.Linear(H * D, C),
        )  # fmt: skip
        given = (
            torch.randn(B, S, C),
            torch.randn(B, T, C),
            *(torch.polar(torch.ones(n, 4), torch.randn(n, 4)) for n in (S, T)),
        )
        place = "omni_rollout.vllm_omni.pipelines.qwen_attention.takes_joined_heads"
        with (
            torch.no_grad(), patch(place, lambda _: True), patch("torch.compiler.is_compiling", lambda: True),
            patch("model_specs.joined_heads.joined_heads", joined),
        ):  # fmt: skip
            found = JoinedAttention.forward(layer, *given, None, mask)
        with torch.no_grad():
            wanted = QwenImageCrossAttention.forward(layer, *given, None, mask)
        return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)), wanted[0].abs().max().item()

    async def fail_next(self, count):
        """Let the engine raise for that many requests."""
        generate, left = self.engine.generate, iter(range(count - 1, -1, -1))

        def failing(**_):
            if not next(left):
                self.engine.generate = generate
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        self.engine.generate = failing


@pytest.fixture(scope="session")
def server():
    """The class in the fleet's actors, for calls by its methods."""
    return LendingServer


@pytest.fixture(scope="session")
def fleet(cluster, tiny, runner):
    """One replica of a real engine on the CPU platform, for all tests of a process."""
    os.environ["OMNI_ROLLOUT_CPU"] = "1"
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = VllmOmniConfig(enforce_eager=True, max_num_seqs=8, openai_port=port)
    config = DiffusionRolloutConfig(
        backend="vllm_omni", dtype="float32", vllm_omni=settings, router=RouterConfig(request_timeout_s=120)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vLLMOmniReplica, "server_class", LendingServer)
        fleet = runner.run(Fleet.launch(config, tiny, cpus=0.5))
        yield fleet
        runner.run(fleet.close())


@pytest.fixture
def engine(fleet):
    """The fleet's replica, whichever it is now."""
    return fleet.router.replicas[0]
