"""Solvers, shared noise, thinned tails and counted forwards: in the embedded backend, and in the engine's batch without it."""

import pytest
import torch
from lora_sync import LoRAPayload, verify
from omni_rollout.diffusers_backend import DiffusersBackend
from omni_rollout.errors import RolloutConfigError
from omni_rollout.types import GenerationRequest
from omni_rollout.vllm_omni.rollout_batch import RolloutBatch
from sde_samplers import SOLVERS, SamplerSettings, flow_match, initial_noise, rollout, sample_generator, thin_tail

SHAPE = (4, 6)


def velocity(x, sigma):
    return torch.sin(2 * x) + sigma.view(-1, 1, 1)


def row_of(number, **changes):
    settings = {
        "height": 8,
        "width": 8,
        "num_inference_steps": 8,
        "kind": "flow_sde",
        "noise_level": 0.7,
        "window": (1, 2),
    }
    return GenerationRequest(
        f"r{number}", f"u{number // 3}", number % 3, "", seed=3, settings=SamplerSettings(**{**settings, **changes})
    )


def run(rows, steps=8):
    """A batch through the steps that an engine would ask for."""
    table = flow_match(steps, 3.0).sigmas
    batch = RolloutBatch(rows)
    batch.start(torch.empty(len(rows), *SHAPE))
    batch.begin(table[batch.thinned(table)])
    while batch.step < len(batch.sigmas) - 1:
        batch.advance(velocity(batch.x, torch.full((len(rows),), batch.sigma())))
    return [batch.result(i, 0) for i in range(len(rows))]


def expected(request, steps=8):
    """The same sample by sde_samplers alone."""
    row = request.settings
    own = sample_generator(request.seed, request.uid, request.index)
    start = initial_noise([own], SHAPE)
    if row.shared_noise:
        start = initial_noise([sample_generator(request.seed, request.uid, 0)], SHAPE)
    schedule = flow_match(steps, 3.0)
    if row.tail_ratio < 1:
        schedule = thin_tail(schedule, row.window_end, row.tail_ratio)
    return rollout(
        velocity, start, schedule, kind=row.kind, noise_level=row.noise_level, window=row.window, generators=[own],
        solver=row.solver, solver_steps="post" if row.tail_ratio < 1 else "all",
    )  # fmt: skip


def assert_equal(found, trajectory):
    assert torch.allclose(found["final_latents"], trajectory.final[0], atol=2e-6)
    assert torch.equal(found["sigmas"], trajectory.sigmas)
    if trajectory.latents.shape[1]:
        assert torch.allclose(found["latents"], trajectory.latents[0], atol=2e-6)
        assert torch.allclose(found["rollout_log_probs"], trajectory.log_probs[0], atol=2e-6)


def test_rows_with_different_solvers_share_a_batch_and_are_each_right():
    rows = [
        row_of(0), row_of(1, solver="dpm2"), row_of(2, solver="dpm3", window=(2, 5)),
        row_of(3, kind="ode", window=(), solver="dpm2"), row_of(4, kind="ode", window=(), solver="dpm1"),
        row_of(5, kind="flow_cps", noise_level=0.4, solver="dpm3", shared_noise=True), row_of(6, kind="ode", window=()),
    ]  # fmt: skip
    for row, found in zip(rows, run(rows), strict=True):
        assert_equal(found, expected(row))
    assert set(SOLVERS) == {"euler", "dpm1", "dpm2", "dpm3"}


def test_flash_steps_over_the_thinned_table():
    rows = [row_of(i, solver=solver, tail_ratio=0.5) for i, solver in enumerate(("dpm2", "euler", "dpm3"))]
    for row, found in zip(rows, run(rows), strict=True):
        assert len(found["sigmas"]) - 1 == 5  # three to the window's end, int(6 · 0.5) = 3 points behind it
        assert_equal(found, expected(row))
    with pytest.raises(RolloutConfigError, match="several sigma tables"):
        run([row_of(0), row_of(1, tail_ratio=0.5)])


def test_a_group_shares_its_start_but_not_its_step_noise():
    own, shared = run([row_of(i) for i in range(4)]), run([row_of(i, shared_noise=True) for i in range(4)])
    for i, (a, b) in enumerate(zip(own, shared, strict=True)):
        assert torch.equal(a["final_latents"], b["final_latents"]) == (
            i in (0, 3)
        )  # sample 0 of each group is as it was
    starts = [RolloutBatch([row_of(i, shared_noise=True)]).start(torch.empty(1, *SHAPE)) for i in range(4)]
    assert torch.equal(starts[0], starts[1])
    assert torch.equal(starts[0], starts[2])
    assert not torch.equal(starts[0], starts[3])
    # what the step added: next - mean, where the mean follows from the shared state alone
    noises = [out["next_latents"][0] - out["latents"][0] for out in shared[:2]]
    assert not torch.allclose(noises[0], noises[1], atol=0.1)


def test_the_embedded_backend_uses_all_of_it(backend, make_request):
    def draw(**changes):
        return backend.generate([make_request(i, **changes) for i in range(4)])

    nft, plain = draw(kind="ode", window=(), solver="dpm2")[0], draw(kind="ode", window=())[0]
    cond = backend.encoder.encode([make_request().prompt], 512)
    start = initial_noise([sample_generator(7, "u0", 0)], (16, 64))
    alone = rollout(
        lambda x, sigma: backend.spec.velocity(backend.transformer, x, sigma, cond, make_request().settings),
        start, backend._schedule(make_request().settings), kind="ode", solver="dpm2",
    )  # fmt: skip
    assert torch.allclose(nft["final_latents"], alone.final[0], atol=1e-4)
    assert (nft["final_latents"] - plain["final_latents"]).abs().max() > 0.1
    same = draw(kind="ode", window=(), shared_noise=True)
    # One start and no other noise: one picture, up to what a row's place in its batch may do to a sum.
    assert all((a["final_latents"] - same[0]["final_latents"]).abs().max() <= 1e-4 for a in same)
    assert all((a["responses"].int() - same[0]["responses"].int()).abs().max() <= 1 for a in same)
    assert len({o["responses"].numpy().tobytes() for o in draw(shared_noise=True)}) == 4
    flash = draw(window=(0, 1), num_inference_steps=12, tail_ratio=0.4, solver="dpm2")[0]
    assert (len(flash["sigmas"]) - 1, flash["forwards"]) == (5, 5.0)
    assert torch.equal(flash["latents"], draw(window=(0, 1), num_inference_steps=12)[0]["latents"])


@pytest.mark.parametrize(("changes", "forwards"), [({}, 6.0), ({"true_cfg_scale": 3.0, "negative_prompt": " "}, 12.0)])
def test_forwards_are_counted(backend, make_request, changes, forwards):
    samples = backend.generate([make_request(i, **changes) for i in range(3)])
    assert samples["forwards"].tolist() == [forwards] * 3
    assert not backend.transformer._forward_pre_hooks  # a trainer that shares the module is not counted


def test_two_adapters_of_one_version(tiny, make_request):
    backend = DiffusersBackend.from_pretrained(tiny)
    base = backend.generate([make_request()])["final_latents"][0]
    generator = torch.Generator().manual_seed(0)

    def payload():
        tensors = {}
        for part, shape in (("A", (4, 128)), ("B", (128, 4))):
            for module in ("transformer_blocks.0.attn.to_q", "transformer_blocks.2.attn.to_k"):
                tensors[f"{module}.lora_{part}.weight"] = torch.randn(shape, generator=generator)
        return LoRAPayload.build(tensors, alphas=8.0, version=5)

    for adapter in ("default", "old"):
        sent = payload()
        verify(sent, backend.update_lora(sent, adapter))
    outputs = [backend.generate([make_request(adapter=name)])[0] for name in ("default", "old", "reference")]
    assert [int(o["policy_version"]) for o in outputs] == [5, 5, 5]
    finals = [o["final_latents"] for o in outputs]
    assert torch.equal(finals[2], base)
    assert min((a - b).abs().max() for a, b in ((finals[0], base), (finals[1], base), (finals[0], finals[1]))) > 1e-3
