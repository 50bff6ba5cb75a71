"""The embedded backend on the tiny policy: determinism, independence of the batch, exact replay, weights and states."""

import threading

import pytest
import torch
from omni_rollout.backend import RolloutBackend
from omni_rollout.diffusers_backend import DiffusersBackend
from omni_rollout.errors import LifecycleError, RolloutConfigError, SyncError
from sde_samplers import Trajectory, replay
from sde_samplers.logprob import gaussian_log_prob


@pytest.fixture(scope="module")
def backend(tiny):
    return DiffusersBackend.from_pretrained(tiny, max_batch_size=16)


PROMPTS = ["three red circles on a black background", "one blue square on a white background"]


def requests_of(make_request, count=8, **changes):
    return [make_request(i, prompt=PROMPTS[(i // 4) % 2], **changes) for i in range(count)]


def test_it_follows_the_protocol(backend):
    assert isinstance(backend, RolloutBackend)
    assert backend.health().state == "ready"


def test_means_come_when_they_are_asked_for(backend, make_request):
    plain, asked = (backend.generate(requests_of(make_request, return_means=ask))[0] for ask in (False, True))
    assert "means" not in plain.extra_fields
    trace = asked.extra_fields
    again = gaussian_log_prob(trace["next_latents"], trace["means"], trace["std"])
    torch.testing.assert_close(again, asked.log_probs, rtol=0, atol=1e-6)


def test_equal_calls_are_bitwise_equal_and_seeds_matter(backend, make_request):
    first, again = (backend.generate(requests_of(make_request)) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.diffusion_output, b.diffusion_output)
        for name in ("latents", "next_latents", "final_latents", "std", "sigmas", "prompt_embeds"):
            assert torch.equal(a.extra_fields[name], b.extra_fields[name])
        assert torch.equal(a.log_probs, b.log_probs)
    others = backend.generate(requests_of(make_request, seed=8))
    assert all(
        not torch.equal(a.extra_fields["latents"], b.extra_fields["latents"])
        for a, b in zip(first, others, strict=True)
    )
    pictures = {bytes(a.diffusion_output.numpy().tobytes()) for a in first}
    assert len(pictures) == 8  # every sample of a group differs


def test_a_sample_does_not_depend_on_its_batch(backend, make_request):
    requests = requests_of(make_request)
    together = backend.generate(requests)
    alone = [backend.generate([request])[0] for request in reversed(requests)][::-1]
    for a, b in zip(together, alone, strict=True):
        assert a.extra_fields["batch_size"] == 8
        assert b.extra_fields["batch_size"] == 1
        assert (a.extra_fields["final_latents"] - b.extra_fields["final_latents"]).abs().max() <= 1e-4
        assert torch.equal(a.extra_fields["latents"][0], b.extra_fields["latents"][0])  # the noise is exactly the same


def test_windows_and_noise_levels_of_one_call_are_each_right(backend, make_request):
    changes = [{"window": (0, 1)}, {"window": (2, 4)}, {"noise_level": 0.3}, {"kind": "ode", "window": ()}]
    requests = [make_request(i, uid="same", index=0, **change) for i, change in enumerate(changes)]
    mixed = backend.generate(requests)
    for request, output in zip(requests, mixed, strict=True):
        alone = backend.generate([request])[0]
        assert torch.allclose(output.extra_fields["final_latents"], alone.extra_fields["final_latents"], atol=1e-4)
        if request.window:
            assert output.extra_fields["step_index"].tolist() == list(request.window)
            assert torch.allclose(output.extra_fields["std"], alone.extra_fields["std"])
    assert mixed[3].log_probs is None
    assert "latents" not in mixed[3].extra_fields
    assert mixed[0].extra_fields["std"][0] / mixed[2].extra_fields["std"][0] == pytest.approx(0.7 / 0.3)


def test_shapes_and_dtypes_of_one_output(backend, make_request):
    output = backend.generate([make_request()])[0]
    extra = output.extra_fields
    assert (output.diffusion_output.dtype, tuple(output.diffusion_output.shape)) == (torch.uint8, (3, 64, 64))
    assert tuple(extra["latents"].shape) == tuple(extra["next_latents"].shape) == (2, 16, 64)
    assert (tuple(extra["sigmas"].shape), float(extra["sigmas"][-1])) == ((7,), 0.0)
    assert extra["prompt_embeds"].shape[0] == extra["prompt_embeds_mask"].shape[0]
    assert (output.stop_reason, output.num_preempted, extra["policy_version"], extra["seed"]) == ("completed", 0, 0, 7)
    slim = backend.generate([make_request(return_trajectory=False)])[0].extra_fields
    assert "latents" not in slim
    assert "prompt_embeds" not in slim


def test_a_trajectory_replays_to_the_same_log_probs(backend, make_request):
    requests = requests_of(make_request)
    outputs = backend.generate(requests)
    extras = [o.extra_fields for o in outputs]
    stacked = {k: torch.stack([e[k] for e in extras]) for k in ("latents", "next_latents", "step_index", "std")}
    schedule = backend._schedule(requests[0])
    trajectory = Trajectory(
        **stacked, sigmas=extras[0]["sigmas"], log_probs=torch.stack([o.log_probs for o in outputs]),
        final=torch.stack([e["final_latents"] for e in extras]), schedule_hash=extras[0]["schedule_hash"],
        kind="flow_sde", noise_level=0.7, log_prob_form="density",
    )  # fmt: skip
    cond = backend.encoder.encode([r.prompt for r in requests], 512)

    def velocity(x, sigma):
        return backend.spec.velocity(backend.transformer, x, sigma, cond, height=64, width=64)

    with torch.no_grad():
        steps = list(replay(velocity, trajectory, schedule))
    replayed = torch.stack([step.log_prob for step in steps], 1)
    assert torch.equal(replayed, trajectory.log_probs)  # the same function on the same batch: not one bit apart


def test_ode_pictures_equal_the_stock_pipeline(backend, tiny, make_request):
    from diffusers import QwenImagePipeline
    from sde_samplers import initial_noise, sample_generator

    pipe = QwenImagePipeline.from_pretrained(tiny, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    noise = initial_noise([sample_generator(7, "u0", 0)], (16, 64))
    for cfg in (1.0, 3.0):
        options = {"true_cfg_scale": cfg, "negative_prompt": " " if cfg > 1 else None}
        ours = backend.generate([make_request(kind="ode", window=(), **options)])[0]
        kwargs = {
            "prompt": PROMPTS[0],
            "height": 64,
            "width": 64,
            "num_inference_steps": 6,
            "latents": noise,
            **options,
        }
        latents = pipe(**kwargs, output_type="latent").images[0]
        picture = torch.from_numpy(pipe(**kwargs, output_type="np").images[0]).permute(2, 0, 1)
        assert (ours.extra_fields["final_latents"] - latents).abs().max() <= 1e-5
        assert (ours.diffusion_output - (picture * 255).round()).abs().max() <= 1


def test_an_edit_starts_from_the_given_picture(backend, make_request):
    first = backend.generate([make_request()])[0].extra_fields["final_latents"]
    edit = make_request(
        1, prompt=PROMPTS[1], init_latents=first, start_step=4, window=(4,), uid="edit", index=0, noise_level=0.5
    )
    output = backend.generate([edit])[0]
    late = backend.generate([edit.replace(start_step=5, window=(5,), kind="flow_cps")])[0]
    far = (output.extra_fields["final_latents"] - first).abs().mean()
    near = (late.extra_fields["final_latents"] - first).abs().mean()
    assert near < far  # less noise, less change
    assert output.extra_fields["step_index"].tolist() == [4]
    assert output.extra_fields["sigmas"].shape == (7,)
    with pytest.raises(RolloutConfigError, match="init_latents"):
        backend.generate([make_request(init_latents=torch.zeros(3), start_step=2, window=(2,))])


def test_full_weights_by_name_with_checksum(tiny, make_request):
    backend = DiffusersBackend.from_pretrained(tiny)
    before = backend.generate([make_request()])[0]
    original = {name: value.clone() for name, value in backend.transformer.state_dict().items()}
    receipt = backend.update_weights(((n, v * 1.01) for n, v in original.items()), version=3)
    assert (receipt.version, receipt.tensors_sent, receipt.tensors_bound) == (3, len(original), len(original))
    after = backend.generate([make_request()])[0]
    assert after.extra_fields["policy_version"] == 3
    assert (after.extra_fields["final_latents"] - before.extra_fields["final_latents"]).abs().max() > 1e-3
    back = backend.update_weights(original.items(), version=4)
    assert back.checksum != receipt.checksum
    assert torch.equal(backend.generate([make_request()])[0].diffusion_output, before.diffusion_output)
    with pytest.raises(SyncError, match=r"'transformer\.nothing' has no parameter"):
        backend.update_weights([("transformer.nothing", torch.zeros(1))], version=5)
    with pytest.raises(LifecycleError, match="no weights were synced"):
        backend.generate([make_request()])  # until a full sync succeeds


def test_lora_is_bound_with_a_receipt_and_changes_the_latents(tiny, make_request):
    from lora_sync import LoRAPayload, verify

    backend = DiffusersBackend.from_pretrained(tiny)
    base = backend.generate([make_request()])[0].extra_fields["final_latents"]
    modules = [f"transformer_blocks.{i}.attn.{name}" for i in range(4) for name in ("to_q", "to_out.0", "add_q_proj")]
    g = torch.Generator().manual_seed(0)

    def payload(version, scale):
        tensors = {}
        for module in modules:
            tensors[f"{module}.lora_A.weight"] = torch.randn(4, 128, generator=g) * 0.2
            tensors[f"{module}.lora_B.weight"] = torch.randn(128, 4, generator=g) * scale
        return LoRAPayload.build(tensors, alphas=8.0, version=version)

    first, second = payload(1, 0.2), payload(2, 0.2)
    verify(first, backend.update_lora(first))
    one = backend.generate([make_request()])[0]
    assert one.extra_fields["policy_version"] == 1
    assert (one.extra_fields["final_latents"] - base).abs().max() > 1e-3
    verify(second, backend.update_lora(second), previous_version=1)
    two = backend.generate([make_request()])[0].extra_fields["final_latents"]
    assert (two - one.extra_fields["final_latents"]).abs().max() > 1e-3
    original = {
        n.replace(".base_layer", ""): v for n, v in backend.transformer.state_dict().items() if "lora_" not in n
    }
    receipt = backend.update_weights(original.items(), version=3)  # LoRA layers exist by now: nothing is skipped
    assert receipt.tensors_bound == len(original)

    shared = DiffusersBackend(
        backend.spec, backend.transformer, backend.encoder, backend.vae, backend.scheduler, shares_weights=True
    )
    verify(second, shared.update_lora(second))
    with pytest.raises(SyncError, match="does not hold what was sent"):
        shared.update_lora(payload(9, 0.1))
    assert shared.policy_version == 2


def test_states_and_abort(tiny, make_request):
    backend = DiffusersBackend.from_pretrained(tiny, max_batch_size=4)
    backend.sleep()
    with pytest.raises(LifecycleError, match="asleep"):
        backend.generate([make_request()])
    with pytest.raises(LifecycleError, match="asleep"):
        backend.update_weights([], version=1)
    backend.wake_up()
    before = backend.generate([make_request()])[0]
    backend.pause()
    with pytest.raises(LifecycleError, match="paused"):
        backend.generate([make_request()])
    backend.resume()
    assert torch.equal(backend.generate([make_request()])[0].diffusion_output, before.diffusion_output)

    results = []
    requests = requests_of(make_request, 16)
    thread = threading.Thread(target=lambda: results.extend(backend.generate(requests)))
    thread.start()
    while backend.health().in_flight == 0 or not backend._running:
        pass
    backend.abort([r.request_id for r in requests[8:]])
    thread.join()
    assert [o.stop_reason for o in results] == ["completed"] * 8 + ["aborted"] * 8
    assert backend.abort() == 0
    assert backend.health().in_flight == 0


def test_a_training_module_is_left_as_it_was(backend, make_request):
    backend.transformer.train()
    try:
        with pytest.raises(RolloutConfigError, match="adapter='old'"):
            backend.generate([make_request(adapter="old")])
        backend.generate([make_request()])
        assert backend.transformer.training
    finally:
        backend.transformer.eval()
