"""The forward-process engine: draws, the three losses against their definitions, states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusion_losses import DiffusionLossConfig, nft_terms, optimality_probability
from fsdp_diffusers_engine import DiffusionLoss, EngineError, ForwardProcessConfig, gather_outputs
from model_specs import PromptEmbeds

OLD = {"policy_state_adapters": ["default", "old"]}


def seeded(data: Any, seed: int = 3) -> Any:
    data.set_non_tensor("noise_seed", seed)
    return data


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in engine.trainable.items() if p.grad is not None}


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    scale = max(float(v.abs().max()) for v in b.values())
    return max(float((a[k] - b[k]).abs().max()) for k in b) / scale


def velocities(engine: Any, data: Any, noise: torch.Tensor, sigma: torch.Tensor, state: str | None) -> torch.Tensor:
    cond = PromptEmbeds(data["prompt_embeds"], data["prompt_embeds_mask"])
    out = []
    for w in range(sigma.shape[1]):
        t = sigma[:, w].view(-1, 1, 1)
        x = (1 - t) * data["final_latents"] + t * noise[:, w]
        call = lambda x=x, w=w: engine.spec.velocity(engine.module, x, sigma[:, w], cond, data["settings"])  # noqa: E731
        if state is None:
            out.append(call())
        else:
            with torch.no_grad(), engine.use_adapter(state):
                out.append(call())
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("mode", ["diffusion_nft", "dpo", "awm"])
def test_gradient_follows_from_the_definition(make_engine: Any, make_batch: Any, stir: Any, mode: str) -> None:
    forward = ForwardProcessConfig(levels="logit_normal", num_levels=2)
    engine, data = make_engine("forward_process", model=OLD, forward=forward), seeded(make_batch(count=4))
    stir(engine, 1)
    engine.copy_adapter("default", "old")
    stir(engine, 2)
    config = DiffusionLossConfig(
        loss_mode=mode, ref_kl_coef=0.0 if mode == "dpo" else 0.2, dpo_beta=5.0, clip_ratio=1.0
    )
    rows = engine.forward_backward(data, DiffusionLoss(config))
    assert len(rows) == 4  # two micro-batches of two rows, two levels
    found = gradients(engine)

    engine.optimizer_zero_grad()
    noise, sigma = engine.objective.draw(3, data["final_latents"], None, mode == "dpo")
    target = noise - data["final_latents"][:, None]
    ours, old, base = (velocities(engine, data, noise, sigma, state) for state in (None, "old", "reference"))
    error = lambda v: (v - target).square().mean((2, 3))  # noqa: E731
    kl = (ours - base).square().mean((2, 3))
    if mode == "dpo":
        assert torch.equal(noise[0], noise[1])
        assert torch.equal(sigma[2], sigma[3])
        gain = error(ours) - error(base)
        loss = -torch.nn.functional.logsigmoid(-0.5 * 5.0 * (gain[0::2] - gain[1::2])).mean()
    elif mode == "awm":
        ratio = torch.exp(error(old) - error(ours))
        loss = (-data["advantages"][:, None] * ratio + 0.2 * kl).mean()
        assert float((ratio - 1).detach().abs().max()) < 1.0
    else:
        t = sigma[..., None, None]
        x0 = data["final_latents"][:, None]
        chance = optimality_probability(data["advantages"])[:, None].expand(4, 2)
        terms = nft_terms(ours, old, x0.expand_as(ours), (1 - t) * x0 + t * noise, sigma, chance, beta=0.5)
        loss = (5.0 * terms.mixed + 0.2 * kl).mean()
    loss.backward()
    assert difference(found, gradients(engine)) <= 2e-5


def test_draws_belong_to_rows_and_change_with_the_seed(make_engine: Any, make_batch: Any) -> None:
    engine, data = make_engine("forward_process"), make_batch(count=6)
    x0, table = data["final_latents"], data["sigmas"]
    noise, sigma = engine.objective.draw(1, x0, table, False)
    assert noise.shape == (6, 2, 4, 64)  # three levels of the schedule, 0.99 of them
    assert set(sigma.flatten().tolist()) <= set(torch.tensor([1.0, 0.8, 0.5]).tolist())
    assert all(len(set(row.tolist())) == 2 for row in sigma)
    assert len({tuple(row.tolist()) for row in sigma}) > 1
    assert torch.equal(engine.objective.draw(1, x0[:3], table, False)[0], noise[:3])
    assert not torch.equal(engine.objective.draw(2, x0, table, False)[0], noise)
    engine.objective.config = ForwardProcessConfig(levels="uniform", num_levels=200, shift=3.0)
    drawn = engine.objective.draw(1, x0, None, False)[1].flatten()
    assert drawn.min() >= 1e-3
    assert drawn.max() <= 1.0
    assert drawn.median() == pytest.approx(0.75, abs=0.06)  # 3/2 over 2: the shifted median


def test_stratified_levels_are_one_of_each_part_of_the_noisier_end(make_engine: Any) -> None:
    engine, x0, table = make_engine("forward_process"), torch.zeros(200, 1), torch.linspace(1.0, 0.0, 11)
    engine.objective.config = ForwardProcessConfig(num_levels=4, schedule_fraction=0.7, schedule_choice="stratified")
    places = ((1 - engine.objective.draw(1, x0, table, False)[1]) * 10).round().long()
    # Flow-Factory's FLUX setting: 4 of the first 7 levels of 10, whose parts are 0, 1-2, 3-4, 5-6
    assert [sorted(set(column.tolist())) for column in places.unbind(1)] == [[0], [1, 2], [3, 4], [5, 6]]
    assert all(0.3 < (column == column.min()).float().mean() < 0.7 for column in places[:, 1:].unbind(1))
    engine.objective.config = ForwardProcessConfig(schedule_fraction=0.5, schedule_choice="stratified")
    assert engine.objective.draw(1, x0, table, False)[1].shape == (200, 5)


def test_micro_batches_change_nothing_and_the_old_policy_may_be_the_present(
    make_engine: Any, make_batch: Any, stir: Any
) -> None:
    engine, data = make_engine("forward_process"), seeded(make_batch(count=4))
    stir(engine)
    loss = DiffusionLoss(DiffusionLossConfig(loss_mode="diffusion_nft"))
    calls: list[int] = []
    engine.module.register_forward_pre_hook(lambda *_: calls.append(1))
    engine.forward_backward(data, loss)
    assert len(calls) == 2 * 2  # no forward but the policy's own
    reference = gradients(engine)
    engine.optimizer_zero_grad()
    data.set_non_tensor("micro_batch_size", 3)
    engine.forward_backward(data, loss)
    assert difference(gradients(engine), reference) <= 1e-5


def test_scores_and_trajectory_losses(make_engine: Any, make_batch: Any) -> None:
    engine, data = make_engine("forward_process"), seeded(make_batch(count=3))
    with engine.eval_mode():
        scores = gather_outputs(engine.forward_backward_batch(data, None, forward_only=True))
    assert scores["error"].shape == scores["sigma"].shape == (3, 2)
    joint = DiffusionLossConfig(loss_mode="awm", awm_ratio="trajectory", clip_ratio=1.0)
    assert len(engine.forward_backward(data, DiffusionLoss(joint))) == 2
    assert engine.optimizer_step() > 0


def test_bad_batches_say_what_to_change(make_engine: Any, make_batch: Any) -> None:
    engine = make_engine("forward_process")
    nft, dpo = DiffusionLoss("diffusion_nft"), DiffusionLoss("dpo")
    with pytest.raises(EngineError, match="noise_seed"):
        engine.forward_backward(make_batch(), nft)
    with pytest.raises(EngineError, match="pairs"):
        engine.forward_backward(seeded(make_batch(count=3)), dpo)
    odd = seeded(make_batch(count=4))
    odd.set_non_tensor("micro_batch_size", 3)
    with pytest.raises(EngineError, match="multiple of 2"):
        engine.forward_backward(odd, dpo)
    bare = seeded(make_batch())
    bare.pop("sigmas")
    with pytest.raises(EngineError, match="sigmas"):
        engine.forward_backward(bare, nft)
    with pytest.raises(EngineError, match="logit_normal"):
        make_engine("forward_process", forward=ForwardProcessConfig(levels="logitnormal"))
