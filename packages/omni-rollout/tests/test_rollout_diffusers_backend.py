"""The embedded backend on the tiny policy: determinism, independence of the batch, exact replay, weights and states."""

import threading
import time

import pytest
import torch
from lora_sync import content_sum, use_adapter
from omni_rollout.backend import RolloutBackend
from omni_rollout.diffusers_backend import DiffusersBackend
from omni_rollout.errors import AbortedError, LifecycleError, RolloutConfigError, SyncError
from omni_rollout.samples import parted, pictures_of
from sde_samplers import Trajectory, replay
from sde_samplers.logprob import gaussian_log_prob

PROMPTS = ["three red circles on a black background", "one blue square on a white background"]


def requests_of(make_request, count=8, **changes):
    return [make_request(i, prompt=PROMPTS[(i // 4) % 2], **changes) for i in range(count)]


def test_it_follows_the_protocol(backend):
    assert isinstance(backend, RolloutBackend)
    assert backend.health().state == "ready"


def test_means_come_when_they_are_asked_for(backend, make_request):
    plain, asked = (backend.generate(requests_of(make_request, return_means=ask)) for ask in (False, True))
    assert "means" not in plain.keys()
    trace = asked[0]
    again = gaussian_log_prob(trace["next_latents"], trace["means"], trace["std"])
    torch.testing.assert_close(again, trace["rollout_log_probs"], rtol=0, atol=1e-6)


def test_without_pixels_nothing_is_decoded(backend, make_request, monkeypatch):
    whole = backend.generate(requests_of(make_request))
    monkeypatch.setattr(backend.spec, "decode", None)  # so that a call of it fails
    asked = requests_of(make_request, shown=("latents",))
    latents = backend.generate(asked)
    assert set(whole.keys()) - set(latents.keys()) == {"responses"}
    assert torch.equal(whole["final_latents"], latents["final_latents"])
    shown = parted(asked, latents)[1]
    assert list(shown) == ["latents"]
    assert torch.equal(torch.from_numpy(shown["latents"]), whole["final_latents"])
    assert (pictures_of(latents)[3] == shown["latents"][3]).all()


def test_equal_calls_are_bitwise_equal_and_seeds_matter(backend, make_request):
    first, again = (backend.generate(requests_of(make_request)) for _ in range(2))
    assert set(first.keys()) == set(again.keys())
    assert all(torch.equal(first[key], again[key]) for key in first.keys())
    others = backend.generate(requests_of(make_request, seed=8))
    assert all(not torch.equal(a, b) for a, b in zip(first["latents"], others["latents"], strict=True))
    pictures = {picture.numpy().tobytes() for picture in first["responses"]}
    assert len(pictures) == 8  # every sample of a group differs


def test_a_sample_does_not_depend_on_its_batch(backend, make_request):
    requests = requests_of(make_request)
    together = backend.generate(requests)
    alone = [backend.generate([request]) for request in reversed(requests)][::-1]
    assert together["batch_rows"].tolist() == [8] * 8
    for i, one in enumerate(alone):
        assert one["batch_rows"].tolist() == [1]
        assert (together["final_latents"][i] - one["final_latents"][0]).abs().max() <= 1e-4
        assert torch.equal(together["latents"][i, 0], one["latents"][0, 0])  # the noise is exactly the same


def test_windows_and_noise_levels_of_one_call_are_each_right(backend, make_request):
    changes = [{"window": (0, 1)}, {"window": (2, 4)}, {"noise_level": 0.3}]
    requests = [make_request(i, uid="same", index=0, **change) for i, change in enumerate(changes)]
    mixed = backend.generate(requests)
    for i, request in enumerate(requests):
        alone = backend.generate([request])
        assert torch.allclose(mixed["final_latents"][i], alone["final_latents"][0], atol=1e-4)
        assert mixed["step_index"][i].tolist() == list(request.settings.window)
        assert torch.allclose(mixed["std"][i], alone["std"][0])
    assert mixed["std"][0, 0] / mixed["std"][2, 0] == pytest.approx(0.7 / 0.3)
    with pytest.raises(RolloutConfigError, match="do not hold the same keys"):
        backend.generate([requests[0], make_request(9, kind="ode", window=())])


def test_shapes_and_dtypes_of_one_call(backend, make_request):
    samples = backend.generate([make_request()])
    assert (samples["responses"].dtype, tuple(samples["responses"].shape)) == (torch.uint8, (1, 3, 64, 64))
    assert tuple(samples["latents"].shape) == tuple(samples["next_latents"].shape) == (1, 2, 16, 64)
    assert (tuple(samples["sigmas"].shape), float(samples["sigmas"][0, -1])) == ((1, 7), 0.0)
    assert samples["prompt_embeds"].shape[:2] == samples["prompt_embeds_mask"].shape
    assert (samples["policy_version"].tolist(), samples["forwards"].tolist()) == ([backend.policy_version], [6.0])
    slim = backend.generate([make_request(return_trajectory=False)])
    assert not {"latents", "prompt_embeds"} & set(slim.keys())


def test_a_trajectory_replays_to_the_same_log_probs(backend, make_request):
    requests = requests_of(make_request)
    samples = backend.generate(requests)
    schedule = backend._schedule(requests[0].settings)
    assert torch.equal(schedule.sigmas, samples["sigmas"][0])
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
        assert (ours["final_latents"] - latents).abs().max() <= 1e-5
        assert (ours["responses"] - (picture * 255).round()).abs().max() <= 1


def test_an_edit_starts_from_the_given_picture(backend, make_request):
    first = backend.generate([make_request()])["final_latents"][0]
    edit = make_request(
        1, prompt=PROMPTS[1], init_latents=first, start_step=4, window=(4,), uid="edit", index=0, noise_level=0.5
    )
    output = backend.generate([edit])[0]
    late = backend.generate([edit.replace(settings=edit.settings.replace(start_step=5, window=(5,), kind="flow_cps"))])[
        0
    ]
    far = (output["final_latents"] - first).abs().mean()
    near = (late["final_latents"] - first).abs().mean()
    assert near < far  # less noise, less change
    assert output["step_index"].tolist() == [4]
    assert output["sigmas"].shape == (7,)
    with pytest.raises(RolloutConfigError, match="init_latents"):
        backend.generate([make_request(init_latents=torch.zeros(3), start_step=2, window=(2,))])


def test_full_weights_by_name_with_checksum(tiny, make_request):
    backend = DiffusersBackend.from_pretrained(tiny)
    before = backend.generate([make_request()])[0]
    original = {name: value.clone() for name, value in backend.transformer.state_dict().items()}
    receipt = backend.update_weights(((n, v * 1.01) for n, v in original.items()), version=3)
    assert (receipt.version, receipt.tensors_bound) == (3, len(original))
    after = backend.generate([make_request()])[0]
    assert after["policy_version"] == 3
    assert (after["final_latents"] - before["final_latents"]).abs().max() > 1e-3
    back = backend.update_weights(original.items(), version=4)
    assert back.checksum == content_sum(original.values()) != receipt.checksum
    assert torch.equal(backend.generate([make_request()])["responses"][0], before["responses"])
    with pytest.raises(SyncError, match=r"'transformer\.nothing' has no parameter"):
        backend.update_weights([("transformer.nothing", torch.zeros(1))], version=5)
    with pytest.raises(LifecycleError, match="no weights were synced"):
        backend.generate([make_request()])  # until a full sync succeeds


def test_lora_is_bound_with_a_receipt_and_changes_the_latents(tiny, make_request):
    from lora_sync import LoRAPayload, verify

    backend = DiffusersBackend.from_pretrained(tiny)
    base = backend.generate([make_request()])["final_latents"][0]
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
    assert one["policy_version"] == 1
    assert (one["final_latents"] - base).abs().max() > 1e-3
    verify(second, backend.update_lora(second), previous_version=1)
    two = backend.generate([make_request()])["final_latents"][0]
    assert (two - one["final_latents"]).abs().max() > 1e-3
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


def test_a_shared_module_samples_with_its_adapter_folded_in(tiny, make_request):
    from lora_sync import base_weights
    from lora_sync.checksum import module_sum
    from peft import LoraConfig

    own = DiffusersBackend.from_pretrained(tiny)
    module = own.transformer
    module.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_out.0"], init_lora_weights=False))
    shared = DiffusersBackend(
        own.spec,
        module,
        own.encoder,
        own.vae,
        own.scheduler,
        adapter_ctx=lambda name: use_adapter(module, name),
    )
    apart = shared.generate([make_request()])["final_latents"]
    base = shared.generate([make_request(adapter="reference")])["final_latents"]
    before = module_sum(module)

    merged = {name: value.clone() for name, value in base_weights(module, "default")}
    receipt = shared.hold_weights(merged.items(), 1, fold=True)
    assert (receipt.version, receipt.tensors_bound) == (1, len(merged))
    assert receipt.checksum == content_sum(merged.values()) != before
    drawn = shared.generate([make_request()])["final_latents"]
    assert 0 < (drawn - apart).abs().max() <= 1e-4 < 1e-2 < (drawn - base).abs().max()
    assert module_sum(module) == before  # the trainer's own weights are back
    assert torch.equal(shared.generate([make_request(adapter="reference")])["final_latents"], base)
    with pytest.raises(SyncError, match="does not hold what was sent"):
        shared.hold_weights(((n, v + 1) for n, v in merged.items()), 2)  # not folded: the module's own are others


def test_states_and_abort(tiny, make_request):
    backend = DiffusersBackend.from_pretrained(tiny, max_batch_size=4)
    backend.sleep()
    with pytest.raises(LifecycleError, match="asleep"):
        backend.generate([make_request()])
    with pytest.raises(LifecycleError, match="asleep"):
        backend.update_weights(backend.transformer.named_parameters(), version=1)
    backend.wake_up()
    before = backend.generate([make_request()])[0]
    assert torch.equal(backend.generate([make_request()])["responses"][0], before["responses"])

    errors = []

    def run():
        try:
            backend.generate(requests_of(make_request, 16, num_inference_steps=10))
        except AbortedError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    while not backend._running:
        time.sleep(0.001)
    assert backend.abort(["r15", "nobody"]) == 1
    thread.join()
    assert errors == ["1 of 4 samples of a batch were cancelled."]
    backend.generate([make_request(15)])  # the name is free again
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


def test_a_replica_takes_a_spec_of_ones_own(tiny, tmp_path, monkeypatch, make_request):
    from omni_rollout.hosted import HostedDiffusersBackend

    (tmp_path / "spec_of_a_test.py").write_text(
        "from model_specs import QwenImageSpec\n"
        "class Halved(QwenImageSpec):\n"
        "    def predict(self, *args):\n"
        "        return 0.5 * super().predict(*args)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = HostedDiffusersBackend(tiny, architecture="spec_of_a_test:Halved")
    stock = HostedDiffusersBackend(tiny)
    drawn = [backend.generate([make_request()])["final_latents"] for backend in (mine, stock)]
    assert type(mine.spec).__name__ == "Halved"
    assert (drawn[0] - drawn[1]).abs().max() > 0.1
    with pytest.raises(RolloutConfigError, match="cannot be imported"):
        HostedDiffusersBackend(tiny, architecture="spec_of_a_test:Lost")
