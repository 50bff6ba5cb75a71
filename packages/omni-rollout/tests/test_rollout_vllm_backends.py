"""The same promises, held by both backends: the embedded one, and a real vLLM-Omni engine in a Ray actor.

The engine runs on the CPU platform (`OMNI_ROLLOUT_CPU=1`). On Linux x86-64 it is never skipped.
"""

import asyncio
import dataclasses
import platform
import socket
import sys
import uuid

import pytest
import torch
from lora_sync import CorruptPayloadError, WeightStream, content_sum, verify, verify_weights
from lora_sync.transport import Link
from omni_rollout.backend import RolloutBackend
from omni_rollout.errors import AbortedError, LifecycleError, ReplicaError, RolloutConfigError, SyncError
from omni_rollout.vllm_omni.server import vLLMOmniHttpServer
from safetensors.torch import load_file
from sde_samplers import Trajectory, from_diffusers, replay

ENGINE_RUNS_HERE = sys.platform == "linux" and platform.machine() == "x86_64"
BACKENDS = ["diffusers"] + (["vllm_omni"] if ENGINE_RUNS_HERE else [])
# The engine makes batches by the clock, and a batch's shape decides in which order its products are summed; a few steps can
# make a rounding error a hundred times larger. Other samples, adapters and settings are at least 1e-3 apart.
SAME = 1e-4
PROMPTS = [
    "three red circles on a black background",
    "one blue square on a white background",
    "four green triangles on a black background, please and thank you",
]


@pytest.fixture(params=BACKENDS)
def replica(request):
    return request.getfixturevalue("engine" if request.param == "vllm_omni" else "embedded")


@pytest.fixture(scope="module")
def weights(tiny):
    """The tiny transformer's weights as the backends hold them (the file is fp16)."""
    stored = load_file(f"{tiny}/transformer/diffusion_pytorch_model.safetensors")
    return {name: value.float() for name, value in stored.items()}


@pytest.fixture
def requests(make_request):
    return [make_request(i, prompt=PROMPTS[i // 2]) for i in range(4)]


# ---------------------------------------------------------------------------------------------------------- sampling


def test_seeds_reproduce(replica, draw, requests, difference):
    first, again = draw(replica, requests), draw(replica, requests)
    assert all(difference(a, b) <= SAME for a, b in zip(first, again, strict=True))
    other = draw(replica, [request.replace(seed=8, request_id=request.request_id + "x") for request in requests])
    assert all(difference(a, b, ("latents",)) > 0.1 for a, b in zip(first, other, strict=True))
    assert all(o["responses"].shape == (3, 64, 64) and o["policy_version"] == 0 for o in first)


def test_a_sample_does_not_depend_on_its_batch(replica, draw, make_request, difference):
    mixed = [make_request(i, prompt=PROMPTS[i % 3]) for i in range(6)]  # prompts of different lengths side by side
    together = draw(replica, mixed)
    assert max(o["batch_rows"] for o in together) > 1
    for request, output in zip(mixed, together, strict=True):
        alone = draw(replica, [request])[0]
        assert alone["batch_rows"] == 1
        assert difference(output, alone) <= SAME
        assert torch.equal(output["latents"][0], alone["latents"][0])
        assert difference(output, alone, ("prompt_embeds",)) <= 1e-5


def test_settings_of_each_request_are_honoured_in_one_batch(
    replica, embedded, draw, draw_apart, make_request, difference
):
    changes = [
        {"window": (0, 1)}, {"window": (2, 4)}, {"window": (1,), "noise_level": 0.3}, {"kind": "flow_cps"},
        {"kind": "dance_sde", "window": (0, 1, 2, 3), "noise_level": 0.4}, {"kind": "ode", "window": ()},
    ]  # fmt: skip
    mixed = [make_request(i, **change) for i, change in enumerate(changes)]
    for request, output in zip(mixed, draw_apart(replica, mixed), strict=True):
        expected = draw(embedded, [request])[0]
        assert difference(output, expected, ("final_latents",)) <= SAME
        if not request.settings.window:
            assert output.get("rollout_log_probs", None) is None
            continue
        assert output["step_index"].tolist() == list(request.settings.window)
        assert difference(output, expected, ("latents", "next_latents", "std")) <= SAME
        assert (output["rollout_log_probs"] - expected["rollout_log_probs"]).abs().max() <= 1e-5


def test_solvers_shared_noise_and_flash(replica, embedded, draw, draw_apart, make_request, difference):
    """DiffusionNFT's, DanceGRPO's and MixGRPO-Flash's settings, each as the embedded backend draws it, alone and mixed."""
    base, ordinary = {"num_inference_steps": 10}, {"solver": "euler", "tail_ratio": 1.0, "shared_noise": False}
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
    mixed = draw_apart(replica, requests)
    for request, together, (changes, steps) in zip(requests, mixed, settings, strict=True):
        alone, expected = draw(replica, [request])[0], draw(embedded, [request])[0]
        assert difference(alone, expected) <= 1e-5
        assert difference(together, expected) <= 2e-3
        for output in (alone, together):
            assert output["forwards"] == len(output["sigmas"]) - 1 == steps
        if request.settings.window:
            assert (alone["rollout_log_probs"] - expected["rollout_log_probs"]).abs().max() <= 1e-5
        if changes is not base:
            plain = draw(embedded, [request.replace(settings=request.settings.replace(**ordinary))])[0]
            assert difference(alone, plain, ("final_latents",)) > 2e-2


def test_bad_requests_are_refused_and_harm_nobody(replica, draw, requests, runner):
    with pytest.raises(RolloutConfigError, match="adapter='nobody'"):
        draw(replica, [requests[0].replace(adapter="nobody")])
    with pytest.raises(RolloutConfigError, match="tokens.*never cropped"):
        draw(replica, [requests[0].replace(settings=requests[0].settings.replace(max_sequence_length=8))])
    assert len(draw(replica, requests[:1])) == 1


# ----------------------------------------------------------------------------------------------------------- weights


def test_full_weights_before_lora_layers(replica, draw, requests, runner, weights, difference):
    before = draw(replica, requests[:2])
    changed = {name: value * 1.01 for name, value in weights.items()}
    receipt = runner.run(replica.update_weights(changed.items(), version=0))
    assert (receipt.tensors_bound, receipt.checksum) == (len(weights), content_sum(changed.values()))
    assert all(
        difference(b, a, ("final_latents",)) > 1e-3 for b, a in zip(before, draw(replica, requests[:2]), strict=True)
    )
    assert runner.run(replica.update_weights(weights.items(), version=0)).checksum == content_sum(weights.values())
    assert all(difference(b, a) <= SAME for b, a in zip(before, draw(replica, requests[:2]), strict=True))


def test_lora_add_replace_remove(replica, draw, requests, runner, difference, adapter):
    base = draw(replica, requests)
    first, second = adapter(1, seed=1), adapter(2, seed=2)
    verify(first, runner.run(replica.update_lora(first)))
    one = draw(replica, requests)
    assert {int(o["policy_version"]) for o in one} == {1}
    verify(second, runner.run(replica.update_lora(second)), previous_version=1)
    two = draw(replica, requests)
    for b, o, t in zip(base, one, two, strict=True):
        assert difference(b, o, ("final_latents",)) > 1e-2
        assert difference(o, t, ("final_latents",)) > 1e-2
    reference = draw(replica, [r.replace(adapter="reference") for r in requests])
    assert all(difference(b, r) <= SAME for b, r in zip(base, reference, strict=True))
    assert runner.run(replica.backend.call(RolloutBackend.remove_lora))
    assert not runner.run(replica.backend.call(RolloutBackend.remove_lora))
    after = draw(replica, requests)
    assert all(difference(b, a) <= SAME for b, a in zip(base, after, strict=True))


def test_two_adapters_at_one_version(replica, draw, requests, runner, difference, adapter):
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
        assert {int(o["policy_version"]) for o in outputs} == {version}
        for plain, default, old in zip(base, outputs[:2], outputs[2:], strict=True):
            pairs = ((plain, default), (plain, old), (default, old))
            assert min(difference(a, b, ("final_latents",)) for a, b in pairs) > 1e-2
    for name in ("default", "old"):
        assert runner.run(replica.backend.call(RolloutBackend.remove_lora, name))
    after = draw(replica, requests[:2])
    assert all(difference(b, a) <= SAME for b, a in zip(base, after, strict=True))


def test_an_adapter_that_fits_nowhere_is_an_error(replica, draw, requests, runner, difference, adapter):
    before = draw(replica, requests[:1])[0]
    with pytest.raises(Exception, match=r"transformer_blocks\.7\.attn\.to_q"):
        runner.run(replica.update_lora(adapter(9, seed=3, modules=["transformer_blocks.7.attn.to_q"])))
    after = draw(replica, requests[:1])[0]
    assert difference(before, after) <= 1e-5
    assert after["policy_version"] == before["policy_version"]


def test_full_weights_with_lora_layers_in_place(replica, draw, requests, runner, weights, difference):
    """LoRA layers exist by now: loaders that go by name alone would skip every wrapped weight."""
    before = draw(replica, requests[:2])
    changed = {name: value * 1.01 for name, value in weights.items()}
    receipt = runner.run(replica.update_weights(changed.items(), version=11))
    assert (receipt.version, receipt.tensors_bound) == (11, len(weights))
    assert receipt.checksum == content_sum(changed.values())
    after = draw(replica, requests[:2])
    assert {int(o["policy_version"]) for o in after} == {11}
    assert all(difference(b, a, ("final_latents",)) > 1e-3 for b, a in zip(before, after, strict=True))
    with pytest.raises(SyncError):
        runner.run(replica.update_weights(list(weights.items())[:-1], version=12))
    with pytest.raises(LifecycleError, match="no weights were synced"):
        draw(replica, requests[:1])
    receipt = runner.run(replica.update_weights(weights.items(), version=13))
    assert receipt.checksum == content_sum(weights.values())
    again = draw(replica, requests[:2])
    assert all(difference(b, a) <= SAME for b, a in zip(before, again, strict=True))


@pytest.mark.parametrize(("kind", "version"), [("shared_memory", 14), ("nccl", 16)])
def test_full_weights_through_a_link(replica, draw, requests, runner, weights, difference, kind, version):
    """Another process's part is played by a thread; on CPUs the broadcast goes over gloo."""
    before = draw(replica, requests[:2])
    for number, factor in ((version, 1.01), (version + 1, 1.0)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = f"127.0.0.1:{free.getsockname()[1]}" if kind == "nccl" else uuid.uuid4().hex
        link = Link(kind, place, 1)
        stream = WeightStream(((n, v * factor) for n, v in weights.items()), version=number, bucket_bytes=1 << 20)

        def send(link=link, stream=stream):
            with link.sender("cpu") as transport:
                for bucket in stream:
                    transport.send(bucket)

        async def both(link=link, send=send):
            return (await asyncio.gather(replica.receive_weights(link, 0), asyncio.to_thread(send)))[0]

        receipt = runner.run(both())
        assert verify_weights(stream.receipt, receipt).version == number
        after = draw(replica, requests[:2])
        close = [difference(b, a, ("final_latents",)) for b, a in zip(before, after, strict=True)]
        assert max(close) <= SAME if factor == 1.0 else min(close) > 1e-3
    with pytest.raises(CorruptPayloadError, match="were sent, the receiver holds"):
        verify_weights(dataclasses.replace(stream.receipt, checksum="1:0"), receipt)


# --------------------------------------------------------------------------------------------------------- lifecycle


def test_sleep_wake_and_refusals(replica, draw, requests, runner, difference, adapter):
    before = draw(replica, requests[:2])
    runner.run(replica.sleep())
    with pytest.raises(LifecycleError, match="asleep"):
        draw(replica, requests[:1])
    with pytest.raises(LifecycleError, match="asleep"):
        runner.run(replica.update_lora(adapter(20, seed=4)))
    assert runner.run(replica.health()).state == "asleep"
    runner.run(replica.wake_up())
    with pytest.raises(LifecycleError, match="must be asleep"):
        runner.run(replica.wake_up())
    after = draw(replica, requests[:2])
    assert all(difference(b, a) <= SAME for b, a in zip(before, after, strict=True))
    health = runner.run(replica.health())
    assert (health.state, health.in_flight) == ("ready", 0)
    assert health.generated > 0


def test_abort(replica, runner, make_request):
    requests = [make_request(i, num_inference_steps=60) for i in range(4)]

    async def run():
        task = asyncio.ensure_future(replica.generate(requests))
        while not (await replica.health()).in_flight:
            await asyncio.sleep(0.01)
        await replica.abort([request.request_id for request in requests])
        await task

    with pytest.raises(AbortedError, match="cancelled"):
        runner.run(run())


# -------------------------------------------------------------------------------------------- the engine and the rest

needs_engine = pytest.mark.skipif(not ENGINE_RUNS_HERE, reason="vLLM-Omni has wheels for Linux x86-64 only")


@needs_engine
def test_engine_latents_equal_diffusers(engine, embedded, draw, make_request, difference):
    for options in ({}, {"true_cfg_scale": 3.0, "negative_prompt": " "}):
        request = make_request(kind="ode", window=(), **options)
        ours, theirs = draw(engine, [request])[0], draw(embedded, [request])[0]
        # Two code paths in two processes: a product may be summed in another order, which moves a pixel by one level.
        assert difference(ours, theirs, ("final_latents", "sigmas")) <= 1e-5
        assert (ours["responses"].int() - theirs["responses"].int()).abs().max() <= 1


@needs_engine
def test_an_engine_trajectory_replays_in_the_trainer(engine, backend, runner, requests):
    samples = runner.run(engine.generate(requests))
    keywords = backend.spec.schedule_kwargs(backend.scheduler, 6, 64, 64)
    schedule = from_diffusers(backend.scheduler, 6, **keywords)
    trajectory = Trajectory(
        **{name: samples[name] for name in ("latents", "next_latents", "step_index", "std")},
        sigmas=samples["sigmas"][0], log_probs=samples["rollout_log_probs"], final=samples["final_latents"],
        schedule_hash=schedule.hash, kind="flow_sde", noise_level=0.7, log_prob_form="density",
    )  # fmt: skip
    cond = backend.encoder.encode([r.prompt for r in requests], 512)

    def velocity(x, sigma):
        return backend.spec.velocity(backend.transformer, x, sigma, cond, requests[0].settings)

    with torch.no_grad():
        steps = list(replay(velocity, trajectory, schedule))
    assert (torch.stack([s.log_prob for s in steps], 1) - trajectory.log_probs).abs().max() <= 1e-6


@needs_engine
def test_lora_means_the_same_in_engine_and_trainer(engine, embedded, draw, requests, runner, difference, adapter):
    payload = adapter(30, seed=5)
    outputs = []
    for replica in (engine, embedded):
        verify(payload, runner.run(replica.update_lora(payload)))
        outputs.append(draw(replica, requests))
        runner.run(replica.backend.call(RolloutBackend.remove_lora))
    assert max(difference(a, b) for a, b in zip(*outputs, strict=True)) <= SAME


@needs_engine
def test_an_adapter_that_comes_as_a_stream_of_buckets(engine, runner, adapter):
    sent = adapter(31, seed=6)
    named = sorted(sent.tensors.items())
    config = {"r": sent.rank, "lora_alpha": 3 * sent.rank, "target_modules": ["to_q"], "use_dora": False}
    stream = {
        "peft_config": config,
        "base_sync_done": True,
        "version": 31,
        "lora_int_id": 900,
        "lora_names": "qwen_image",
    }

    def bucket(part, **options):
        call = {"bucket": part, **stream, **options}
        return runner.run(engine.backend.call(vLLMOmniHttpServer._rpc, "update_weights_from_ipc", **call))

    assert bucket(named[:7], first=True, last=False) == {}
    facts = bucket(named[7:], first=False, last=True)
    assert facts == {"modules": len(sent.modules), "tensors": len(named), "equal": sent.numel}
    assert runner.run(engine.backend.call(vLLMOmniHttpServer._rpc, "drop_lora", 900))
    for wrong, words in ((config | {"use_rslora": True}, "use_rslora"), ({"lora_alpha": 4}, r"needs \['r'\]")):
        with pytest.raises(ReplicaError, match=words):
            bucket(named, first=True, last=True, peft_config=wrong)
    assert 900 not in runner.run(engine.backend.call(vLLMOmniHttpServer.facts))["lora_ids"]


@needs_engine
def test_the_scale_of_each_module_is_folded_into_its_b(engine, server, runner):
    blocks = [f"transformer.transformer_blocks.{i}.attn.to_out.lora_" for i in (0, 1)]

    def folded():
        from omni_rollout.vllm_omni.lora_request import OmniTensorLoRARequest, engine_tensors

        ones = {
            f"transformer.transformer_blocks.{i}.attn.to_out.0.lora_{x}.weight": torch.ones(2, 2)
            for i in (0, 1)
            for x in "AB"
        }
        request = OmniTensorLoRARequest(
            "x", 1, "/x", peft_config={"r": 2, "lora_alpha": 8}, lora_tensors=ones,
            lora_scales={"transformer.transformer_blocks.1.attn.to_out.0": 0.5}, lora_names="qwen_image",
        )  # fmt: skip
        return {key: float(t.mean()) for key, t in engine_tensors(request, (), torch.device("cpu"), torch.float32)}

    assert runner.run(engine.backend.call(server.do, folded)) == {
        blocks[0] + "A.weight": 1.0, blocks[0] + "B.weight": 4.0, blocks[1] + "A.weight": 1.0, blocks[1] + "B.weight": 0.5
    }  # fmt: skip


@needs_engine
def test_prompts_are_encoded_once(engine, draw, requests, runner):
    draw(engine, requests)
    sums = [
        runner.run(engine.backend.call(vLLMOmniHttpServer.facts))["prompts_cached"]
        for _ in range(2)
        if draw(engine, requests)
    ]
    assert sums[0] == sums[1]
