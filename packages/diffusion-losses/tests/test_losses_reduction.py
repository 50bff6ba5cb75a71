"""Counting: micro-batches, masks, layouts, metrics of one element, and two processes over gloo."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from diffusion_losses import DiffusionLossConfig, LossError, diffusion_loss, known_losses

close = torch.testing.assert_close
POLICY = ("flow_grpo", "dance_grpo", "mix_grpo", "grpo_guard", "flow_dppo", "gspo")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(mode, b=6, w=4):
    """Config, leaf, and a function of (rows, columns) that calls the loss on that part of the batch."""
    old = draw(b, w, 3, seed=1)
    leaf = (old + 0.1 * draw(b, w, 3, seed=2)).requires_grad_()
    data = {
        "old_log_probs": draw(b, w, seed=3),
        "advantages": draw(b, w, seed=4),
        "old_means": old,
        "next_latents": old + draw(b, w, 3, seed=5),
        "ref_means": draw(b, w, 3, seed=6),
        "std": 0.5 + draw(b, w, seed=7).abs(),
        "sigma": torch.full((b, w), 0.8).double(),
        "sigma_next": torch.full((b, w), 0.3).double(),
        "mask": draw(b, w, seed=8) > -0.5,
        "x0": draw(b, w, 3, seed=9),
        "noise": draw(b, w, 3, seed=10),
        "old_velocity": old,
        "ref_velocity": draw(b, w, 3, seed=11),
    }
    if mode == "dpo":
        data["mask"][::2] = data["mask"][1::2]  # a pair counts when both rows do
    kl = 0.5 if mode in POLICY else 0.2
    config = DiffusionLossConfig(mode, clip_ratio=0.05, ref_kl_coef=kl, dpo_beta=2.0)

    def call(rows, columns=slice(None), **extra):
        part = {key: value[rows, columns] for key, value in data.items()}
        point = leaf[rows, columns]
        output = {"log_probs": data["old_log_probs"][rows, columns] + 0.3 * point.mean(-1), "means": point}
        return diffusion_loss(config, {**output, "velocity": point}, part | extra)

    return leaf, data, call


@pytest.mark.parametrize("mode", known_losses())
def test_micro_batches_add_up_to_the_batch(mode):
    leaf, data, call = make(mode)
    whole = call(slice(None))
    (want,) = torch.autograd.grad(whole.loss, leaf)
    counted = data["mask"][::2].sum() if mode == "dpo" else data["mask"].sum()
    total, value = torch.zeros_like(leaf), 0.0
    parts = [(slice(0, 4), slice(None)), (slice(4, 6), slice(None))]
    if mode not in ("gspo",):  # a trajectory ratio needs its whole window
        parts = [(rows, columns) for rows, _ in parts for columns in (slice(0, 1), slice(1, 4))]
    for rows, columns in parts:
        out = call(rows, columns, global_count=int(counted))
        total += torch.autograd.grad(out.loss, leaf)[0]
        value += out.loss.item()
    close(total, want)
    assert value == pytest.approx(whole.loss.item(), rel=1e-10)
    assert whole.metrics["actor/count"] == counted


@pytest.mark.parametrize("mode", ["flow_grpo", "grpo_guard", "flow_dppo", "diffusion_nft", "awm"])
def test_one_step_layout_equals_the_window_layout(mode):
    """[B] calls, one per step as an engine makes them, against one [B, W] call."""
    _, data, call = make(mode)
    whole = call(slice(None))
    counted = int(data["mask"].sum())
    steps = sum(call(slice(None), k, global_count=counted).loss for k in range(4))
    close(steps, whole.loss)


@pytest.mark.parametrize("mode", known_losses())
def test_metrics_of_a_single_element(mode):
    _, data, call = make(mode)
    data["mask"][:] = True
    rows, columns = (slice(0, 2), 0) if mode == "dpo" else (slice(0, 1), slice(0, 1))
    out = call(rows, columns)
    assert torch.isfinite(out.loss)
    assert out.metrics["actor/count"] == 1
    for name, value in out.metrics.items():
        assert value.dtype == torch.float32, name
        assert value.ndim == 0, name
        assert torch.isfinite(value), name
        assert not value.requires_grad, name
    if "actor/ratio_std" in out.metrics:
        assert out.metrics["actor/ratio_std"] == 0


def test_metric_names():
    _, _, call = make("flow_grpo")
    assert set(call(slice(None)).metrics) == {
        "actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/ppo_kl", "actor/on_policy", "actor/pg_clipfrac",
        "actor/pg_clipfrac_higher", "actor/pg_clipfrac_lower", "actor/ratio_mean", "actor/ratio_std", "actor/ratio_min",
        "actor/ratio_max", "actor/distance_max", "actor/count",
    }  # fmt: skip


@pytest.mark.parametrize("mode", known_losses())
def test_nothing_counted_is_a_zero_with_a_graph(mode):
    leaf, data, call = make(mode)
    data["mask"][:] = False
    out = call(slice(None))
    (grad,) = torch.autograd.grad(out.loss, leaf)
    assert out.loss == 0
    assert (grad == 0).all()
    assert all(torch.isfinite(value) for value in out.metrics.values())


def test_masked_elements_may_hold_anything():
    log_probs = torch.tensor([0.1, float("nan")], requires_grad=True)
    data = {"old_log_probs": torch.tensor([0.0, float("inf")]), "advantages": torch.tensor([1.0, float("nan")])}
    data["mask"] = torch.tensor([True, False])
    output = {"log_probs": log_probs, "means": torch.zeros(2, 1, requires_grad=True), "std": torch.tensor([1.0, 0.0])}
    data["ref_means"] = torch.ones(2, 1)
    out = diffusion_loss(DiffusionLossConfig(clip_ratio=0.5, ref_kl_coef=1.0), output, data)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert log_probs.grad[1] == 0
    assert torch.isfinite(log_probs.grad).all()


def test_a_std_with_trailing_ones_does_not_broadcast_over_the_batch():
    """One public code turns [B, 1, 1, 1] * [B] into a [B, 1, 1, B] ratio, which is wrong once std differs between
    rows.
    """
    b = 3
    old, means = draw(b, 1, 2, 2, seed=1), draw(b, 1, 2, 2, seed=2)
    std = torch.tensor([0.3, 0.6, 1.2]).double()
    data = {"old_log_probs": torch.zeros(b).double(), "advantages": draw(b, seed=3), "old_means": old}
    data |= {"noise": draw(b, 1, 2, 2, seed=4), "sigma": torch.tensor([0.9, 0.6, 0.3]), "sigma_next": torch.zeros(b)}
    config = DiffusionLossConfig("grpo_guard", clip_ratio=0.01)
    values = [
        diffusion_loss(config, {"log_probs": torch.zeros(b).double(), "means": means, "std": s}, data).loss
        for s in (std, std.reshape(b, 1, 1, 1), std.reshape(b, 1))
    ]
    single = [
        diffusion_loss(
            config,
            {"log_probs": torch.zeros(1).double(), "means": means[i : i + 1], "std": std[i]},
            {key: value[i : i + 1] for key, value in data.items()},
        ).loss
        for i in range(b)
    ]
    for value in values:
        close(value, torch.stack(single).mean())


def test_latents_without_dims_are_their_own_mean():
    """[B] latents (D = 1 without a dim): averaging over no dims must not average the batch."""
    data = {"old_log_probs": torch.zeros(3), "advantages": torch.ones(3), "ref_means": torch.zeros(3)}
    output = {"log_probs": torch.zeros(3), "means": torch.tensor([1.0, 2.0, 3.0]), "std": torch.tensor([1.0, 2.0, 3.0])}
    out = diffusion_loss(DiffusionLossConfig(ref_kl_coef=1.0), output, data)
    close(out.metrics["actor/kl_loss"], torch.tensor(0.5))


def test_a_mapping_that_has_no_contains():
    """TensorDict offers get() but refuses `in`; wrapped plain values have a .data."""

    class NonTensorData:
        data = 8

    class Batch:
        def __init__(self, **values):
            self.values = values

        def get(self, key, default=None):
            return self.values.get(key, default)

        def __contains__(self, key):
            raise NotImplementedError

    data = Batch(old_log_probs=torch.zeros(4), advantages=torch.ones(4), global_count=NonTensorData())
    out = diffusion_loss(DiffusionLossConfig(), Batch(log_probs=torch.zeros(4)), data)
    close(out.loss, torch.tensor(-0.5))


def test_global_count_below_the_local_count_is_refused():
    data = {"old_log_probs": torch.zeros(4), "advantages": torch.ones(4), "global_count": 3}
    with pytest.raises(LossError, match=r"global_count.*=3 is smaller than the 4 elements"):
        diffusion_loss(DiffusionLossConfig(), {"log_probs": torch.zeros(4)}, data)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, forked):
    """What two gloo processes computed on an uneven split; one launch serves every test below."""
    folder = tmp_path_factory.mktemp("gloo")
    script = Path(__file__).parent / "gloo_worker.py"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [forked([script, rank, folder], env=env) for rank in range(2)]
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("how", ["reduced", "counted"])
@pytest.mark.parametrize("mode", known_losses())
def test_two_processes_equal_one(two_ranks, mode, how):
    """Rank 0 has 5 parts of the batch, rank 1 one: the mean of the ranks' gradients is the single process's
    gradient.
    """
    single = two_ranks[0][mode]["single"]
    first, second = (rank[mode][how] for rank in two_ranks)
    mean = [(a + b) / 2 for a, b in zip(first["grad"], second["grad"], strict=True)]
    assert mean == pytest.approx(single["grad"], rel=1e-9, abs=1e-12)
    assert (first["loss"] + second["loss"]) / 2 == pytest.approx(single["loss"], rel=1e-9)
    if how == "reduced":  # every rank reports what one process would
        for rank in (first, second):
            assert rank["loss"] == pytest.approx(single["loss"], rel=1e-9)
            assert rank["metrics"] == pytest.approx(single["metrics"], rel=1e-6, abs=1e-7)
    naive = [(a + b) / 2 for a, b in zip(*(rank[mode]["naive"]["grad"] for rank in two_ranks), strict=True)]
    assert naive != pytest.approx(single["grad"], rel=1e-3)  # the mean of local means is another number


def test_a_rank_that_counts_nothing_takes_part(two_ranks):
    for rank in two_ranks:
        assert rank["empty"]["loss"] == pytest.approx(two_ranks[0]["empty"]["single"], rel=1e-9)
    assert all(value == 0 for value in two_ranks[1]["empty"]["grad"])
