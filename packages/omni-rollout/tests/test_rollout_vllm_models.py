"""Every architecture in a real engine against the embedded backend: windows, guidance, solvers, LoRA and full weights.

Wan with plain flow matching and Wan 5B run nightly: their pipeline is that of `wan_unipc`, whose folder has more that may differ.
"""

import platform
import sys

import pytest
import torch
from lora_sync import LoRAPayload, content_sum, verify
from omni_rollout.diffusers_backend import DiffusersBackend
from omni_rollout.types import GenerationRequest
from sde_samplers import SamplerSettings

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="vLLM-Omni has wheels for Linux x86-64 only"
)

PROMPTS = [
    "three red circles on a black background",
    "one blue square on a white background",
    # Past 32 tokens, up to which Z-Image pads the others.
    "three red circles, two blue squares, one green triangle and one yellow star, all on a large white background",
]
#: Other architectures, as small random pipelines; the last one is scheduled step by step.
MODELS = {
    "sd3": {},
    "z_image": {},
    "flux": {"guidance_scale": 3.5},
    "wan": {"num_frames": 5},
    "wan_5b": {"num_frames": 5},
    "wan_unipc": {"num_frames": 5},  # the scheduler that Wan2.2 is published with, which rounds timesteps
}
STEPWISE = "qwen_image"
NIGHTLY = ("wan", "wan_5b")
each_model = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] if n in NIGHTLY else []) for n in [*MODELS, STEPWISE]]
)


@pytest.fixture(scope="module")
def stops(tmp_path_factory, request):
    """What each model of the tests that run is asked for, and the embedded backend that says what is right."""
    from model_specs import tiny as tiny_models

    stops, backends = {}, {}
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    for name in dict.fromkeys(item.callspec.params["name"] for item in here):
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
        settings = SamplerSettings(
            64, 64, num_inference_steps=4, max_sequence_length=48, kind="flow_sde", noise_level=0.7, true_cfg_scale=3.0,
            **MODELS.get(name, {}),
        )  # fmt: skip

        def asked(i, of=settings, name=name, **changes):
            return GenerationRequest(
                f"{name}{i}", f"u{i}", i, PROMPTS[i], 7, of.replace(**changes), negative_prompt="blurry"
            )

        calls = [
            [asked(i, window=((0, 1), (1, 2), (0, 3))[i]) for i in range(3)],
            # DiffusionNFT's setting, and a Flash tail, whose shorter table cannot share a batch with the others.
            [asked(0, kind="ode", window=(), solver="dpm2")],
            [asked(1, window=(0,), solver="dpm2", tail_ratio=0.5)],
        ]
        stops[name] = {
            "path": path,
            "calls": calls,
            "payload": LoRAPayload.build(tensors, alphas=4.0, version=1),
            "weights": [(n, p.detach() * 1.01) for n, p in backend.transformer.named_parameters()],
            "stepwise": name == STEPWISE,
        }
        backends[name] = backend
    return stops, backends


@pytest.fixture(scope="module")
def tour(fleet, server, runner, stops):
    """What the engines answered, all in one process."""
    return runner.run(fleet.router.replicas[0].backend.call(server.tour, stops[0]))


@each_model
def test_other_models_equal_the_embedded_backend(tour, stops, name, difference):
    """Guidance, prompts of different lengths, windows of each row, every LoRA target, and full weights after LoRA layers."""
    found, stop, backend = tour[name], stops[0][name], stops[1][name]
    keys = ("prompt_embeds", "negative_prompt_embeds")
    for call, ours in zip(stop["calls"], found["base"], strict=True):
        theirs = backend.generate(call)
        assert max(difference(a, b) for a, b in zip(ours, theirs, strict=True)) <= 5e-5
        assert max(difference(a, b, keys) for a, b in zip(ours, theirs, strict=True)) <= 1e-4
        if call[0].settings.window:
            assert (ours["rollout_log_probs"] - theirs["rollout_log_probs"]).abs().max() <= 1e-5
        assert ours["forwards"].tolist() == theirs["forwards"].tolist() == [2 * ours["sigmas"].shape[1] - 2] * len(call)
        assert (ours["responses"].int() - theirs["responses"].int()).abs().max() <= 1
    verify(stop["payload"], found["lora"])
    backend.update_lora(stop["payload"])
    for call, ours, base in zip(stop["calls"], found["adapted"], found["base"], strict=True):
        theirs = backend.generate(call)
        assert max(difference(a, b) for a, b in zip(ours, theirs, strict=True)) <= 1e-4
        assert min(difference(a, b, ("final_latents",)) for a, b in zip(ours, base, strict=True)) > 1e-2
    assert found["weights"].tensors_bound == len(stop["weights"])
    assert found["weights"].checksum == content_sum(value for _, value in stop["weights"])


@each_model
def test_an_engine_samples_with_a_trainers_own_weights(tour, stops, name, difference):
    """One copy of them: what another module holds, fused as the engine has it; a change there is one here."""
    found, stop = tour[name], stops[0][name]
    shared, whole = found["shares"]
    assert whole >= sum(value.nbytes for _, value in stop["weights"]) >= shared
    assert shared >= 0.99 * whole  # Wan's engine lays a table of its own out otherwise
    for promise, receipt in found["receipts"]:
        verify(promise, receipt)
    for drawn in (found["lent"], found["bound"]):
        assert all(difference(a, b) <= 1e-5 for a, b in zip(found["own"], drawn, strict=True))
    assert all(difference(a, b, ("latents",)) > 1e-4 for a, b in zip(found["own"], found["changed"], strict=True))
    assert "the trainer's own" in found["refused"]


def test_nothing_is_compiled_on_a_cpu(tour, fleet, server, runner):
    """By `torch.compile`, whose cache does not know for which vector width it was filled."""
    assert runner.run(fleet.router.replicas[0].backend.call(server.compiled)) == 0
