"""What only a GPU shows: real copies between host and card, pinned memory, bf16 products, Inductor. Skipped without one.

Ranks on GPUs: `ENGINE_TEST_DEVICE=cuda pytest packages/fsdp-diffusers-engine/tests/test_engine_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusion_losses import DiffusionLossConfig
from fsdp_diffusers_engine import DiffusionLoss, gather_outputs
from lora_sync.layers import full
from model_specs import PromptEmbeds
from sde_samplers import flow_match, rollout, sample_generator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PPO = DiffusionLoss(DiffusionLossConfig(clip_ratio=9.0, ref_kl_coef=0.5))
NFT = DiffusionLoss(DiffusionLossConfig(loss_mode="diffusion_nft"))
OFFLOAD = {"param_offload": True, "optimizer_offload": True}
Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No tf32, and no process group left to the next test."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
    if dist.is_initialized():
        dist.destroy_process_group()


def copies(tensors: Any) -> Weights:
    return {n: full(t).float().cpu().clone() for n, t in tensors}


def update(engine: Any, data: Any, loss: Any = PPO) -> tuple[Weights, Weights]:
    """(gradient, weights after a step) of one update."""
    data["old_log_probs"] = torch.zeros(data.batch_size[0], 2)
    data.set_non_tensor("noise_seed", 7)
    engine.forward_backward(data, loss)
    # Compiled blocks give zeros to what eager ones give nothing: the last block's text output is read by nobody.
    gradient = copies((n, torch.zeros_like(p) if p.grad is None else p.grad) for n, p in engine.trainable.items())
    with engine.train_mode():
        engine.step()
    return gradient, copies(engine.trainable.items())


def apart(found: Weights, other: Weights) -> float:
    """Largest difference, as a share of the largest number."""
    assert found.keys() == other.keys()
    scale = max(float(t.abs().max()) for t in other.values())
    return max(float((found[n] - other[n]).abs().max()) for n in other) / scale


@pytest.mark.parametrize(
    ("kind", "loss", "full"), [("ppo", PPO, False), ("ppo", PPO, True), ("forward_process", NFT, False)]
)
def test_card_and_cpu_agree(make_engine: Any, make_batch: Any, stir: Any, kind: str, loss: Any, full: bool) -> None:
    found = []
    for device in ("cpu", "cuda"):
        states = {"policy_state_adapters": ["default", "reference"]} if full else {}
        engine = make_engine(kind, full, model=states, engine={"device": device})
        stir(engine)
        found.append(update(engine, make_batch(), loss)[0])
    assert apart(found[1], found[0]) <= 1e-4


def compare(make: Any, batch: Any, stir: Any, options: dict[str, Any], full: bool = False) -> Any:
    """Two updates with and without `options` give the same numbers; returns the engine with them."""
    states = {"policy_state_adapters": ["default", "reference"]} if full else {}
    results = []
    for chosen in ({}, options):
        engine = make(full=full, model=states, engine={"device": "cuda", "ema_decay": 0.5, **chosen})
        stir(engine)
        update(engine, batch(seed=1))
        results.append(update(engine, batch(seed=2)))
    (gradient, weights), (other_gradient, other_weights) = results
    assert apart(other_gradient, gradient) <= 1e-4
    assert apart(other_weights, weights) <= 1e-4
    return engine


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize(
    "options",
    [
        {"activation_offload": True},
        OFFLOAD,
        {"sharding": "shard"},
        {"sharding": "shard", **OFFLOAD},
        {"sharding": "shard", "offload_policy": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_where_things_lie_changes_no_number(
    make_engine: Any, make_batch: Any, stir: Any, options: dict[str, Any], full: bool
) -> None:
    engine = compare(make_engine, make_batch, stir, options, full)
    if options.get("param_offload"):
        states = engine.optimizer.state.values()
        held = [*engine.module.parameters(), *(v for s in states for k, v in s.items() if k != "step")]
        assert {t.device.type for t in held} == {"cpu"}


@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_compiled_blocks_change_no_number(make_engine: Any, make_batch: Any, stir: Any, sharding: str) -> None:
    torch.compiler.reset()
    compare(make_engine, make_batch, stir, {"sharding": sharding, "use_torch_compile": True})


def test_bf16_base_replays_its_own_rollout(make_engine: Any, make_batch: Any, stir: Any) -> None:
    engine, data = make_engine(engine={"device": "cuda", "model_dtype": "bf16"}), make_batch(count=4)
    stir(engine)
    cond = PromptEmbeds(data["prompt_embeds"].cuda(), data["prompt_embeds_mask"].cuda())
    with engine.eval_mode():
        path = rollout(
            lambda x, s: engine.spec.velocity(engine.module, x, s, cond, data["settings"]),
            torch.randn(4, 4, 64, generator=torch.Generator().manual_seed(0)).cuda(),
            flow_match(4),
            noise_level=0.7,
            window=[0, 2],
            generators=[sample_generator(0, "u", i) for i in range(4)],
        )
    for key in ("latents", "next_latents", "step_index"):
        data[key] = getattr(path, key).cpu()
    data["sigmas"] = path.sigmas.cpu().expand(4, -1)
    data.set_non_tensor("micro_batch_size", 4)
    with engine.eval_mode():
        scores = gather_outputs(engine.forward_backward_batch(data, None, forward_only=True))["log_probs"]
    assert torch.equal(scores, path.log_probs)
    gradient, _ = update(engine, data)
    exact = make_engine(engine={"device": "cuda"})
    stir(exact)
    assert apart(gradient, update(exact, data)[0]) <= 0.3


@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_a_checkpoint_goes_on_bitwise(
    make_engine: Any, make_batch: Any, stir: Any, tmp_path: Path, default_kernels: None, sharding: str
) -> None:
    def build() -> Any:
        options = {"device": "cuda", "sharding": sharding, "ema_decay": 0.9, "full_determinism": True}
        return make_engine(engine=options)

    engine = build()
    stir(engine)
    update(engine, make_batch(seed=1))
    engine.save_checkpoint(tmp_path / "step_1", global_step=1)
    draw = torch.rand(3, device="cuda")
    expected = update(engine, make_batch(seed=2))[1]
    again = build()
    assert again.load_checkpoint(tmp_path / "step_1") == 1
    assert torch.equal(torch.rand(3, device="cuda"), draw)
    found = update(again, make_batch(seed=2))[1]
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_heads_of_a_sum_are_rounded_as_the_sum_is() -> None:
    from model_specs.joined_heads import joined_heads, joined_heads_of_sums

    draw = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device="cuda")

    text, image, text_added, image_added = (normal(2, tokens, 384).bfloat16() for tokens in (7, 64, 7, 64))
    rest = normal(128).bfloat16(), normal(128).bfloat16(), normal(7, 64, 2), normal(64, 64, 2), 1e-6
    found = joined_heads_of_sums(text, image, text_added, image_added, *rest)
    assert torch.equal(found, joined_heads(text + text_added, image + image_added, *rest))
