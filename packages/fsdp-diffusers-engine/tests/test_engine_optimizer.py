"""Optimizer steps: clipping, skipping, schedules, EMA; policy states of LoRA and full fine-tuning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusion_losses import DiffusionLossConfig
from fsdp_diffusers_engine import DiffusionLoss, EngineError, EngineStateError, FSDPOptimizerConfig, gather_outputs
from fsdp_diffusers_engine.optim import lr_factor
from lora_sync.layers import adapter_parameters

LOSS = DiffusionLoss(DiffusionLossConfig(clip_ratio=1.0))


def prepared(data: Any) -> Any:
    data["old_log_probs"] = torch.zeros(data.batch_size[0], 2)
    return data


def weights(engine: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.trainable.values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_only_the_adapter_trains_and_adamw_does_the_arithmetic(make_engine: Any, make_batch: Any) -> None:
    engine = make_engine(optim={"lr": 1e-3, "clip_grad": 1e-3, "weight_decay": 0.1, "betas": [0.8, 0.9]})
    assert {n.split(".")[-2] for n in engine.trainable} == {"default"}
    frozen = {n: p for n, p in engine.module.named_parameters() if not p.requires_grad}
    before = {n: p.clone() for n, p in frozen.items()}
    engine.forward_backward(prepared(make_batch()), LOSS)
    assert all(p.grad is None for p in frozen.values())
    start = {n: p.detach().double() for n, p in engine.trainable.items() if p.grad is not None}
    grad = {n: engine.trainable[n].grad.double() for n in start}
    norm = torch.sqrt(sum((g**2).sum() for g in grad.values()))
    assert norm > 2e-3
    assert engine.optimizer_step() == pytest.approx(float(norm), rel=1e-5)
    for name, old in start.items():
        g = grad[name] * 1e-3 / (norm + 1e-6)
        step = g / (g.abs() + 1e-8)  # the first step of Adam: both moments are corrected to g and g²
        assert torch.allclose(engine.trainable[name].double(), old * (1 - 1e-3 * 0.1) - 1e-3 * step, atol=1e-7)
    assert all(torch.equal(p, before[n]) for n, p in frozen.items())


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(make_engine: Any, make_batch: Any) -> None:
    engine, data = make_engine(engine={"ema_decay": 0.5}), prepared(make_batch())
    engine.forward_backward(data, LOSS)
    *_, name = (name for name, p in engine.trainable.items() if p.grad is not None)
    engine.trainable[name].grad[0, 0] = float("nan")
    before = weights(engine)
    metrics = engine.step()
    assert metrics["actor/grad_norm"] != metrics["actor/grad_norm"]
    assert (metrics["actor/skipped_steps"], engine.optimizer_steps, engine.bad_gradient) == (1.0, 0, name)
    assert same(weights(engine), before)
    assert all(p.grad is None for p in engine.trainable.values())
    engine.forward_backward(data, LOSS)
    assert engine.step()["actor/skipped_steps"] == 0.0
    assert (engine.skipped_steps, engine.optimizer_steps) == (1, 1)
    assert not same(weights(engine), before)


@pytest.mark.parametrize("full", [False, True])
def test_a_gradient_of_zero_moves_nothing_and_is_counted(make_engine: Any, make_batch: Any, full: bool) -> None:
    """Momentum of earlier steps and weight decay would move the weights though nothing was to be learned."""
    engine, data = make_engine(full=full, optim={"weight_decay": 0.1}), prepared(make_batch())
    engine.forward_backward(data, LOSS)
    assert engine.step()["actor/empty_steps"] == 0.0
    before = weights(engine)
    data["advantages"] = torch.zeros_like(data["advantages"])
    engine.forward_backward(data, LOSS)
    metrics = engine.step()
    assert (metrics["actor/grad_norm"], metrics["actor/empty_steps"], metrics["actor/skipped_steps"]) == (0.0, 1.0, 0.0)
    assert (engine.empty_steps, engine.optimizer_steps) == (1, 1)
    assert same(weights(engine), before)


def test_schedules() -> None:
    linear = FSDPOptimizerConfig(
        lr_scheduler_type="linear", lr_warmup_steps=3, total_training_steps=13, min_lr_ratio=0.1
    )
    assert [lr_factor(linear, s) for s in (0, 2, 3, 8, 13, 99)] == pytest.approx([0.25, 0.75, 1.0, 0.55, 0.1, 0.1])
    cosine = FSDPOptimizerConfig(lr_scheduler_type="cosine", total_training_steps=10)
    assert [lr_factor(cosine, s) for s in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    assert lr_factor(FSDPOptimizerConfig(), 10**6) == 1.0


def test_the_schedule_reaches_the_optimizer(make_engine: Any, make_batch: Any) -> None:
    engine = make_engine(
        optim={"lr": 1.0, "lr_scheduler_type": "linear", "total_training_steps": 4, "min_lr_ratio": 0.5}
    )
    rates = [engine.step()["actor/lr"] for _ in range(3)]  # without a gradient, too: the schedule counts planned steps
    assert rates == pytest.approx([1.0, 0.875, 0.75])


@pytest.mark.parametrize("full", [False, True])
def test_an_average_moves_at_its_own_pace(make_engine: Any, make_batch: Any, full: bool) -> None:
    pace = {"ema_decay": 0.9, "ema_every": 2, "ema_warmup": True, "state_offload": full or None}
    engine, data = make_engine(full=full, engine=pace), prepared(make_batch(count=2))
    names = {name: name.replace(".default.", ".ema.") for name in engine.trainable}
    parameters = dict(engine.module.named_parameters())

    def kept() -> dict[str, torch.Tensor]:
        ema = engine.states.copies["ema"] if full else {name: parameters[names[name]] for name in names}
        return {name: tensor.detach().clone() for name, tensor in ema.items()}

    start, wanted = kept(), kept()
    for n in (1, 2, 3, 4):
        engine.forward_backward(data, LOSS)
        engine.step()
        if n % 2:
            assert all(torch.equal(kept()[name], wanted[name]) for name in names)
            continue
        decay = (1 + n) / (10 + n)  # below 0.9 until n = 80
        wanted = {name: decay * wanted[name] + (1 - decay) * p.detach() for name, p in engine.trainable.items()}
        assert all(torch.allclose(kept()[name], wanted[name], atol=1e-7) for name in names)
        wanted = kept()
    assert any(not torch.equal(start[name], wanted[name]) for name in names)


@pytest.mark.parametrize("full", [False, True])
def test_policy_states(make_engine: Any, make_batch: Any, stir: Any, full: bool) -> None:
    states = {"policy_state_adapters": ["default", "old", *(["reference"] if full else [])]}
    engine, data = make_engine(full=full, model=states, engine={"ema_decay": 0.75}), prepared(make_batch(count=2))

    def scores(name: str) -> torch.Tensor:
        with engine.eval_mode(), engine.use_adapter(name):
            return gather_outputs(engine.forward_backward_batch(data, None, forward_only=True))["means"]

    start = scores("default")
    assert torch.equal(scores("reference"), start)
    stir(engine)
    moved = scores("default")
    assert not torch.equal(moved, start)
    assert torch.equal(scores("old"), start)
    assert torch.equal(scores("reference"), start)
    engine.copy_adapter("default", "old")
    assert torch.equal(scores("old"), moved)
    # one optimizer step moves ema a quarter of the way from its start to the new weights
    engine.forward_backward(data, LOSS)
    engine.step()
    if full:
        ema = engine.states.copies["ema"]
        name, parameter = next(iter(engine.trainable.items()))
        first = engine.states.copies["reference"][name]
        assert torch.allclose(ema[name], 0.75 * first + 0.25 * parameter.detach(), atol=1e-6)
    assert torch.equal(scores("reference"), start)
    after = scores("default")
    with pytest.raises(RuntimeError), engine.use_adapter("old"):
        raise RuntimeError
    assert torch.equal(scores("default"), after)
    with pytest.raises(ValueError, match="old"), engine.use_adapter("olt"):
        pass


def test_wrong_settings_and_wrong_order_are_refused(make_engine: Any, tiny_qwen: Any) -> None:
    from fsdp_diffusers_engine import DiffusionModelConfig, PPODiffusersFSDPEngine

    with pytest.raises(EngineStateError, match="initialize"):
        PPODiffusersFSDPEngine(DiffusionModelConfig(path=str(tiny_qwen))).optimizer_step()
    for options, words in [
        ({"optim": {"lr_scheduler_type": "cosin"}}, "cosin"),
        ({"optim": {"lr_scheduler_type": "cosine"}}, "total_training_steps"),
        ({"optim": {"betas": [0.9]}}, "betas"),
        ({"optim": {"lr": -1.0}}, "lr=-1.0"),
        ({"checkpoint": {"save_contents": ["modle"]}}, "model"),
        ({"model": {"lora_rank": -1}}, "lora_rank"),
        ({"model": {"target_modules": ["to_kk"]}}, "to_k"),
        ({"model": {"target_modules": "attn\\..*x"}}, "matches no linear layer"),
        ({"model": {"exclude_modules": ".*"}}, "leaves nothing"),
        ({"model": {"lora_init_weights": "pissa"}}, "gaussian"),
        ({"model": {"lora_dtype": "fp8"}}, "lora_dtype"),
        ({"model": {"attn_backend": "flesh"}}, "attn_backend"),
        ({"model": {"architecture": "qwen_imag"}}, "qwen_image"),
        ({"model": {"fsdp_layer_prefixes": ["blocks"]}}, "transformer_blocks"),
        ({"model": {"transformer_subfolder": "transformer_2"}}, "transformer"),
        ({"model": {"lora_adapter_path": "/nowhere"}}, "does not exist"),
        ({"engine": {"model_dtype": "fp64"}}, "model_dtype"),
        ({"engine": {"ulysses_sequence_parallel_size": 2}}, "divide"),
        ({"engine": {"fsdp_size": 3}}, "divide"),
        ({"engine": {"offload_policy": True}}, "sharding"),
        ({"engine": {"sharding": "sometimes"}}, "auto"),
        ({"path": ""}, "model.path"),
        ({"path": "/nowhere"}, "nowhere"),
    ]:
        with pytest.raises(EngineError, match=words):
            make_engine(**options)


def test_every_policy_state_starts_as_the_trained_one_when_built_without_storage() -> None:
    from fsdp_diffusers_engine import DiffusionModelConfig, FSDPEngineConfig, PPODiffusersFSDPEngine

    tiny = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 64}
    engine = PPODiffusersFSDPEngine(
        DiffusionModelConfig(
            architecture="qwen_image",
            transformer_config={**tiny, "axes_dims_rope": (4, 6, 6)},
            lora_rank=4,
            policy_state_adapters=["default", "old"],
        ),
        FSDPEngineConfig(device="cpu", ema_decay=0.5),
    )
    engine.initialize()
    start = list(adapter_parameters(engine.module, "default").values())
    assert len(start) > 20
    for name in ("old", "ema"):
        assert same(list(adapter_parameters(engine.module, name).values()), start)
