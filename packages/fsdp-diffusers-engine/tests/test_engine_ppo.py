"""The policy-gradient engine against a rollout and against gradients written out by hand."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusion_losses import DiffusionLossConfig, diffusion_loss, numbers, pool_statistics
from fsdp_diffusers_engine import DiffusionLoss, EngineError, embeds_padding_2_no_padding, gather_outputs, offload
from fsdp_diffusers_engine.batch import OWN, settings_of
from model_specs import PromptEmbeds
from sde_samplers import flow_match, rollout, sample_generator, sde_step
from tensordict import NonTensorStack

LOSS = DiffusionLossConfig(clip_ratio=1e-3, ref_kl_coef=0.5)


def log_probs(engine: Any, data: Any) -> torch.Tensor:
    with engine.eval_mode():
        return gather_outputs(engine.forward_backward_batch(data, None, forward_only=True))["log_probs"]


def gradients(engine: Any, data: Any, loss: Any) -> dict[str, torch.Tensor]:
    engine.optimizer_zero_grad()
    engine.forward_backward(data, loss)
    return {n: p.grad.clone() for n, p in engine.trainable.items() if p.grad is not None}


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-6) -> bool:
    scale = max(float(v.abs().max()) for v in b.values())
    return a.keys() == b.keys() and all(float((a[k] - b[k]).abs().max()) <= tolerance * scale for k in b)


@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_replay_agrees_with_the_rollout(make_engine: Any, make_batch: Any, stir: Any, cfg: float) -> None:
    engine, data = make_engine(), make_batch(count=4)
    stir(engine)
    cond = PromptEmbeds(data["prompt_embeds"], data["prompt_embeds_mask"])
    negative = PromptEmbeds(torch.ones(4, 3, 64), torch.ones(4, 3, dtype=torch.bool))
    schedule, settings = flow_match(4), data["settings"].replace(true_cfg_scale=cfg)
    with torch.no_grad():
        path = rollout(
            lambda x, s: engine.spec.velocity(engine.module, x, s, cond, settings, negative),
            torch.randn(4, 4, 64, generator=torch.Generator().manual_seed(0)),
            schedule,
            noise_level=0.7,
            window=[0, 2],
            generators=[sample_generator(0, "u", i) for i in range(4)],
        )
    for key in ("latents", "next_latents", "step_index"):
        data[key] = getattr(path, key)
    data["sigmas"] = path.sigmas.expand(4, -1)
    data["negative_prompt_embeds"], data["negative_prompt_embeds_mask"] = negative.embeds, negative.mask
    data.set_non_tensor("settings", settings)
    data.set_non_tensor("micro_batch_size", 4)
    assert float((log_probs(engine, data) - path.log_probs).abs().max()) == 0.0
    data.set_non_tensor("micro_batch_size", 3)
    assert float((log_probs(engine, data) - path.log_probs).abs().max()) <= 1e-6


def test_gradient_is_that_of_the_whole_batch(make_engine: Any, make_batch: Any, stir: Any) -> None:
    engine, data = make_engine(), make_batch()
    data["old_log_probs"] = log_probs(engine, data) + 2e-4
    stir(engine)
    found = gradients(engine, data, DiffusionLoss(LOSS))

    # The same objective in one graph, straight from its definition.
    engine.optimizer_zero_grad()
    cond = PromptEmbeds(data["prompt_embeds"], data["prompt_embeds_mask"])
    total = 0.0
    for w, (t, u) in enumerate([(1.0, 0.8), (0.8, 0.5)]):
        x, y = data["latents"][:, w], data["next_latents"][:, w]

        def step(x: Any = x, y: Any = y, t: float = t, u: float = u) -> Any:
            v = engine.spec.velocity(engine.module, x, torch.full((5,), t), cond, data["settings"])
            return sde_step(x, v, t, u, kind="flow_sde", noise_level=0.7, sigma_cap=0.8, prev_sample=y)

        ours = step()
        with torch.no_grad(), engine.disable_adapter():
            base = step()
        ratio = torch.exp(ours.log_prob - data["old_log_probs"][:, w])
        advantage = data["advantages"]
        surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - 1e-3, 1 + 1e-3))
        kl = ((ours.mean - base.mean) ** 2).mean((1, 2)) / (2 * ours.std**2)
        total = total + (surrogate + 0.5 * kl).sum() / 10
    total.backward()
    expected = {n: p.grad for n, p in engine.trainable.items() if p.grad is not None}
    assert len(expected) > 30
    assert close(found, expected, 1e-5)


@pytest.mark.parametrize("mode", ["flow_grpo", "gspo", "mix_grpo"])
def test_the_first_step_may_take_its_old_log_probs_from_its_own_forward(
    make_engine: Any, make_batch: Any, stir: Any, mode: str
) -> None:
    """As if a pass of its own had scored them: the same gradient and the same metrics, and a ratio that is exactly 1."""
    engine, data, loss = make_engine(), make_batch(count=4), DiffusionLoss(DiffusionLossConfig(mode, clip_ratio=1e-3))
    stir(engine)
    data.set_non_tensor("micro_batch_size", 2)
    data["old_log_probs"] = log_probs(engine, data)
    wanted = gradients(engine, data, loss)
    told = pool_statistics(engine.forward_backward(data, loss))
    own = data.clone()
    own["old_log_probs"] = torch.full_like(data["old_log_probs"], OWN)
    assert close(gradients(engine, own, loss), wanted, 1e-5)
    found = pool_statistics(engine.forward_backward(own, loss))
    assert numbers(found) == pytest.approx(numbers(told), abs=1e-6)
    assert numbers(found)["actor/ratio_mean"] == 1.0
    assert numbers(found)["actor/ratio_std"] == 0.0
    own["old_log_probs"][1:] = data["old_log_probs"][1:] + 2e-3  # rows of both kinds: each keeps its own
    data["old_log_probs"][1:] += 2e-3
    assert close(gradients(engine, own, loss), gradients(engine, data, loss), 1e-5)


def test_micro_batches_windows_and_padding_change_nothing(make_engine: Any, make_batch: Any, stir: Any) -> None:
    engine, data = make_engine(), make_batch()
    stir(engine)
    data["old_log_probs"] = log_probs(engine, data)
    reference = gradients(engine, data, DiffusionLoss(LOSS))
    for size in (1, 3, 5):
        data.set_non_tensor("micro_batch_size", size)
        assert close(gradients(engine, data, DiffusionLoss(LOSS)), reference, 1e-5)
    assert close(gradients(engine, data, functools.partial(diffusion_loss, LOSS)), reference, 1e-5)
    jagged = embeds_padding_2_no_padding(data.clone())
    assert jagged["prompt_embeds"].is_nested
    assert close(gradients(engine, jagged, DiffusionLoss(LOSS)), reference, 1e-5)
    # the same two steps as windows of one each
    engine.optimizer_zero_grad()
    for w in range(2):
        part = data.clone()
        for key in ("latents", "next_latents", "step_index", "old_log_probs"):
            part[key] = data[key][:, w : w + 1]
        part.set_non_tensor("global_count", 10)
        engine.forward_backward(part, DiffusionLoss(LOSS))
    assert close({n: p.grad for n, p in engine.trainable.items() if p.grad is not None}, reference, 1e-5)


def test_given_reference_means_spare_the_forward(make_engine: Any, make_batch: Any, stir: Any) -> None:
    engine, data = make_engine(), make_batch()
    data["old_log_probs"] = log_probs(engine, data)
    stir(engine)
    calls: list[int] = []
    engine.module.register_forward_pre_hook(lambda *_: calls.append(1))
    inside = gradients(engine, data, DiffusionLoss(LOSS))
    assert len(calls) == 3 * 2 * 2  # micro-batches x steps x (policy, reference)
    with engine.eval_mode(), engine.disable_adapter():
        data["ref_means"] = gather_outputs(engine.forward_backward_batch(data, None, forward_only=True))["means"]
    calls.clear()
    assert close(gradients(engine, data, DiffusionLoss(LOSS)), inside)
    assert len(calls) == 3 * 2


def test_masked_samples_leave_no_trace(make_engine: Any, make_batch: Any, stir: Any) -> None:
    engine, data = make_engine(), make_batch()
    stir(engine)
    data["old_log_probs"] = log_probs(engine, data)
    data["mask"] = torch.tensor([True, False, True, True, False])
    masked = gradients(engine, data, DiffusionLoss(LOSS))
    assert close(masked, gradients(engine, data[data["mask"]], DiffusionLoss(LOSS)), 1e-5)


@pytest.mark.parametrize("mode", ["gspo", "grpo_guard", "flow_dppo", "mix_grpo"])
def test_other_losses_run_and_have_a_gradient(make_engine: Any, make_batch: Any, stir: Any, mode: str) -> None:
    engine, data = make_engine(), make_batch()
    scores = engine.forward_backward_batch(data, None, forward_only=True)
    data["old_log_probs"], data["old_means"] = (gather_outputs(scores)[k] for k in ("log_probs", "means"))
    stir(engine)
    config = DiffusionLossConfig(loss_mode=mode, clip_ratio=1.0, kl_mask_threshold=1.0)
    rows = engine.forward_backward(data, DiffusionLoss(config))
    assert len(rows) == (3 if mode == "gspo" else 6)
    assert engine.optimizer_step() > 0.0


def test_noise_scale_weights_span_the_window(make_engine: Any, make_batch: Any, stir: Any) -> None:
    engine, data = make_engine(), make_batch()
    stir(engine)
    data["old_log_probs"] = log_probs(engine, data)
    scores = gather_outputs(engine.forward_backward_batch(data, None, forward_only=True))
    data["std"] = scores["std"]
    weighted = gradients(engine, data, DiffusionLoss(DiffusionLossConfig(step_weighting="noise_scale", clip_ratio=1.0)))
    by_hand = data.clone()
    by_hand["step_weights"] = scores["std"] * 2 / scores["std"].sum(1, keepdim=True)
    plain = gradients(engine, by_hand, DiffusionLoss(DiffusionLossConfig(clip_ratio=1.0)))
    assert close(weighted, plain, 1e-5)


def test_bad_batches_say_what_to_change(make_engine: Any, make_batch: Any) -> None:
    engine, loss = make_engine(), DiffusionLoss("flow_grpo")
    cases = [
        (lambda d: d.set("latents", d["latents"].bfloat16()), "fp32"),
        (lambda d: d.pop("next_latents"), "next_latents"),
        (lambda d: d.pop("advantages"), "advantages"),
        (lambda d: d.set("step_index", d["step_index"][:, :1]), "must begin with"),
        (lambda d: d.set_non_tensor("settings", d["settings"].replace(kind="ode", window=())), "no log-prob"),
        (lambda d: d.pop("settings"), "SamplerSettings"),
        (lambda d: d.set_non_tensor("micro_batch_size", 0), "micro_batch_size"),
        (lambda d: None, "old_log_probs"),
    ]
    for damage, words in cases:
        data = make_batch(count=2)
        if words != "old_log_probs":
            data["old_log_probs"] = torch.zeros(2, 2)
        damage(data)
        with pytest.raises(EngineError, match=words):
            engine.forward_backward(data, loss)
    with pytest.raises(EngineError, match="loss_function"):
        engine.forward_backward_batch(make_batch(count=2), None)


@pytest.mark.parametrize(
    "options",
    [
        {"engine": {"activation_offload": True}},
        {"engine": {"activation_offload": True}, "model": {"enable_gradient_checkpointing": False}},
        {"model": {"enable_gradient_checkpointing": False}},
        {"model": {"attn_backend": "native"}},
        {"engine": {"param_offload": True, "optimizer_offload": True}},
    ],
    ids=["activation_offload", "offload_all_activations", "no_checkpointing", "attn_backend", "offload"],
)
def test_memory_options_change_no_number(make_engine: Any, make_batch: Any, stir: Any, options: Any) -> None:
    found = []
    for chosen in ({}, options):
        engine, data = make_engine(**chosen), make_batch(count=3)
        stir(engine)
        data["old_log_probs"] = torch.zeros(3, 2)
        found.append(gradients(engine, data, DiffusionLoss(DiffusionLossConfig(clip_ratio=9.0))))
    assert close(found[1], found[0], 1e-6)


def test_full_determinism_is_on_from_the_first_step(make_engine: Any, default_kernels: None) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    make_engine(engine={"full_determinism": True})
    assert torch.are_deterministic_algorithms_enabled()


def test_offloading_activations_copies_no_weight(
    make_engine: Any, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, moved, stayed = offload._pack, list[int](), list[int]()

    def watched(tensor: torch.Tensor) -> Any:
        packed = pack(tensor)
        (stayed if isinstance(packed, torch.Tensor) else moved).append(tensor.untyped_storage().data_ptr())
        return packed

    monkeypatch.setattr(offload, "_pack", watched)
    counts = []
    for sharding in ("replicate", "shard"):
        engine = make_engine(
            engine={"activation_offload": True, "sharding": sharding}, model={"enable_gradient_checkpointing": False}
        )
        data = make_batch(count=2)
        data["old_log_probs"] = torch.zeros(2, 2)
        engine.forward_backward(data, DiffusionLoss(LOSS))
        if sharding == "replicate":
            weights = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
            assert not weights & set(moved)
            assert set(stayed) <= weights
        counts.append((len(moved), len(stayed)))
        moved.clear()
        stayed.clear()
    dist.destroy_process_group()
    assert counts[1] == counts[0]  # gathered weights are weights, too
    assert min(counts[0]) > 100


def test_offloaded_activations_come_back_as_they_lay() -> None:
    """A compiled backward is made for certain strides: those of a slice, or of what was expanded, too."""
    joined = torch.randn(2, 5, 3, 8)
    for saved in (joined[:, :, 1], joined.mT, torch.randn(2, 1, 4).expand(2, 3, 4), joined[:0], torch.tensor(3.0)):
        back = offload._unpack(offload._pack(saved))
        assert torch.equal(back, saved)
        assert back.stride() == saved.stride()


def test_compiled_blocks_change_no_number(
    make_engine: Any, make_batch: Any, stir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    original = torch.nn.Module.compile

    def traced(self: Any, *args: Any, **kwargs: Any) -> None:
        compiled.append(type(self).__name__)
        original(self, *args, backend="eager", **kwargs)  # traced by Dynamo, without a C++ compiler

    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    found = []
    for compile_blocks in (False, True):
        engine, data = make_engine(engine={"use_torch_compile": compile_blocks}), make_batch(count=2)
        stir(engine)
        data["old_log_probs"] = torch.zeros(2, 2)
        found.append(gradients(engine, data, DiffusionLoss(LOSS)))
    assert compiled == ["QwenImageTransformerBlock"] * 2
    assert torch._dynamo.config.recompile_limit >= 64  # at the limit, recomputation would not match the forward
    assert close(found[1], found[0], 1e-5)


def test_settings_of_a_batch(make_batch: Any) -> None:
    """One value for the batch, or one for each sample; rows may differ in their windows, and in nothing else."""
    data = make_batch(count=2)
    settings = data["settings"]
    assert settings_of(data) == settings_of(torch.cat([data, data])) == settings

    def rows(**changes: Any) -> Any:
        batch = make_batch(count=2)
        batch["settings"] = NonTensorStack(settings, settings.replace(**changes))
        return batch

    assert settings_of(rows(window=(1, 2))) == settings
    assert settings_of(rows(height=64)[:1]) == settings
    with pytest.raises(EngineError, match="in height:"):
        settings_of(rows(height=64))
    with pytest.raises(EngineError, match="in kind, noise_level:"):
        settings_of(torch.cat([data, rows(kind="flow_cps", noise_level=0.5)]))
