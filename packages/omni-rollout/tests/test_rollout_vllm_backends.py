"""The same promises, held by both backends: the embedded one, and a real vLLM-Omni engine in a Ray actor.

The engine runs on the CPU platform (`OMNI_ROLLOUT_CPU=1`), one for the whole file. On Linux x86-64 it is never skipped.
"""

import asyncio
import dataclasses
import os
import platform
import signal
import sys
import types

import cloudpickle
import pytest
import torch
from lora_sync import LoRAPayload, verify
from omni_rollout.config import DiffusionRolloutConfig, RouterConfig, VllmOmniConfig
from omni_rollout.diffusers_backend import DiffusersBackend
from omni_rollout.errors import LifecycleError, ReplicaDeadError, RolloutConfigError, SyncError
from omni_rollout.fleet import Fleet
from omni_rollout.placement import assign_nodes, cluster_nodes, on_node
from omni_rollout.replica import DiffusersReplica, LocalHandle
from omni_rollout.router import Router
from omni_rollout.types import GenerationRequest
from omni_rollout.vllm_omni.replica import vLLMOmniReplica
from omni_rollout.vllm_omni.server import vLLMOmniHttpServer
from omni_rollout.weights import content_sum
from safetensors.torch import load_file
from sde_samplers import Trajectory, from_diffusers, replay

ENGINE_RUNS_HERE = sys.platform == "linux" and platform.machine() == "x86_64"
BACKENDS = ["diffusers"] + (["vllm_omni"] if ENGINE_RUNS_HERE else [])
PROMPTS = [
    "three red circles on a black background",
    "one blue square on a white background",
    "four green triangles on a black background, please and thank you",
]
PHASES = ("latents", "next_latents", "std", "sigmas", "final_latents")


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
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


#: Other architectures, as small random pipelines; the last one is scheduled step by step.
MODELS = {
    "sd3": {},
    "z_image": {},
    "flux": {"guidance_scale": 3.5},
    "wan": {"num_frames": 5},
    "wan_5b": {"num_frames": 5},
}
STEPWISE = "qwen_image"


class TouringServer(vLLMOmniHttpServer):
    """Before it starts its own engine, runs one for each other model in the same process, which imports vLLM once."""

    async def launch_server(self, *args, **kwargs):
        self.tour = {}
        for name, stop in self.model_config.stops.items():
            settings = dataclasses.replace(self.config.vllm_omni, step_execution=name == STEPWISE)
            config = dataclasses.replace(self.config, vllm_omni=settings)
            server = vLLMOmniHttpServer(config, types.SimpleNamespace(path=stop["path"], algorithm="flow_grpo"))
            await vLLMOmniHttpServer.launch_server(server)
            try:
                base = await server.generate_sequences(stop["requests"])
                lora = await server.update_lora(stop["payload"])
                adapted = await server.generate_sequences(stop["requests"])
                weights = await server.update_weights(stop["weights"], version=2)
                self.tour[name] = {"base": base, "lora": lora, "adapted": adapted, "weights": weights}
            finally:
                await server.shutdown()
        return await super().launch_server(*args, **kwargs)

    async def toured(self, name):
        return self.tour[name]


@pytest.fixture(scope="module")
def stops(tmp_path_factory):
    """What each other model is asked for, and the embedded backend that says what is right."""
    from model_specs import tiny as tiny_models

    stops = {}
    for name in [*MODELS, STEPWISE]:
        path = str(tiny_models.build(name, tmp_path_factory.mktemp(name)))
        backend = DiffusersBackend.from_pretrained(path)
        targets = {
            module: child.weight.shape
            for module, child in backend.transformer.named_modules()
            if isinstance(child, torch.nn.Linear) and module.endswith(backend.spec.lora_targets)
        }
        generator, tensors = torch.Generator().manual_seed(3), {}
        for module, (out, wide) in targets.items():
            tensors[f"{module}.lora_A.weight"] = torch.randn(2, wide, generator=generator) * 0.3
            tensors[f"{module}.lora_B.weight"] = torch.randn(out, 2, generator=generator) * 0.3
        fields = {
            "seed": 7, "height": 64, "width": 64, "num_inference_steps": 4, "max_sequence_length": 48, "kind": "flow_sde",
            "noise_level": 0.7, "true_cfg_scale": 3.0, "negative_prompt": "blurry", **MODELS.get(name, {}),
        }  # fmt: skip
        requests = [
            GenerationRequest(
                f"{name}{i}", f"u{i}", i, prompt=PROMPTS[i % 2], window=((0, 1), (1, 2), (0, 3))[i], **fields
            )
            for i in range(3)
        ]
        # DiffusionNFT's setting, and a Flash tail, whose shorter table cannot share a batch with the others.
        requests.append(requests[0].replace(request_id=f"{name}nft", kind="ode", window=(), solver="dpm2"))
        requests.append(requests[1].replace(request_id=f"{name}flash", window=(0,), solver="dpm2", tail_ratio=0.5))
        stops[name] = {
            "path": path,
            "requests": requests,
            "payload": LoRAPayload.build(tensors, alphas=4.0, version=1),
            "weights": [(n, p.detach() * 1.01) for n, p in backend.transformer.named_parameters()],
            "backend": backend,
        }
    return stops


@pytest.fixture(scope="module")
def engine(cluster, tiny, runner, stops):
    os.environ["OMNI_ROLLOUT_CPU"] = "1"
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    settings = VllmOmniConfig(enforce_eager=True, max_num_seqs=8, request_batch_max_wait_ms=20.0)
    config = DiffusionRolloutConfig(backend="vllm_omni", dtype="float32", vllm_omni=settings)
    sent = {name: {k: v for k, v in stop.items() if k != "backend"} for name, stop in stops.items()}
    replica = vLLMOmniReplica(config, types.SimpleNamespace(path=tiny, stops=sent))
    replica.server_class = TouringServer
    runner.run(replica.launch())
    yield replica
    runner.run(replica.close())


@pytest.fixture(scope="module")
def embedded(tiny):
    backend = DiffusersBackend.from_pretrained(tiny)
    replica = DiffusersReplica(LocalHandle(backend), 8)
    replica.backend = backend
    return replica


@pytest.fixture(params=BACKENDS)
def replica(request):
    return request.getfixturevalue("engine" if request.param == "vllm_omni" else "embedded")


@pytest.fixture(scope="module")
def weights(tiny):
    """The tiny transformer's weights as the backends hold them (the file is fp16)."""
    stored = load_file(f"{tiny}/transformer/diffusion_pytorch_model.safetensors")
    return {name: value.float() for name, value in stored.items()}


@pytest.fixture
def draw(runner):
    """Samples of several requests that are in flight together."""

    def draw(client, requests):
        async def together():
            return await asyncio.gather(*(client.generate(request) for request in requests))

        return runner.run(together())

    return draw


@pytest.fixture
def requests(make_request):
    return [make_request(i, prompt=PROMPTS[i // 4 % 3]) for i in range(8)]


def difference(a, b, keys=PHASES):
    present = [key for key in keys if key in a.extra_fields or key in b.extra_fields]
    return max(float((a.extra_fields[key] - b.extra_fields[key]).abs().max()) for key in present)


def adapter(version, seed, modules=None):
    names = ("attn.to_q", "attn.to_k", "attn.to_out.0", "attn.add_q_proj", "attn.to_add_out", "img_mlp.net.2")
    modules = modules or [f"transformer_blocks.{i}.{name}" for i in range(4) for name in names]
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for module in modules:
        wide = 512 if "mlp" in module else 128
        tensors[f"{module}.lora_A.weight"] = torch.randn(4, wide, generator=generator) * 0.2
        tensors[f"{module}.lora_B.weight"] = torch.randn(128, 4, generator=generator) * 0.2
    return LoRAPayload.build(tensors, alphas=8.0, version=version)


# ---------------------------------------------------------------------------------------------------------- sampling


def test_seeds_reproduce(replica, draw, requests):
    first, again = draw(replica, requests), draw(replica, requests)
    assert all(difference(a, b) <= 1e-5 for a, b in zip(first, again, strict=True))
    other = draw(replica, [request.replace(seed=8, request_id=request.request_id + "x") for request in requests])
    assert all(difference(a, b, ("latents",)) > 0.1 for a, b in zip(first, other, strict=True))
    assert all(o.stop_reason == "completed" and o.diffusion_output.shape == (3, 64, 64) for o in first)
    assert all(o.extra_fields["seed"] == 7 and o.extra_fields["policy_version"] == 0 for o in first)


def test_a_sample_does_not_depend_on_its_batch(replica, draw, make_request):
    mixed = [make_request(i, prompt=PROMPTS[i % 3]) for i in range(6)]  # prompts of different lengths side by side
    together = draw(replica, mixed)
    assert max(o.extra_fields["batch_size"] for o in together) > 1
    for request, output in zip(mixed, together, strict=True):
        alone = draw(replica, [request])[0]
        assert alone.extra_fields["batch_size"] == 1
        assert difference(output, alone) <= 1e-5
        assert torch.equal(output.extra_fields["latents"][0], alone.extra_fields["latents"][0])
        assert torch.equal(output.extra_fields["prompt_embeds"], alone.extra_fields["prompt_embeds"])


def test_knobs_of_each_request_are_honoured_in_one_batch(replica, embedded, draw, make_request):
    changes = [
        {"window": (0, 1)}, {"window": (2, 4)}, {"window": (1,), "noise_level": 0.3}, {"kind": "flow_cps"},
        {"kind": "dance_sde", "window": (0, 1, 2, 3), "noise_level": 0.4}, {"kind": "ode", "window": ()},
    ]  # fmt: skip
    mixed = [make_request(i, **change) for i, change in enumerate(changes)]
    for request, output in zip(mixed, draw(replica, mixed), strict=True):
        expected = draw(embedded, [request])[0]
        assert difference(output, expected, ("final_latents",)) <= 2e-5
        if not request.window:
            assert output.log_probs is None
            continue
        assert output.extra_fields["step_index"].tolist() == list(request.window)
        assert difference(output, expected, ("latents", "next_latents", "std")) <= 2e-5
        assert (output.log_probs - expected.log_probs).abs().max() <= 1e-5


def test_solvers_shared_noise_and_flash(replica, embedded, draw, make_request):
    """DiffusionNFT's, DanceGRPO's and MixGRPO-Flash's settings, each as the embedded backend draws it, alone and mixed."""
    base = {"num_inference_steps": 10}
    nft, flash = {**base, "kind": "ode", "window": ()}, {**base, "window": (1, 2), "solver": "dpm2", "tail_ratio": 0.4}
    settings = [
        ({**nft, "solver": "dpm2"}, 10),
        ({**nft, "solver": "dpm3"}, 10),
        ({**base, "shared_noise": True}, 10),
        (flash, 5),  # three steps, then int((10 - 2) · 0.4) = 3 points from the joint to 0
        ({**flash, "window": (4, 5)}, 7),  # six steps, then int((10 - 5) · 0.4) = 2 points
        (base, 10),
    ]
    requests = [make_request(i + 1, uid="u", index=i + 1, **changes) for i, (changes, _) in enumerate(settings)]
    # A sample may stand where a rounding error of its batch grows a thousandfold by the end, so mixed rows get more room,
    # a tenth of what tells one setting from the next.
    mixed = draw(replica, requests)
    for request, together, (changes, steps) in zip(requests, mixed, settings, strict=True):
        alone, expected = draw(replica, [request])[0], draw(embedded, [request])[0]
        assert difference(alone, expected) <= 1e-5
        assert difference(together, expected) <= 2e-3
        assert alone.extra_fields["schedule_hash"] == expected.extra_fields["schedule_hash"]
        for output in (alone, together):
            assert output.extra_fields["forwards"] == len(output.extra_fields["sigmas"]) - 1 == steps
        if request.window:
            assert (alone.log_probs - expected.log_probs).abs().max() <= 1e-5
        if changes is not base:
            plain = draw(embedded, [request.replace(solver="euler", tail_ratio=1.0, shared_noise=False)])[0]
            assert difference(alone, plain, ("final_latents",)) > 2e-2


def test_bad_requests_are_refused_and_harm_nobody(replica, draw, requests, runner):
    with pytest.raises(RolloutConfigError, match="adapter='nobody'"):
        draw(replica, [requests[0].replace(adapter="nobody")])
    with pytest.raises(RolloutConfigError, match="tokens.*never cropped"):
        draw(replica, [requests[0].replace(max_sequence_length=8)])
    assert draw(replica, requests[:1])[0].stop_reason == "completed"


# ----------------------------------------------------------------------------------------------------------- weights


def test_lora_add_replace_remove(replica, draw, requests, runner):
    base = draw(replica, requests)
    first, second = adapter(1, seed=1), adapter(2, seed=2)
    verify(first, runner.run(replica.update_lora(first)))
    one = draw(replica, requests)
    assert {o.extra_fields["policy_version"] for o in one} == {1}
    verify(second, runner.run(replica.update_lora(second)), previous_version=1)
    two = draw(replica, requests)
    for b, o, t in zip(base, one, two, strict=True):
        assert difference(b, o, ("final_latents",)) > 1e-2
        assert difference(o, t, ("final_latents",)) > 1e-2
    reference = draw(replica, [r.replace(adapter="reference") for r in requests])
    assert all(difference(b, r) <= 1e-5 for b, r in zip(base, reference, strict=True))
    assert runner.run(replica.call("remove_lora"))
    assert not runner.run(replica.call("remove_lora"))
    after = draw(replica, requests)
    assert all(difference(b, a) <= 1e-5 for b, a in zip(base, after, strict=True))


def test_two_adapters_at_one_version(replica, draw, requests, runner):
    """What samples ("old") and what is trained ("default") are sent together, and a newer pair replaces them."""
    base = draw(replica, requests[:2])
    for version in (3, 4):
        for seed, name in enumerate(("default", "old")):
            payload = adapter(version, seed=10 * version + seed)
            verify(payload, runner.run(replica.update_lora(payload, name)))
        mixed = [
            r.replace(request_id=f"{r.request_id}-{n}", adapter=n) for n in ("default", "old") for r in requests[:2]
        ]
        outputs = draw(replica, mixed)
        assert {o.extra_fields["policy_version"] for o in outputs} == {version}
        for plain, default, old in zip(base, outputs[:2], outputs[2:], strict=True):
            pairs = ((plain, default), (plain, old), (default, old))
            assert min(difference(a, b, ("final_latents",)) for a, b in pairs) > 1e-2
    for name in ("default", "old"):
        assert runner.run(replica.call("remove_lora", name))
    after = draw(replica, requests[:2])
    assert all(difference(b, a) <= 1e-5 for b, a in zip(base, after, strict=True))


def test_an_adapter_that_fits_nowhere_is_an_error(replica, draw, requests, runner):
    before = draw(replica, requests[:1])[0]
    with pytest.raises(Exception, match=r"transformer_blocks\.7\.attn\.to_q"):
        runner.run(replica.update_lora(adapter(9, seed=3, modules=["transformer_blocks.7.attn.to_q"])))
    after = draw(replica, requests[:1])[0]
    assert difference(before, after) <= 1e-5
    assert after.extra_fields["policy_version"] == before.extra_fields["policy_version"]


def test_full_weights_with_lora_layers_in_place(replica, draw, requests, runner, weights):
    """LoRA layers exist by now: loaders that go by name alone would skip every wrapped weight."""
    before = draw(replica, requests[:2])
    changed = {name: value * 1.01 for name, value in weights.items()}
    receipt = runner.run(replica.update_weights(changed.items(), version=11))
    assert (receipt.version, receipt.tensors_bound) == (11, len(weights))
    assert receipt.checksum == content_sum(changed.values())
    after = draw(replica, requests[:2])
    assert {o.extra_fields["policy_version"] for o in after} == {11}
    assert all(difference(b, a, ("final_latents",)) > 1e-3 for b, a in zip(before, after, strict=True))
    with pytest.raises(SyncError):
        runner.run(replica.update_weights(list(weights.items())[:-1], version=12))
    with pytest.raises(LifecycleError, match="no weights were synced"):
        draw(replica, requests[:1])
    receipt = runner.run(replica.update_weights(weights.items(), version=13))
    assert receipt.checksum == content_sum(weights.values())
    again = draw(replica, requests[:2])
    assert all(difference(b, a) <= 1e-5 for b, a in zip(before, again, strict=True))


# --------------------------------------------------------------------------------------------------------- lifecycle


def test_pause_sleep_wake_and_refusals(replica, draw, requests, runner):
    before = draw(replica, requests[:2])
    runner.run(replica.pause())
    with pytest.raises(LifecycleError, match="paused"):
        draw(replica, requests[:1])
    runner.run(replica.sleep())
    with pytest.raises(LifecycleError, match="asleep"):
        draw(replica, requests[:1])
    with pytest.raises(LifecycleError, match="asleep"):
        runner.run(replica.update_lora(adapter(20, seed=4)))
    with pytest.raises(LifecycleError, match="level=1"):
        runner.run(replica.call("sleep", 2))
    assert runner.run(replica.health()).state == "asleep"
    runner.run(replica.wake_up())
    runner.run(replica.resume())
    with pytest.raises(LifecycleError, match="must be asleep"):
        runner.run(replica.wake_up())
    after = draw(replica, requests[:2])
    assert all(difference(b, a) <= 1e-5 for b, a in zip(before, after, strict=True))
    health = runner.run(replica.health())
    assert (health.state, health.in_flight) == ("ready", 0)
    assert health.generated > 0


def test_abort(replica, runner, make_request):
    requests = [make_request(i, num_inference_steps=300) for i in range(4)]

    async def run():
        tasks = [asyncio.ensure_future(replica.generate(request)) for request in requests]
        while not (await replica.health()).in_flight:
            await asyncio.sleep(0.01)
        await replica.abort([request.request_id for request in requests])
        return await asyncio.gather(*tasks)

    outputs = runner.run(run())
    assert [o.stop_reason for o in outputs] == ["aborted"] * 4
    assert all(o.diffusion_output is None for o in outputs)


# -------------------------------------------------------------------------------------------- the engine and the rest

needs_engine = pytest.mark.skipif(not ENGINE_RUNS_HERE, reason="vLLM-Omni has wheels for Linux x86-64 only")


@needs_engine
def test_engine_latents_equal_diffusers(engine, embedded, draw, make_request):
    for options in ({}, {"true_cfg_scale": 3.0, "negative_prompt": " "}):
        request = make_request(kind="ode", window=(), **options)
        ours, theirs = draw(engine, [request])[0], draw(embedded, [request])[0]
        assert difference(ours, theirs, ("final_latents", "sigmas")) == 0.0
        assert ours.extra_fields["schedule_hash"] == theirs.extra_fields["schedule_hash"]
        assert torch.equal(ours.diffusion_output, theirs.diffusion_output)


@needs_engine
def test_an_engine_trajectory_replays_in_the_trainer(engine, embedded, draw, requests):
    outputs = draw(engine, requests)
    backend, extras = embedded.backend, [o.extra_fields for o in outputs]
    keywords = backend.spec.schedule_kwargs(backend.scheduler, 6, 64, 64)
    trajectory = Trajectory(
        **{k: torch.stack([e[k] for e in extras]) for k in ("latents", "next_latents", "step_index", "std")},
        sigmas=extras[0]["sigmas"], log_probs=torch.stack([o.log_probs for o in outputs]),
        final=torch.stack([e["final_latents"] for e in extras]), schedule_hash=extras[0]["schedule_hash"],
        kind="flow_sde", noise_level=0.7, log_prob_form="density",
    )  # fmt: skip
    cond = backend.encoder.encode([r.prompt for r in requests], 512)

    def velocity(x, sigma):
        return backend.spec.velocity(backend.transformer, x, sigma, cond, height=64, width=64)

    with torch.no_grad():
        steps = list(replay(velocity, trajectory, from_diffusers(backend.scheduler, 6, **keywords)))
    assert (torch.stack([s.log_prob for s in steps], 1) - trajectory.log_probs).abs().max() <= 1e-6


@needs_engine
def test_lora_means_the_same_in_engine_and_trainer(engine, embedded, draw, requests, runner):
    payload = adapter(30, seed=5)
    outputs = []
    for replica in (engine, embedded):
        verify(payload, runner.run(replica.update_lora(payload)))
        outputs.append(draw(replica, requests))
        runner.run(replica.call("remove_lora"))
    assert max(difference(a, b) for a, b in zip(*outputs, strict=True)) <= 1e-5


@needs_engine
@pytest.mark.parametrize("name", [*MODELS, STEPWISE])
def test_other_models_equal_the_embedded_backend(engine, stops, runner, name):
    """Guidance, prompts of different lengths, windows of each row, every LoRA target, and full weights after LoRA layers."""
    found, stop, backend = runner.run(engine.call("toured", name)), stops[name], stops[name]["backend"]
    expected = backend.generate(stop["requests"])
    keys = (*PHASES, "prompt_embeds", "negative_prompt_embeds")
    for ours, theirs in zip(found["base"], expected, strict=True):
        assert difference(ours, theirs, PHASES) <= 1e-5
        assert difference(ours, theirs, keys) <= 1e-4
        if theirs.log_probs is not None:
            assert (ours.log_probs - theirs.log_probs).abs().max() <= 1e-5
        assert (
            ours.extra_fields["forwards"]
            == theirs.extra_fields["forwards"]
            == 2 * len(theirs.extra_fields["sigmas"]) - 2
        )
        assert ours.extra_fields["schedule_hash"] == theirs.extra_fields["schedule_hash"]
        assert (ours.diffusion_output.int() - theirs.diffusion_output.int()).abs().max() <= 1
    verify(stop["payload"], found["lora"])
    backend.update_lora(stop["payload"])
    for ours, theirs, base in zip(found["adapted"], backend.generate(stop["requests"]), found["base"], strict=True):
        assert difference(ours, theirs) <= 1e-4
        assert difference(ours, base, ("final_latents",)) > 1e-2
    assert found["weights"].tensors_bound == len(stop["weights"])
    assert found["weights"].checksum == content_sum(value for _, value in stop["weights"])


@needs_engine
def test_prompts_are_encoded_once(engine, draw, requests, runner):
    draw(engine, requests)
    sums = [runner.run(engine.call("facts"))["prompts_cached"] for _ in range(2) if draw(engine, requests)]
    assert sums[0] == sums[1]


@needs_engine
def test_tokens_in_picture_out(engine, embedded, draw, runner, make_request):
    text = PROMPTS[0]
    ids = embedded.backend.encoder.parts[0](text, add_special_tokens=False).input_ids
    params = {"seed": 7, "uid": "u0", "index": 0, "height": 64, "width": 64, "num_inference_steps": 6}
    output = runner.run(engine.call("generate", ids, params, "tokens-1"))
    expected = draw(embedded, [make_request(prompt=text, kind="ode", window=())])[0]
    assert difference(output, expected, ("final_latents",)) <= 1e-5
    letters = [token for letter in text for token in embedded.backend.encoder.parts[0](letter).input_ids]
    with pytest.raises(RolloutConfigError, match="no encoding of a text"):
        runner.run(engine.call("generate", letters, params, "tokens-2"))


def test_two_nodes_place_actors_as_asked(cluster):
    import ray

    @ray.remote(num_cpus=0, num_gpus=1)
    class Where:
        def node(self):
            return ray.get_runtime_context().get_node_id()

    nodes = cluster_nodes()
    assert [node.gpus for node in nodes] == [2, 2]
    for strategy, distinct in (("pack", 1), ("spread", 2)):
        asked = assign_nodes(nodes, 2, gpus=1, cpus=0, strategy=strategy)
        actors = [Where.options(scheduling_strategy=on_node(node)).remote() for node in asked]
        got = ray.get([actor.node.remote() for actor in actors], timeout=60)
        assert got == [node.node_id for node in asked]
        assert len(set(got)) == distinct
        for actor in actors:
            ray.kill(actor)
    with pytest.raises(RolloutConfigError, match="Missing: 3 GPUs"):
        assign_nodes(cluster_nodes(), 1, gpus=3)


def test_a_fleet_survives_the_death_of_its_process(cluster, tiny, embedded, runner, make_request):
    """kill -9 in the middle of a batch: the replica comes back at the newest adapter and the batch is complete."""
    config = DiffusionRolloutConfig(dtype="float32", max_batch_size=4)
    requests = [make_request(i, num_inference_steps=30) for i in range(12)]
    payload = adapter(40, seed=6)

    async def run():
        fleet = await Fleet.launch(config, types.SimpleNamespace(path=tiny), cpus=0.5)
        receipts = await fleet.update_lora(payload)
        pid = await fleet.router.replicas[0].call("pid")
        tasks = [asyncio.ensure_future(fleet.router.generate(request)) for request in requests]
        while not (await fleet.router.replicas[0].health()).generated:
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        outputs = await asyncio.gather(*tasks)
        await fleet.close()
        return receipts, outputs, fleet.router.metrics()

    receipts, outputs, metrics = runner.run(run())
    assert receipts[0].hash == payload.hash
    assert {o.extra_fields["policy_version"] for o in outputs} == {40}
    assert (metrics["rollout/deaths"], metrics["rollout/restarts"], metrics["rollout/completed"]) == (1, 1, 12)
    backend = embedded.backend
    if backend.policy_version < 40:
        backend.update_lora(payload)
        expected = backend.generate(requests)
        backend.remove_lora()
        assert all(difference(a, b) <= 1e-5 for a, b in zip(outputs, expected, strict=True))


@needs_engine
def test_a_killed_engine_loses_nothing(engine, embedded, draw, make_request, runner):
    """Last: the engine does not survive it. Its requests finish elsewhere, with the same seeds and so the same pictures."""
    requests = [make_request(i, num_inference_steps=40) for i in range(16)]
    expected = draw(embedded, requests)
    router = Router([engine, embedded], RouterConfig(request_timeout_s=60))

    async def run():
        tasks = [asyncio.ensure_future(router.generate(request)) for request in requests]
        while not (await engine.health()).in_flight:
            await asyncio.sleep(0.01)
        import ray

        ray.kill(engine.handle)
        return await asyncio.gather(*tasks)

    outputs = runner.run(run())
    assert all(difference(a, b) <= 2e-5 for a, b in zip(outputs, expected, strict=True))
    metrics = router.metrics()
    assert metrics["rollout/completed"] == 16
    assert (metrics["rollout/deaths"], metrics["rollout/replicas_alive"]) == (1, 1)
    assert metrics["rollout/retried"] > 0
    with pytest.raises(ReplicaDeadError):
        draw(engine, requests[:1])
