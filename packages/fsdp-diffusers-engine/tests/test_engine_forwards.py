"""An update forwards what its loss needs and nothing else: counted by hooks, for every loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusion_losses import DiffusionLossConfig, known_losses, numbers, pool_statistics
from fsdp_diffusers_engine import DiffusionModelConfig, EngineError, ForwardProcessConfig, gather_outputs
from fsdp_diffusers_engine.forwards import ForwardCounter
from fsdp_diffusers_engine.losses import FirstUpdateLoss

W = 2
"""Trained steps of a trajectory, and noise levels of the forward process (two of the schedule's three)."""
KL = {"ref_kl_coef": 0.1}


def loss(mode: str, **options: Any) -> DiffusionLossConfig:
    return DiffusionLossConfig(loss_mode=mode, **{"clip_ratio": 1.0, **options})


def trained(worker: Any, data: Any) -> tuple[float, float]:
    """(rows with a gradient, rows without) per sample of one training step."""
    metrics = worker.train_mini_batch(data)["metrics"]
    return metrics["forwards/train"], metrics["forwards/no_grad"]


def scored(data: Any, worker: Any) -> Any:
    data["old_log_probs"], data["old_means"] = (worker.compute_log_prob(data)[k] for k in ("log_probs", "means"))
    return data


POLICY_GRADIENT = ["flow_grpo", "dance_grpo", "mix_grpo", "grpo_guard", "flow_dppo", "gspo"]
CASES = [
    *((loss(mode), ("default",), W, 0) for mode in POLICY_GRADIENT),
    *((loss(mode, **KL), ("default",), W, W) for mode in POLICY_GRADIENT if mode != "mix_grpo"),
    (loss("mix_grpo", **KL), ("default",), W, 0),  # its KL is taken against the old policy's log-probs
    (loss("flow_grpo", kl_kind="velocity", **KL), ("default",), W, W),
    (loss("diffusion_nft"), ("default", "old"), W, W),
    (loss("diffusion_nft"), ("default",), W, 0),
    (loss("diffusion_nft", **KL), ("default", "old"), W, 2 * W),
    (loss("diffusion_nft", **KL), ("default",), W, W),
    (loss("awm"), ("default",), W, 0),
    (loss("awm"), ("default", "old"), W, W),
    (loss("awm", awm_ratio="trajectory"), ("default",), W, 0),
    (loss("awm", **KL), ("default", "old"), W, 2 * W),
    (loss("dpo"), ("default",), W, W),
    (loss("sft"), ("default",), W, 0),
]


def label(value: Any) -> str | None:
    if isinstance(value, DiffusionLossConfig):
        return f"{value.loss_mode}-kl" if value.ref_kl_coef else value.loss_mode
    return "+".join(value) if isinstance(value, tuple) else None


def test_every_loss_is_counted_below() -> None:
    assert {config.loss_mode for config, *_ in CASES} == set(known_losses())


@pytest.mark.parametrize(("config", "states", "train", "no_grad"), CASES, ids=label)
def test_an_update_costs_what_the_mathematics_needs(
    make_worker: Any, make_batch: Any, config: DiffusionLossConfig, states: tuple[str, ...], train: int, no_grad: int
) -> None:
    worker, data = make_worker(config, states=states), make_batch(count=4)
    if config.family == "policy_gradient":
        scored(data, worker)
        assert worker.take_forwards() == {"forwards/log_prob": 2 * W}  # called twice
    assert worker.take_forwards() == {}
    assert trained(worker, data) == (train, no_grad)


def test_given_reference_means_epochs_and_guidance(make_worker: Any, make_batch: Any) -> None:
    worker = make_worker(loss("flow_grpo", **KL), states=("default",), ppo_epochs=2)
    data = scored(make_batch(count=5), worker)  # mini-batches of 3 and 2, micro-batches of 2 and 1
    assert trained(worker, data) == (2 * W, 2 * W)
    data["ref_means"] = worker.compute_log_prob(data, adapter="reference")["means"]
    assert trained(worker, data) == (2 * W, 0)
    data["negative_prompt_embeds"], data["negative_prompt_embeds_mask"] = (
        data[key].clone() for key in ("prompt_embeds", "prompt_embeds_mask")
    )
    data.set_non_tensor("settings", data["settings"].replace(true_cfg_scale=2.0))
    assert trained(worker, data) == (2 * 2 * W, 0)


def test_a_lagged_reference_that_is_the_old_policy_is_forwarded_once(make_worker: Any, make_batch: Any) -> None:
    forward = ForwardProcessConfig(reference_state="old")
    worker = make_worker(loss("diffusion_nft", **KL), forward_process=forward)
    assert trained(worker, make_batch(count=4)) == (W, W)


def test_recomputed_blocks_do_not_count_and_a_rollout_is_not_charged_to_the_update(
    make_worker: Any, make_batch: Any, tiny_qwen: Any
) -> None:
    for checkpointing in (True, False):
        model = DiffusionModelConfig(str(tiny_qwen), enable_gradient_checkpointing=checkpointing, lora_rank=4)
        worker = make_worker(loss("flow_grpo"))
        worker.engine.model_config = model
        worker.reset()
        data = scored(make_batch(count=4), worker)
        blocks: list[int] = []
        worker.engine.blocks[0].register_forward_pre_hook(lambda *_, seen=blocks: seen.append(1))
        worker.engine.forward_backward_batch(data, None, forward_only=True)  # somebody samples with the same module
        forwards = len(blocks)
        assert worker.engine.forwards.rows == (0, 4 * W)
        assert trained(worker, data) == (W, 0)
        assert len(blocks) == forwards * (3 if checkpointing else 2)


def test_both_experts_count(make_engine: Any, tiny_wan: Any, make_batch: Any) -> None:
    engine, data = make_engine(path=tiny_wan), make_batch(count=3)
    draw = torch.Generator().manual_seed(0)
    for key in ("latents", "next_latents"):
        data[key] = torch.randn(3, W, 16, 1, 4, 4, generator=draw)
    data["prompt_embeds_mask"] = torch.ones(3, 7, dtype=torch.bool)
    seen = {"transformer": 0, "transformer_2": 0}
    for name in seen:
        part = engine.module.get_submodule(name)
        part.register_forward_pre_hook(lambda *_, name=name: seen.update({name: seen[name] + 1}))
    with engine.eval_mode():
        gather_outputs(engine.forward_backward_batch(data, None, forward_only=True))
    assert engine.forwards.take() == (0, 3 * W)
    assert all(count > 0 for count in seen.values())
    assert engine.forwards.rows == (0, 0)


def test_the_counter_follows_one_module_and_says_what_it_cannot_read() -> None:
    counter, first, second = ForwardCounter(), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    counter.watch(first)
    first(torch.zeros(3, 2))
    with torch.no_grad():
        first(torch.zeros(5, 2))
    assert counter.rows == (3, 5)
    counter.watch(second)
    first(torch.zeros(3, 2))
    assert counter.rows == (0, 0)
    with pytest.raises(EngineError, match="first argument is int"):
        second(1)


class Watched(FirstUpdateLoss):
    """Sees that the old policy's velocity is the trained one's, without a gradient."""

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        torch.testing.assert_close(model_output["velocity"].detach(), data["old_velocity"], rtol=0, atol=1e-6)
        assert not data["old_velocity"].requires_grad
        return super().__call__(model_output, data, dp_group)


@pytest.mark.parametrize("mode", ["diffusion_nft", "awm"])
def test_the_first_update_is_the_same_with_a_fresh_old_policy_as_with_none(
    make_engine: Any, make_batch: Any, stir: Any, mode: str
) -> None:
    """`old` starts equal to `default` (or was just copied), and a model without it takes the present velocity."""
    found = []
    for states in (["default"], ["default", "old"]):
        engine, data = make_engine("forward_process", model={"policy_state_adapters": states}), make_batch(count=4)
        stir(engine)
        if "old" in states:
            engine.copy_adapter("default", "old")
        data.set_non_tensor("noise_seed", 3)
        function = Watched(loss(mode, clip_ratio=1e-4))
        seen = engine.forward_backward(data, function)
        found.append({n: p.grad.clone() for n, p in engine.trainable.items() if p.grad is not None})
        if mode == "awm":  # on policy: nothing is clipped
            metrics = numbers(pool_statistics(seen))
            assert metrics["actor/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
            assert metrics["actor/pg_clipfrac"] == 0.0
    assert found[0].keys() == found[1].keys()
    scale = max(float(g.abs().max()) for g in found[0].values())
    assert scale > 0.0
    assert all(float((found[0][n] - found[1][n]).abs().max()) <= 1e-5 * scale for n in found[0])
