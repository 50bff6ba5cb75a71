"""How many blocks are recomputed in backward, and prompts without padding that nobody needs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from diffusion_losses import DiffusionLossConfig
from fsdp_diffusers_engine import DiffusionLoss, EngineError
from fsdp_diffusers_engine.batch import prompts
from fsdp_diffusers_engine.recompute import blocks_to_recompute


def test_so_many_blocks_run_twice_and_no_number_changes(make_engine: Any, make_batch: Any, stir: Any) -> None:
    found = []
    for count in (0, 1, 2, None):  # without CUDA nothing is measured: None recomputes all
        engine, data = make_engine(model={"recompute_blocks": count}), make_batch(count=2, window=1)
        stir(engine)
        data["old_log_probs"] = torch.zeros(2, 1)
        runs: Counter[int] = Counter()
        for number, block in enumerate(engine.blocks):
            block.register_forward_pre_hook(lambda *_, number=number, runs=runs: runs.update([number]))
        engine.optimizer_zero_grad()
        engine.forward_backward(data, DiffusionLoss(DiffusionLossConfig(clip_ratio=9.0)))
        found.append({name: p.grad.clone() for name, p in engine.trainable.items() if p.grad is not None})
        twice = 2 if count is None else count
        assert [runs[number] for number in range(2)] == [2 if number < twice else 1 for number in range(2)]
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in found[0])


@pytest.mark.parametrize("count", [-1, 3])
def test_a_number_of_blocks_that_there_is_not(make_engine: Any, count: int) -> None:
    with pytest.raises(EngineError, match=f"recompute_blocks={count}.*from 0 to 2"):
        make_engine(model={"recompute_blocks": count})


def test_the_count_follows_from_free_memory() -> None:
    """Qwen-Image at 512², micro-batch 8, compiled: a block keeps about 0.76 GB and passes on 0.054 GB."""
    choose = [blocks_to_recompute(60, free * 1e9, 0.76e9, 0.054e9) for free in (0, 4, 20, 40, 60, 80)]
    assert choose[0] == choose[1] == 60
    assert choose[-1] == 0
    assert choose == sorted(choose, reverse=True)
    assert 0 < choose[3] < 60
    for free, count in zip((20e9, 40e9, 60e9), choose[2:5], strict=True):
        assert (
            60 - count
        ) * 0.76e9 + count * 0.054e9 + 3 * 0.76e9 <= free  # what is kept, passed on, and backward's own


def test_rows_of_one_length_need_no_mask(make_engine: Any, make_batch: Any) -> None:
    """A batch is padded to its longest prompt; a micro-batch of shorter ones is cut back to them and runs unmasked."""
    engine, data = make_engine(), make_batch(count=4, tokens=9)
    lengths = torch.tensor([4, 4, 9, 9])
    data["prompt_embeds_mask"] = torch.arange(9) < lengths[:, None]
    micros, _ = engine.objective.prepare(engine, data, None, training=False)
    assert [micro["cond"].embeds.shape[1] for micro in micros] == [4, 9]
    assert all(micro["cond"].full for micro in micros)
    mixed = prompts({key: data[key] for key in ("prompt_embeds", "prompt_embeds_mask")})
    assert mixed is not None
    assert mixed.embeds.shape[1] == 9
    assert not mixed.full
    # The mask that is no longer needed changed nothing but the kernel.
    with engine.eval_mode():
        apart = engine.forward_backward_batch(data, None, forward_only=True)
        data.set_non_tensor("micro_batch_size", 4)
        together = engine.forward_backward_batch(data, None, forward_only=True)
    gap = torch.cat([part["log_probs"] for part in apart]) - together[0]["log_probs"]
    assert gap.abs().max() < 1e-4
