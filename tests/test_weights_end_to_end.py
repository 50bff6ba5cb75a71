"""All weights trained, or a LoRA that samples merged: both programs, every way for weights to travel, averages, and going on.

A receipt that is not the sender's ends a run, so a run that ends well had the same weights on both sides at every sync.
"""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from flowgrpo.cli import APP
from lora_sync import base_weights
from lora_sync.checksum import module_sum, value_sum
from omni_rollout.errors import SyncError
from ray_trainer.cli import run
from ray_trainer.commands.export import adapter_of
from ray_trainer.compose import compose
from ray_trainer.errors import TrainerError
from ray_trainer.workers import ActorRolloutRefWorker
from safetensors.torch import load_file

MICRO = [
    *("trainer.total_steps=2", "trainer.val_every=2", "trainer.save_every=1", "data.val_max_prompts=2"),
    *("data.prompts_per_step=2", "rollout.val_kwargs.n=2", "rollout.n=6", "actor.ppo_mini_batch_size=6"),
    "rollout.pipeline.num_inference_steps=4",
]
FULL = ["model.lora_rank=0", "model.policy_state_adapters=[default,reference]", "actor.optim.lr=1e-4"]
EMA = ["actor.fsdp_config.ema_decay=0.5", "trainer.val_weights=ema"]
WEIGHTS = 141  # of the tiny policy


def ran(done):
    assert done.code == 0, done.err[-4000:]
    assert done.left_over == []
    return done


def test_full_weights_with_an_average_are_exported_and_go_on(one_process, metric_rows, tmp_path, capsys):
    folder, again = tmp_path / "run", tmp_path / "again"
    arguments = ["recipe=tiny_flow_grpo", *MICRO, *FULL, *EMA]
    assert run(APP, [*arguments, f"trainer.run_dir={folder}"]) == 0
    assert "all weights, validated as its average" in capsys.readouterr().out
    table = metric_rows(folder)
    for row in table[1:]:
        assert row["sync/tensors_bound"] == WEIGHTS
        assert row["actor/rollout_log_prob_diff_max"] <= 1e-6
        assert row["actor/grad_norm"] > 0
        assert row["forwards/log_prob"] == 2.0  # the reference: a copy that is swapped in
    assert table[2]["actor/kl_loss"] > 0
    trained, average = (
        QwenImageTransformer2DModel.from_pretrained(folder / name) for name in ("transformer", "transformer_ema")
    )
    assert module_sum(trained) != module_sum(average)
    with pytest.raises(TrainerError, match="trained all weights, so it has no LoRA to convert"):
        adapter_of(folder)

    shutil.copytree(folder, again)
    (again / "checkpoints" / "latest.json").write_text(json.dumps({"step": 1}))
    assert run(APP, [*arguments, f"trainer.run_dir={again}", "trainer.on_existing=resume"]) == 0
    assert metric_rows(again) == table
    for name, before in (("transformer", trained), ("transformer_ema", average)):
        assert module_sum(QwenImageTransformer2DModel.from_pretrained(again / name)) == module_sum(before)


@pytest.mark.parametrize(
    "arguments",
    [
        # Every state that samples is sent when it draws next: old for training, the average for validation.
        ["recipe=tiny_nft", "model.lora.merge=true", *EMA, "rollout.num_replicas=2", "rollout.sync=ray"],
        ["recipe=tiny_dpo", *FULL, "rollout.num_replicas=2", "rollout.sync=nccl"],
    ],
    ids=["nft-merged-ray", "dpo-full-broadcast"],
)
def test_the_other_program_and_replicas_with_weights_of_their_own(hosted, metric_rows, tmp_path, arguments):
    folder = tmp_path / "run"
    ran(hosted("dpo-online", *arguments, *MICRO, f"trainer.run_dir={folder}"))
    rows = metric_rows(folder)[1:]
    assert [row["sync/tensors_bound"] for row in rows] == [WEIGHTS, WEIGHTS]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    if "model.lora.merge=true" in arguments:
        one, other = (load_file(folder / name / "pytorch_lora_weights.safetensors") for name in ("lora", "lora_ema"))
        assert one.keys() == other.keys()
        assert any(not torch.equal(one[key], other[key]) for key in one)


@pytest.mark.nightly
def test_sharded_weights_in_mixed_precision(start, metric_rows, tmp_path):
    """fp32 shards that compute in bf16, copies on the CPU, and replicas in bf16: every gather is made by both trainers."""
    folder = tmp_path / "run"
    arguments = [
        *("recipe=tiny_flow_grpo", *MICRO, *FULL, *EMA, "trainer.num_workers=2", "rollout.num_replicas=2"),
        *("actor.fsdp_config.mixed_precision.param_dtype=bf16", "actor.fsdp_config.state_offload=true"),
        *("rollout.dtype=bfloat16", "algorithm.old_log_probs=trainer"),
    ]
    done = ran(start("flowgrpo", *arguments, f"trainer.run_dir={folder}").wait(timeout=290))
    assert "one copy for each 2, policy states on the CPU" in done.out
    for row in metric_rows(folder)[1:]:
        assert row["sync/tensors_bound"] == WEIGHTS
        assert row["actor/grad_norm"] > 0
        assert row["actor/kl_loss"] > 0


@pytest.mark.nightly  # with every change, test_own_parts_end_to_end.py sends merged weights to an engine
@pytest.mark.parametrize("trained", [["model.lora.merge=true"], FULL], ids=["merged", "full"])
def test_all_weights_in_a_real_engine(start, metric_rows, tmp_path, trained):
    folder = tmp_path / "run"
    arguments = [*MICRO, *trained, "recipe=tiny_flow_grpo", "rollout.backend=vllm_omni"]
    ran(start("flowgrpo", *arguments, f"trainer.run_dir={folder}").wait(timeout=290))
    for row in metric_rows(folder)[1:]:
        assert row["sync/tensors_bound"] == WEIGHTS
        assert row["actor/rollout_log_prob_diff_max"] <= 1e-5
        assert row["actor/grad_norm"] > 0


def worker_of(*keys):
    recipe = Path(str(files("flowgrpo"))) / "recipes" / "tiny_flow_grpo.yaml"
    worker = ActorRolloutRefWorker(compose("flowgrpo", recipe, [*keys]))
    worker.init_model()
    return worker


def test_the_trainer_samples_with_its_adapter_folded_in():
    worker = worker_of("model.lora.merge=true")
    with torch.no_grad():
        for name, parameter in worker.engine.trainable.items():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    module = worker.engine.module
    base = module_sum(module)
    assert worker.update_weights(1, "merged") == {"sync/version": 1.0, "sync/tensors_bound": float(WEIGHTS)}
    merged = value_sum(value for _, value in base_weights(module, "default"))
    with worker.backend._weights.using("default"):
        assert module_sum(module) == merged != base
    assert module_sum(module) == base


def test_policy_states_on_the_cpu_and_what_samples_are_the_trainers():
    worker = worker_of(*FULL, "actor.fsdp_config.state_offload=true")
    assert worker.update_weights(1, "full")["sync/tensors_bound"] == WEIGHTS
    with torch.no_grad():
        next(iter(worker.engine.trainable.values())).add_(1)
    now = module_sum(worker.engine.module)
    with worker.engine.use_adapter("reference"):
        assert module_sum(worker.engine.module) != now
    assert module_sum(worker.engine.module) == now
    stale = [(name, value.clone() + 1) for name, value in base_weights(worker.engine.module)]
    with pytest.raises(SyncError, match="does not hold what was sent"):
        worker.backend.hold_weights(stale, 2)
