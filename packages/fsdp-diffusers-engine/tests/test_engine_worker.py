"""The training worker: fine calls, mini-batches, states; and metrics and utilisation."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusion_losses import DiffusionLossConfig
from fsdp_diffusers_engine import (
    DiffusionModelConfig,
    EngineError,
    EngineStateError,
    FSDPDiffusionActorConfig,
    TrainingWorker,
    TrainingWorkerConfig,
)
from fsdp_diffusers_engine.batch import mini_batches, settings_of
from sde_samplers.settings import SamplerSettings


def test_fine_calls(make_worker: Any, make_batch: Any, tmp_path: Path) -> None:
    worker, data = make_worker(), make_batch(count=4)
    first = worker.save_weights(version=1)
    data["old_log_probs"] = worker.compute_log_prob(data)["log_probs"]
    metrics = worker.forward_backward(data)
    assert metrics["actor/count"] == 8.0
    assert metrics["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert worker.optim_step({"lr": 0.0})["actor/lr"] == 0.0
    assert worker.save_weights(version=2).hash == first.hash
    worker.forward_backward(data, "mix_grpo")
    assert worker.optim_step()["actor/grad_norm"] > 0
    second = worker.save_weights()
    assert (second.version, second.hash != first.hash) == (2, True)
    assert worker.save_weights("old", version=3).hash == first.hash
    worker.update_old_policy()
    assert worker.save_weights("old", version=4).hash == second.hash
    path = worker.save_state(str(tmp_path / "state"), global_step=7)
    worker.reset()
    assert worker.save_weights(version=5).hash == first.hash
    assert worker.load_state(path) == 7
    assert worker.save_weights(version=6).hash == second.hash
    reference = worker.compute_log_prob(data, adapter="reference")["log_probs"]
    assert torch.equal(reference, data["old_log_probs"])  # the first policy is the base
    with pytest.raises(EngineError, match="lr"):
        worker.optim_step({"learning_rate": 1.0})


def test_mini_batches_epochs_and_shuffling(make_worker: Any, make_batch: Any) -> None:
    data = make_batch(count=5)
    data.set_non_tensor("global_step", 3)
    data["old_log_probs"] = torch.zeros(5, 2)

    def trained(**actor: Any) -> tuple[dict[str, float], str, int]:
        worker = make_worker(ppo_mini_batch_size=2, **actor)
        metrics = worker.train_mini_batch(data)["metrics"]
        return metrics, worker.save_weights(version=1).hash, worker.engine.optimizer_steps

    metrics, plain, steps = trained()
    assert steps == 3
    assert metrics["actor/count"] == 10.0
    assert metrics["perf/mfu"] > 0.0
    assert trained(ppo_epochs=2)[2] == 6
    shuffled = trained(shuffle=True)[1]
    assert shuffled != plain
    assert trained(shuffle=True)[1] == shuffled
    assert trained(shuffle=True, data_loader_seed=1)[1] != shuffled
    with pytest.raises(EngineError, match="mini-batches"):
        make_worker(DiffusionLossConfig(loss_mode="dpo")).train_mini_batch(make_batch(count=3))


def test_pairs_stay_together_under_shuffling(make_worker: Any, make_batch: Any) -> None:
    worker = make_worker(DiffusionLossConfig(loss_mode="dpo", dpo_beta=10.0), shuffle=True)
    order = torch.cat(mini_batches(worker.config.actor, 8, step=1))
    assert sorted(order.tolist()) == list(range(8))
    assert all(b == a + 1 and a % 2 == 0 for a, b in order.view(-1, 2).tolist())
    metrics = worker.train_mini_batch(make_batch(count=8))["metrics"]
    assert metrics["actor/count"] == 8  # pairs x two noise levels
    assert worker.engine.optimizer_steps == 2


def test_worker_refuses_wrong_use(tiny_qwen: Path, make_batch: Any) -> None:
    actor = FSDPDiffusionActorConfig(model_config=DiffusionModelConfig(path=str(tiny_qwen)))
    with pytest.raises(EngineStateError, match="reset"):
        TrainingWorker(TrainingWorkerConfig(actor=actor)).forward_backward(make_batch())
    with pytest.raises(EngineError, match="init_method"):
        TrainingWorker(TrainingWorkerConfig(actor=actor, world_size=2))


def test_metrics_are_those_of_the_whole_batch_whatever_the_micro_batches(make_worker: Any, make_batch: Any) -> None:
    """Micro-batches of one element have no spread of their own, and yet the batch has one."""
    data = make_batch(count=10)
    data["rollout_log_probs"] = data["old_log_probs"] = 0.01 * torch.randn(10, 2)
    data["mask"] = torch.arange(10) != 3
    found = {}
    for size in (1, 3, 4, 10):
        worker = make_worker(ppo_micro_batch_size_per_gpu=size, ppo_mini_batch_size=10)
        found[size] = worker.train_mini_batch(data)["metrics"]
    whole = {name: value for name, value in found[10].items() if not name.startswith(("time/", "perf/"))}
    assert whole["actor/ratio_std"] > 0
    assert whole["actor/noise_max"] == whole["actor/distance_max"] > 0
    for size in (1, 3, 4):
        assert {name: found[size][name] for name in whole} == pytest.approx(whole, rel=1e-5, abs=1e-7), size


OWN = """
import torch
import torch.distributed as dist
from diffusion_losses import ElementLoss, LossSpec

def own(config, model_output, data):
    value = next(iter(model_output.values()))
    objective = value.reshape(*data["own"].shape, -1).mean(-1) * data["own"]
    return ElementLoss(objective, torch.ones_like(objective, dtype=torch.bool), {"actor/own": data["own"]})

STEPS = LossSpec(own, "policy_gradient", reads=("own",))
LEVELS = LossSpec("own_loss_of_a_worker_test:own", "forward_process", reads=("own",))
"""


@pytest.mark.parametrize(("name", "shape"), [("STEPS", (10,)), ("STEPS", (10, 2)), ("LEVELS", (10,))])
def test_a_loss_reads_a_tensor_of_its_own_wherever_the_batch_is_cut(
    make_worker: Any,
    make_batch: Any,
    name: str,
    shape: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "own_loss_of_a_worker_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    data = make_batch(count=10)
    data["old_log_probs"] = torch.zeros(10, 2)
    config = DiffusionLossConfig(f"own_loss_of_a_worker_test:{name}")
    with pytest.raises(EngineError, match="'own'"):
        make_worker(config).train_mini_batch(data)
    data["own"] = torch.rand(shape)
    metrics = make_worker(config, shuffle=True).train_mini_batch(data)["metrics"]
    assert metrics["actor/own"] == pytest.approx(float(data["own"].mean()), rel=1e-5)


def test_left_out_samples_make_smaller_mini_batches_not_fewer(make_worker: Any, make_batch: Any) -> None:
    data = make_batch(count=3)
    data["old_log_probs"] = torch.zeros(3, 2)
    for planned, steps in ((2, 2), (5, 3)):
        data.set_non_tensor("mini_batches", planned)
        worker = make_worker(ppo_mini_batch_size=4)
        worker.train_mini_batch(data)
        assert worker.engine.optimizer_steps == steps


def test_samples_of_one_batch_may_begin_at_different_steps_and_be_drawn_no_other_way() -> None:
    drawn = SamplerSettings(32, 32, num_inference_steps=6, kind="flow_sde", noise_level=0.7, window=(0, 1))
    edited = drawn.replace(window=(3, 4), start_step=3)
    for first, second in ((drawn, edited), (edited, drawn)):
        assert settings_of({"settings": [first, second]}) == first
    with pytest.raises(EngineError, match="differ within the batch, in noise_level"):
        settings_of({"settings": [drawn, edited.replace(noise_level=0.5)]})


def test_counted_operations_follow_the_formula(make_engine: Any, make_batch: Any) -> None:
    from fsdp_diffusers_engine.forwards import Rows
    from fsdp_diffusers_engine.perf import mfu, peak_flops, training_flops
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    engine = make_engine(model={"enable_gradient_checkpointing": False}, engine={"peak_tflops": 2.0})
    settings = make_batch()["settings"]
    math = sdpa_kernel(SDPBackend.MATH)  # the counter does not know the CPU's fused attention
    with FlopCounterMode(display=False) as counter, torch.no_grad(), engine.disable_adapter(), math:
        data = make_batch(count=3)
        data["prompt_embeds_mask"] = torch.ones(3, 7, dtype=torch.bool)
        data.set_non_tensor("micro_batch_size", 3)
        engine.forward_backward_batch(data, None, forward_only=True)
    forward = counter.get_total_flops()
    expected = training_flops(engine, Rows(3 * 2), settings, 7)  # a LoRA: forward and as much again for the activations
    assert expected == pytest.approx(2 * forward, rel=0.01)
    assert training_flops(engine, Rows(3 * 2, 3 * 2), settings, 7) == pytest.approx(3 * forward, rel=0.01)
    assert mfu(engine, 1e12, 1.0) == pytest.approx(0.5)
    assert peak_flops(torch.device("cpu"), torch.float32) > 1e8


@pytest.mark.parametrize(("address", "shown"), [("10.1.2.3", "10.1.2.3"), ("fd00::1", "[fd00::1]")])
def test_ranks_meet_at_the_address_that_ray_knows(address, shown, monkeypatch):
    ray = pytest.importorskip("ray")
    from fsdp_diffusers_engine.worker import meeting_point

    def unknown(*_):
        raise socket.gaierror("a host whose name resolves to nothing")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    assert re.fullmatch(rf"tcp://{re.escape(shown)}:[0-9]+", meeting_point())


def test_nobody_takes_the_meeting_point_before_the_ranks_come(monkeypatch):
    ray = pytest.importorskip("ray")
    from fsdp_diffusers_engine.worker import meeting_point

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    place = meeting_point()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(place.rpartition(":")[2])))
    dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    assert dist.get_world_size() == 1
    dist.destroy_process_group()
