"""Every key of a config changes something, or is listed as presentation. A new field without a row here fails.

`SHOWN` are keys whose effect is computed here: two values, two results. `READERS` names for each of the others the function that
acts on it, and the test looks into that function's source for the read: a key whose reader goes is found.
"""

import ast
import importlib.util
from pathlib import Path

import pytest
from diffusion_losses.config import DiffusionLossConfig
from fsdp_diffusers_engine.optim import lr_factor
from ray_trainer.compose import compose
from ray_trainer.config import OldPolicyConfig
from ray_trainer.keys import known_keys
from ray_trainer.prompts import Prompt
from ray_trainer.rollouts import requests_of
from ray_trainer.values import is_section

PRESENTATION = {"app", "recipe"}
"""Names that are written into config.yaml and shown; `app` of another program is refused."""

ENGINE, WORKER = "fsdp_diffusers_engine.engine:DiffusersFSDPEngine", "fsdp_diffusers_engine.worker:TrainingWorker"
TRAINER = "ray_trainer.trainer:RayDiffusionTrainer"
READERS = {
    "fsdp_diffusers_engine.loading:build": "model.path model.transformer_subfolder model.transformer_config",
    "fsdp_diffusers_engine.engine:_spec_of": "model.architecture",
    f"{ENGINE}._configure": "model.attn_backend",
    f"{ENGINE}._recomputed": "model.recompute_blocks",
    "fsdp_diffusers_engine.adapters:inject_adapters": "model.lora_rank model.lora_alpha model.lora_init_weights",
    "fsdp_diffusers_engine.adapters:draw_initial": "model.lora_seed",
    "fsdp_diffusers_engine.targets:resolve_targets": "model.target_modules model.exclude_modules",
    f"{ENGINE}.initialize": "model.enable_gradient_checkpointing model.lora_adapter_path model.lora_dtype "
    "actor.fsdp_config.model_dtype actor.fsdp_config.param_offload actor.fsdp_config.optimizer_offload "
    "actor.fsdp_config.use_torch_compile actor.fsdp_config.full_determinism actor.fsdp_config.state_offload",
    f"{ENGINE}._average": "actor.fsdp_config.ema_decay actor.fsdp_config.ema_every actor.fsdp_config.ema_warmup",
    "ray_trainer.config:RunConfig.sync_mode": "model.lora.merge",
    "ray_trainer.weight_sync:WeightSync": "rollout.sync",
    f"{ENGINE}._state_names": "model.policy_state_adapters",
    "fsdp_diffusers_engine.sharding:blocks_of": "model.fsdp_layer_prefixes",
    f"{WORKER}.train_mini_batch": "actor.ppo_epochs",
    "fsdp_diffusers_engine.batch:mini_batches": "actor.ppo_mini_batch_size actor.shuffle actor.data_loader_seed",
    f"{WORKER}._sized": "actor.ppo_micro_batch_size_per_gpu",
    f"{WORKER}.compute_log_prob": "actor.log_prob_micro_batch_size_per_gpu",
    "diffusion_losses.policy_gradient:clipped_loss": "actor.diffusion_loss.clip_ratio",
    "diffusion_losses.policy_gradient:Steps": "actor.diffusion_loss.adv_clip_max",
    "diffusion_losses.policy_gradient:_finish": "actor.diffusion_loss.ref_kl_coef",
    "diffusion_losses.policy_gradient:guard_loss": "actor.diffusion_loss.guard_clip",
    "diffusion_losses.policy_gradient:divergence_loss": "actor.diffusion_loss.kl_mask_threshold "
    "actor.diffusion_loss.add_kl_coefficient actor.diffusion_loss.kl_mask_boundary "
    "actor.diffusion_loss.dppo_clamp_advantages",
    "diffusion_losses.forward_process:nft_loss": "actor.diffusion_loss.mix_beta actor.diffusion_loss.adaptive_weight_min "
    "actor.diffusion_loss.adv_mode actor.diffusion_loss.nft_form actor.diffusion_loss.nft_negative",
    "diffusion_losses.preference:dpo_loss": "actor.diffusion_loss.dpo_beta actor.diffusion_loss.dpo_loss",
    "diffusion_losses.forward_process:awm_loss": "actor.diffusion_loss.awm_weighting actor.diffusion_loss.awm_power "
    "actor.diffusion_loss.awm_advantage actor.diffusion_loss.awm_ratio",
    "diffusion_losses.forward_process:_finish": "actor.diffusion_loss.lag_kl_coef",
    "diffusion_losses.config:DiffusionLossConfig": "actor.diffusion_loss.options",
    "fsdp_diffusers_engine.forward_process:_levels": "actor.forward_process.levels actor.forward_process.num_levels "
    "actor.forward_process.schedule_fraction actor.forward_process.schedule_choice "
    "actor.forward_process.logit_mean actor.forward_process.logit_std "
    "actor.forward_process.shift",
    "fsdp_diffusers_engine.forward_process:ForwardProcess": "actor.forward_process.reference_state",
    "fsdp_diffusers_engine.optim:build_optimizer": "actor.optim.lr actor.optim.betas actor.optim.eps actor.optim.weight_decay",
    f"{ENGINE}.optimizer_step": "actor.optim.clip_grad",
    f"{ENGINE}.save_checkpoint": "actor.checkpoint.save_contents",
    "fsdp_diffusers_engine.sharding:make_layout": "actor.fsdp_config.ulysses_sequence_parallel_size",
    "fsdp_diffusers_engine": "actor.fsdp_config.device actor.fsdp_config.mixed_precision.param_dtype "
    "actor.fsdp_config.sharding actor.fsdp_config.fsdp_size "
    "actor.fsdp_config.reshard_after_forward actor.fsdp_config.forward_prefetch actor.fsdp_config.offload_policy",
    f"{ENGINE}.velocity": "actor.fsdp_config.activation_offload",
    f"{WORKER}._join": "actor.fsdp_config.timeout_s",
    "fsdp_diffusers_engine.perf:mfu": "actor.fsdp_config.peak_tflops",
    "omni_rollout.fleet:Fleet": "rollout.backend rollout.num_replicas rollout.placement rollout.max_batch_size "
    "rollout.device rollout.router.start_timeout_s",
    f"{TRAINER}.generate_sequence": "rollout.n",
    f"{TRAINER}._validate": "rollout.val_kwargs.n",
    "ray_trainer.scoring": "reward.name reward.options reward.num_workers reward.num_cpus reward.concurrency "
    "reward.batch_size reward.policy reward.failure_value reward.max_retries reward.timeout_s reward.frame_timeout_s "
    "reward.combine reward.num_gpus reward.share_trainers_gpus "
    "algorithm.advantage_std algorithm.advantage_ddof algorithm.advantage_eps",
    "ray_trainer.config:RewardConfig": "reward.several",
    "ray_trainer.workers:ActorRolloutRefWorker": "rollout.dtype rollout.fp8 ray.worker_threads algorithm.old_policy.update_every",
    "omni_rollout.agent_loop:DiffusionAgentLoopWorker": "rollout.agent.default_agent_loop",
    "omni_rollout.edit_loop:DiffusionJudgeEditAgentLoop": "rollout.agent.num_turns",
    "omni_rollout.router:Router": "rollout.router.request_timeout_s rollout.router.max_retries rollout.router.restart",
    "omni_rollout.vllm_omni.launch:start_engine": "rollout.vllm_omni.enforce_eager rollout.vllm_omni.max_num_seqs "
    "rollout.vllm_omni.request_batch_max_wait_ms "
    "rollout.vllm_omni.step_execution rollout.vllm_omni.enable_sleep_mode rollout.vllm_omni.rollout_attn_backend "
    "rollout.vllm_omni.engine_kwargs",
    "omni_rollout.vllm_omni.server:vLLMOmniHttpServer": "rollout.vllm_omni.openai_port",
    "ray_trainer.prompts:counts": "data.prompts_per_step",
    f"{TRAINER}.__init__": "data.val_max_prompts algorithm.options",
    "ray_trainer.algorithms:find_algorithm": "trainer.algorithm",
    "ray_trainer.prompts": "data.train_file data.val_file data.sources",
    TRAINER: "algorithm.flat_groups",
    "flowgrpo.trainer": "algorithm.old_log_probs algorithm.step_fraction trainer.seed",
    "dpo_online.cli:_trainer": "data.offline",
    "dpo_online.trainer": "algorithm.pair_mode algorithm.pair_ties algorithm.pair_margin",
    f"{TRAINER}._fit": "trainer.trackers trainer.total_steps trainer.val_before_train",
    f"{TRAINER}._late": "trainer.max_hours",
    "ray_trainer.ahead:Ahead": "trainer.staleness",
    "flowgrpo.trainer:RayFlowGRPOTrainer.compute_old_log_prob": "algorithm.rollout_correction.mode "
    "algorithm.rollout_correction.level algorithm.rollout_correction.cap algorithm.rollout_correction.reject",
    f"{TRAINER}._step": "trainer.val_every trainer.save_every",
    f"{TRAINER}._save": "trainer.keep_checkpoints",
    "ray_trainer.watchdog:Watchdog": "".join(
        f"trainer.watchdog.{rule}.{key} "
        for rule in ("flat_groups", "ratio", "kl", "grad_norm", "saturation", "sharpness", "diversity", "hacking")
        for key in ("bound", "steps", "action")
    ),
    "ray_trainer.watchdog:_hacking": "trainer.watchdog.held_out",
    f"{TRAINER}._open": "trainer.run_dir trainer.on_existing",
    "ray_trainer.resume:check_resume": "trainer.allow_config_change",
    "ray_trainer.group:WorkerGroup": "trainer.num_workers",
    "ray_trainer.placement:_tensor_sizes": "rollout.vllm_omni.tensor_model_parallel_size",
    "ray_trainer.placement:foreseen": "ray.gpu_memory_gb",
    "ray_trainer.cluster": "ray.address ray.num_cpus ray.object_store_mb",
}


def _loss(config):
    loss = config.actor.diffusion_loss
    return loss.family, loss.resolved_kl_kind, loss.resolved_step_weighting


def _asked(config, validate):
    rows = [("u", Prompt("u", "x"))]
    return [requests_of(config, rows, 1, step=step, validate=validate) for step in range(6)]


def _sampled(config):
    return _asked(config, validate=False)


def _validated(config):
    return _asked(config, validate=True)


def _rate(config):
    return [lr_factor(config.actor.optim, step) for step in range(12)]


def _decay(config):
    return [config.algorithm.old_policy.decay(n) for n in (0, 5, 500)]


_PIPELINE = {"height": 32, "width": 32, "num_inference_steps": 8, "true_cfg_scale": 2.0, "max_sequence_length": 9}
_PIPELINE |= {"guidance_scale": 3.5, "num_frames": 5}
_ALGO = {"noise_level": 0.2, "kind": "flow_cps", "sde_window_size": 1, "sde_window_range": "[1, 4]", "solver": "dpm2"}
_ALGO |= {
    "sample_strategy": "fixed",
    "iters_per_group": 4,
    "sde_window_seed": 9,
    "shared_noise": "true",
    "tail_ratio": 0.5,
}
_WINDOW = ["kind=flow_sde", "noise_level=0.7", "sde_window_size=2", "sde_window_range=[0, 5]"]
SHOWN = {}
"""Key -> (another value, what is computed, what both configs have besides)."""
for _place, _shown in (("rollout", _sampled), ("rollout.val_kwargs", _validated)):
    SHOWN |= {f"{_place}.pipeline.{name}": (value, _shown, []) for name, value in _PIPELINE.items()}
    SHOWN |= {
        f"{_place}.algo.{name}": (v, _shown, [f"{_place}.algo.{w}" for w in _WINDOW]) for name, v in _ALGO.items()
    }
SHOWN |= {
    "rollout.rollout_adapter": ("old", _sampled, []),
    "rollout.seed": (5, _sampled, []),
    "trainer.val_weights": ("ema", _validated, []),
    "rollout.val_kwargs.seed": (5, _validated, []),
    "rollout.pipeline.negative_prompt": ("blurred", _sampled, ["rollout.pipeline.true_cfg_scale=2"]),
    "rollout.val_kwargs.pipeline.negative_prompt": (
        "blurred",
        _validated,
        ["rollout.val_kwargs.pipeline.true_cfg_scale=2"],
    ),
    "actor.diffusion_loss.loss_mode": ("diffusion_nft", _loss, []),
    "actor.diffusion_loss.kl_kind": ("paper", _loss, []),
    "actor.diffusion_loss.step_weighting": ("inverse_step", _loss, []),
    "actor.optim.lr_scheduler_type": ("cosine", _rate, ["actor.optim.total_training_steps=10"]),
    "actor.optim.lr_warmup_steps": (3, _rate, []),
    "actor.optim.total_training_steps": (5, _rate, []),
    "actor.optim.min_lr_ratio": (0.5, _rate, ["actor.optim.total_training_steps=10"]),
}
_RISE = ["algorithm.old_policy.decay_rate=0.01", "algorithm.old_policy.decay_max=0.9"]
SHOWN |= {
    "algorithm.old_policy.decay_start": (4, _decay, _RISE),
    "algorithm.old_policy.decay_rate": (0.02, _decay, _RISE),
    "algorithm.old_policy.decay_max": (0.5, _decay, _RISE),
}


def test_every_key_has_a_row_and_every_row_a_key():
    keys = {key for key, kind in known_keys().items() if is_section(kind) is None}
    read = [key for text in READERS.values() for key in text.split()]
    rows = [*read, *SHOWN, *PRESENTATION]
    assert sorted(rows) == sorted(keys)


@pytest.mark.parametrize("key", SHOWN)
def test_another_value_gives_another_result(key, tmp_path):
    value, compute, besides = SHOWN[key]
    recipe = tmp_path / "r.yaml"
    recipe.write_text("base: builtin:tiny\n")
    make = lambda *more: compute(compose("flowgrpo", recipe, [*besides, *more]))  # noqa: E731
    assert make() == make()
    assert make() != make(f"{key}={value}")


def _source(place):
    """The syntax trees of `module:Class.function`, a module, or all modules of a package."""
    module, _, name = place.partition(":")
    origin = Path(importlib.util.find_spec(module).origin)
    files = sorted(origin.parent.glob("*.py")) if origin.name == "__init__.py" else [origin]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files if file.name != "config.py" or name]
    for part in name.split(".") if name else ():
        trees = [
            node
            for tree in trees
            for node in ast.iter_child_nodes(tree)
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == part
        ]
    return trees


@pytest.mark.parametrize("place", READERS)
def test_the_reader_of_a_key_reads_it(place):
    trees = _source(place)
    assert trees, f"{place} is gone: who reads {READERS[place]} now?"
    read = {
        n.attr for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
    }
    for key in READERS[place].split():
        assert key.split(".")[-1] in read, f"{key} is not read in {place}"


def test_the_defaults_do_not_hide_an_effect():
    assert OldPolicyConfig().decay(100) == 0
    assert DiffusionLossConfig().family == "policy_gradient"


@pytest.mark.parametrize(("validate", "key"), [(False, "rollout.pipeline"), (True, "rollout.val_kwargs.pipeline")])
def test_each_kind_of_sampling_has_its_own_negative_prompt(validate, key, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("base: builtin:tiny\n")
    overrides = [f"{key}.true_cfg_scale=2", f"{key}.negative_prompt=blurred"]
    config = compose("flowgrpo", recipe, overrides)
    rows = [("a", Prompt("a", "x")), ("b", Prompt("b", "y", "its own"))]
    requests = requests_of(config, rows, 1, step=0, validate=validate)
    assert [request.negative_prompt for request in requests] == ["blurred", "its own"]
