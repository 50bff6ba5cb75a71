"""What 2 and 4 ranks compute is what one process computes. `ranks.py` runs them; here the results are compared.

`ENGINE_TEST_DEVICE=cuda` runs them on as many GPUs, through NCCL.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

CUDA = os.environ.get("ENGINE_TEST_DEVICE", "cpu") == "cuda"


def need(world: int) -> None:
    if CUDA and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory, tiny_qwen: Path, tiny_wan: Path, forked: Any) -> Any:
    """`ranks(scenario, world, rank)`: what that rank found."""
    out = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("ranks.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | (
        {} if CUDA else {"CUDA_VISIBLE_DEVICES": ""}
    )
    _, errors = forked([script, out, tiny_qwen, tiny_wan], env=env).communicate(timeout=280)

    def read(scenario: str, world: int, rank: int = 0) -> Any:
        need(world)
        file = out / f"{scenario}_{world}_{rank}.pt"
        assert file.is_file(), f"rank {rank} of {world} did not finish {scenario}:\n{errors[-4000:]}"
        return torch.load(file, weights_only=True)

    read.folder = out  # type: ignore[attr-defined]
    return read


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in b)


def assert_same_update(found: Any, single: Any) -> None:
    assert apart(found["grads"], single["grads"]) <= 1e-6
    scale = max(float(g.abs().max()) for g in single["grads"].values())
    assert apart(found["grads"], single["grads"]) <= 1e-5 * scale
    # Adam's first step is the gradient's sign where the gradient is larger than rounding: a tenth of the step, lr = 1e-4.
    assert apart(found["weights"], single["weights"]) <= 1e-5
    assert apart(found["clipped"], single["clipped"]) <= 1e-6
    assert found["norm"] == pytest.approx(single["norm"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("scenario", "world"),
    [
        ("lora_even", 2),
        ("lora_uneven", 2),
        ("lora_uneven", 4),
        ("full", 2),
        ("forward_process", 2),
        ("preference", 2),
        ("experts", 2),
        ("experts_apart", 2),
        ("sequence", 2),
        ("sequence_whole", 2),
    ],
)
def test_gradients_step_and_norm_equal_one_process(ranks: Any, scenario: str, world: int) -> None:
    single = ranks(scenario, 1)
    for rank in range(world):
        assert_same_update(ranks(scenario, world, rank), single)


@pytest.mark.parametrize(("scenario", "single"), [("whole_copies", "lora_uneven"), ("whole_copies_full", "full")])
def test_whole_copies_compute_what_one_process_does_and_stay_equal(ranks: Any, scenario: str, single: str) -> None:
    expected = ranks(single, 1)
    found = [ranks(scenario, 2, rank) for rank in range(2)]
    for one in found:
        assert_same_update(one, expected)
    assert all(apart(found[0][part], found[1][part]) == 0.0 for part in ("grads", "clipped", "weights"))
    assert found[0]["norm"] == found[1]["norm"]


def test_whole_copies_send_their_gradient_once_an_update_and_nothing_else_but_counts(ranks: Any) -> None:
    found = ranks("whole_copies", 2)
    numbers = sum(weight.numel() for weight in found["weights"].values())
    assert sorted(found["sent"]) == [1, 1, numbers + len(found["weights"])]


def test_whole_copies_go_on_from_the_checkpoint_that_one_of_them_wrote(ranks: Any) -> None:
    for rank in range(2):
        found = ranks("whole_copies_save", 2, rank)
        assert apart(found["loaded"], found["weights"]) == 0.0


@pytest.mark.parametrize("scenario", ["lora_even", "lora_uneven", "full", "forward_process", "preference"])
def test_the_loss_is_the_count_weighted_mean_over_ranks(ranks: Any, scenario: str) -> None:
    single = ranks(scenario, 1)["metrics"]
    parts = [ranks(scenario, 2, rank)["metrics"] for rank in range(2)]
    counts = [p["actor/count"] for p in parts]
    assert sum(counts) == single["actor/count"]
    mean = sum(p["actor/loss"] * c for p, c in zip(parts, counts, strict=True)) / sum(counts)
    assert mean == pytest.approx(single["actor/loss"], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("scenario", "world"), [("lora_even", 2), ("lora_uneven", 4)])
def test_gathered_adapters_are_whole(ranks: Any, scenario: str, world: int) -> None:
    single = ranks(scenario, 1)
    for rank in range(world):
        found = ranks(scenario, world, rank)
        assert apart(found["payload"], single["payload"]) <= 1e-5
        assert apart(found["stream"], found["payload"]) == 0.0


def test_both_experts_get_gradients_from_their_own_steps(ranks: Any) -> None:
    for world in (1, 2):
        grads = ranks("experts", world)["grads"]
        for expert in ("transformer.", "transformer_2."):
            assert sum(float(g.norm()) for n, g in grads.items() if n.startswith(expert)) > 0.0


def test_a_rank_reads_its_own_shard_only(ranks: Any) -> None:
    assert [ranks("full", 2, rank)["read"] for rank in range(2)] == pytest.approx([0.5, 0.5], abs=0.05)
    assert apart(ranks("full", 2)["stream"], ranks("full", 1)["stream"]) <= 1e-5


def test_ranks_clip_the_norm_of_the_whole_gradient(ranks: Any) -> None:
    for world, rank in ((1, 0), (2, 0), (2, 1), (4, 3)):
        found = ranks("lora_uneven", world, rank)
        assert found["norm"] > 0.002
        clipped = sum(float(g.double().square().sum()) for g in found["clipped"].values()) ** 0.5
        assert clipped == pytest.approx(0.001, rel=2e-3)


def test_two_ranks_go_on_bitwise_from_their_checkpoint(ranks: Any) -> None:
    for rank in range(2):
        found, expected = ranks("load", 2, rank), ranks("save", 2, rank)
        assert all(apart(found[part], expected[part]) == 0.0 for part in ("grads", "weights"))
        assert (found["norm"], found["metrics"]) == (expected["norm"], expected["metrics"])


@pytest.mark.parametrize("world", [1, 4])
def test_a_checkpoint_of_two_ranks_goes_on_with_one_or_four(ranks: Any, world: int) -> None:
    assert_same_update(ranks("load", world), ranks("save", 2))
    assert_same_update(ranks("load", world), ranks("save", 1))


def test_one_sharded_process_is_the_plain_one(ranks: Any) -> None:
    assert_same_update(ranks("one_sharded", 1), ranks("lora_even", 1))


def test_mixed_precision_keeps_fp32_weights_and_agrees_within_bf16(ranks: Any) -> None:
    single, plain = ranks("mixed", 1), ranks("full", 1)
    scale = max(float(g.abs().max()) for g in single["grads"].values())
    for rank in range(2):
        found = ranks("mixed", 2, rank)
        assert found["stored"] == ["torch.float32"]
        assert apart(found["grads"], single["grads"]) <= 2e-2 * scale
        assert found["norm"] == pytest.approx(single["norm"], rel=1e-2)
    assert single["grads"].keys() == plain["grads"].keys()


def test_a_failing_rank_ends_the_others_with_its_error(ranks: Any) -> None:
    first, second = ranks("failing", 2, 0), ranks("failing", 2, 1)
    assert second["error"] == "ZeroDivisionError"
    assert first["error"] == "RankError"
    assert "rank 1" in first["text"]
    assert "the reward of sample 3 was empty" in first["text"]
    assert first["seconds"] < 20.0


@pytest.mark.skipif(CUDA, reason="plays the part of NCCL")
def test_ranks_that_would_wait_for_ever_are_ended_with_the_error(ranks: Any) -> None:
    first, second = (ranks("aborting", 2, rank) for rank in range(2))
    for found in (first, second):  # a batch that is wrong everywhere harms nobody
        assert (found["all raise"]["error"], found["all raise"]["aborts"]) == ("ZeroDivisionError", 0)
        assert found["all raise"]["seconds"] < 10.0
    for case in ("one raises", "one raised before"):
        assert (first[case]["error"], second[case]["error"]) == ("RankError", "ZeroDivisionError")
        assert "rank 1" in first[case]["text"]
        assert "the reward of sample 3 was empty" in first[case]["text"]
        assert first[case]["aborts"] == second[case]["aborts"] == 1
        assert first[case]["seconds"] < 20.0
