"""The hybrid worker: one engine that trains, one backend that samples, the same weights; and the group of them.

`ActorRolloutRefWorker` is a plain class, so that it can be used without Ray; `WorkerGroup` makes Ray actors of it, one per
training process, and speaks to all of them at once.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from fsdp_diffusers_engine import DiffusionLoss, PPODiffusersFSDPEngine, gather_outputs
from omni_rollout.types import DiffusionOutput, GenerationRequest
from tensordict import TensorDict

from ray_trainer.cluster import available_cpus
from ray_trainer.config import DiffusionLossConfig, RunConfig
from ray_trainer.minibatch import mini_batches, split_rows
from ray_trainer.prompts import resolve

if TYPE_CHECKING:
    from lora_sync import LoRAPayload


class ActorRolloutRefWorker:
    """Trains, samples and scores a reference with one set of weights.

    Args:
        config: of the run.
        role: what this worker does; "actor_rollout_ref" is the hybrid one.
        engine: "ppo" or "forward_process".
        rank, world_size: of the training processes.
    """

    def __init__(
        self,
        config: RunConfig,
        role: str = "actor_rollout_ref",
        *,
        engine: str = "ppo",
        rank: int = 0,
        world_size: int = 1,
    ):
        self.config, self.role, self.rank, self.world_size = config, role, rank, world_size
        torch.set_num_threads(config.ray.worker_threads or max(available_cpus() // world_size, 1))
        config.model.path = resolve("models", config.model.path)
        actor = config.actor
        kind = {"ppo": PPODiffusersFSDPEngine}[engine]
        self.engine = kind(config.model, actor.fsdp_config, actor.optim, actor.checkpoint)
        self.engine.initialize()
        self.backend = self._make_backend()
        self.version = -1

    def _make_backend(self) -> Any:
        from omni_rollout.diffusers_backend import DiffusersBackend

        spec, path, rollout = self.engine.spec, self.config.model.path, self.config.rollout
        dtype = getattr(torch, rollout.dtype)
        return DiffusersBackend(
            spec,
            self.engine.module,
            spec.load_encoder(path, dtype, self.engine.device),
            spec.load_vae(path, dtype, self.engine.device),
            spec.load_scheduler(path),
            max_batch_size=rollout.max_batch_size,
            device=self.engine.device,
            adapter_ctx=self.engine.use_adapter,
        )

    # ---- rollout ---------------------------------------------------------------------------------------------------------

    def generate_sequences(self, requests: Sequence[GenerationRequest]) -> list[DiffusionOutput]:
        """Draw samples; called by the replica with one chunk of requests."""
        with self.engine.eval_mode():
            return self.backend.generate(requests)

    def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Cancel requests in flight."""
        return self.backend.abort(request_ids)

    # ---- policy ----------------------------------------------------------------------------------------------------------

    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        """`log_probs` [B, W] and `means` [B, W, …] of the stored transitions under the present weights."""
        with self.engine.eval_mode():
            return self._score(data)

    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict:
        """The same under the base policy: the same weights with the adapter off."""
        with self.engine.eval_mode(), self.engine.disable_adapter():
            return self._score(data)

    def _score(self, data: TensorDict) -> TensorDict:
        data = self._with_settings(data)
        outputs = gather_outputs(self.engine.forward_backward_batch(data, None, forward_only=True))
        return TensorDict({key: outputs[key].cpu() for key in ("log_probs", "means")}, batch_size=data.batch_size[:1])

    def update_actor(self, data: TensorDict, step: int) -> dict[str, float]:
        """The optimizer steps of training step `step` on this process's rows; metrics averaged over micro-batches."""
        actor, rows = self.config.actor, data.batch_size[0]
        data = self._with_settings(data)
        window = data["advantages"].shape[1] if "advantages" in data.keys() else 1  # noqa: SIM118
        batches = mini_batches(
            rows,
            actor.ppo_mini_batch_size // self.world_size,
            epochs=actor.ppo_epochs,
            shuffle=actor.shuffle,
            seed=actor.data_loader_seed * 1_000_003 + step,
        )
        log = MetricLog()
        with self.engine.train_mode():
            for number, order in enumerate(batches):
                mini = data[order]
                mini.set_non_tensor("global_count", len(order) * self.world_size * window)
                self.engine.optimizer_zero_grad()
                # On the first update of a step the weights are still those that sampled.
                loss = UpdateLoss(actor.diffusion_loss, fresh=number == 0)
                for metrics in self.engine.forward_backward_batch(mini, loss):
                    log.add(metrics)
                log.add({"actor/grad_norm": self.engine.optimizer_step(), "actor/lr": self.engine.lr_scheduler_step()})
        return log.result()

    def _with_settings(self, data: TensorDict) -> TensorDict:
        """The batch with the sampler's settings, which the engine's forward repeats."""
        rollout, actor = self.config.rollout, self.config.actor
        data = data.copy()
        for key, value in asdict(rollout.pipeline).items():
            if value is not None:
                data.set_non_tensor(key, value)
        data.set_non_tensor("kind", rollout.algo.kind)
        data.set_non_tensor("noise_level", rollout.algo.noise_level)
        data.set_non_tensor("micro_batch_size", actor.ppo_micro_batch_size_per_gpu)
        return data

    # ---- sync, checkpoints, export ---------------------------------------------------------------------------------------

    def update_weights(self, global_steps: int, mode: str = "auto") -> dict[str, float]:
        """Trainer to sampler. The receipt must say: everything sent is bound, and the version is new.

        With shared weights there is nothing to move; the receipt still proves that the sampler's module holds the adapter
        that the trainer has just extracted, tensor by tensor.
        """
        from lora_sync import verify

        payload = self._payload(global_steps)
        receipt = self.backend.update_lora(payload)
        verify(payload, receipt, previous_version=self.version if self.version >= 0 else None)
        self.version = payload.version
        return {"sync/version": float(payload.version), "sync/tensors_bound": float(receipt.tensors_bound)}

    def _payload(self, version: int) -> LoRAPayload:
        from lora_sync import extract_lora

        return extract_lora(self.engine.module, "default", version=version)

    def save_checkpoint(self, path: str, step: int) -> None:
        """Everything that decides the next step, as the engine sees it."""
        self.engine.save_checkpoint(path, global_step=step)

    def load_checkpoint(self, path: str) -> None:
        """The counterpart of `save_checkpoint`."""
        self.engine.load_checkpoint(path)

    def export_lora(self, folder: str) -> str:
        """Write the adapter so that diffusers' `load_lora_weights(folder)` takes it; it is loaded again and compared."""
        from lora_sync import export

        return str(export(self._payload(max(self.version, 0)), "diffusers", folder, architecture=self.engine.spec.name))

    def memory_gb(self) -> float:
        """Peak resident memory of this process, in GB (1e9 bytes); on CUDA the peak of allocated device memory."""
        if self.engine.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.engine.device) / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class UpdateLoss(DiffusionLoss):
    """The configured loss; when `fresh`, it also measures how far rollout and trainer are apart.

    While the weights are those that sampled, every difference of log-probs is noise of the two code paths, not policy.
    """

    def __init__(self, config: DiffusionLossConfig, *, fresh: bool):
        super().__init__(config)
        self.fresh = fresh

    def __call__(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        """The loss of one micro-batch."""
        result = super().__call__(model_output, data, dp_group)
        if self.fresh and "rollout_log_probs" in data:
            gap = (model_output["log_probs"].detach() - data["rollout_log_probs"]).abs().max()
            result.metrics["actor/rollout_log_prob_diff_max"] = gap
        return result


class MetricLog:
    """Combines the metrics of many micro-batches: extremes stay extremes, everything else is averaged."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, metrics: Any) -> None:
        """Numbers or 0-dim tensors by name."""
        for name, value in metrics.items():
            self.values.setdefault(name, []).append(float(value))

    def result(self) -> dict[str, float]:
        """One number per name."""
        combine = {"min": min, "max": max}
        return {name: combine.get(name.rsplit("_", 1)[-1], fmean)(values) for name, values in self.values.items()}


class WorkerGroup:
    """All training processes of a run, as one.

    Args:
        config: of the run.
        engine: "ppo" or "forward_process".
    """

    def __init__(self, config: RunConfig, engine: str):
        import ray

        self._ray, self.size = ray, config.trainer.num_workers
        gpus = ray.cluster_resources().get("GPU", 0)
        device = config.actor.fsdp_config.device
        use_gpu = device != "cpu" and gpus >= self.size
        actor = ray.remote(ActorRolloutRefWorker)
        options = {"num_gpus": 1 if use_gpu else 0, "num_cpus": 0.5}
        self.actors: list[Any] = [
            actor.options(**options).remote(config, engine=engine, rank=rank, world_size=self.size)
            for rank in range(self.size)
        ]
        ray.get([a.memory_gb.remote() for a in self.actors])  # raises what went wrong while they started

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on every worker; their answers by rank."""
        return self._ray.get([getattr(a, method).remote(*args, **kwargs) for a in self.actors])

    def run_batch(self, method: str, batch: TensorDict) -> TensorDict:
        """Split the rows over the workers, call, and put the answers together again."""
        parts = split_rows(batch, self.size)
        answers = self._ray.get([getattr(a, method).remote(part) for a, part in zip(self.actors, parts, strict=True)])
        return TensorDict.cat(answers)

    def update_actor(self, batch: TensorDict, step: int) -> dict[str, float]:
        """Optimizer steps on every worker with its share of the rows."""
        parts = split_rows(batch, self.size)
        logs = self._ray.get([a.update_actor.remote(part, step) for a, part in zip(self.actors, parts, strict=True)])
        merged = MetricLog()
        for log in logs:
            merged.add(log)
        return merged.result()

    def update_weights(self, step: int) -> dict[str, float]:
        """Sync every sampler; the metrics of the first."""
        return self.call("update_weights", step)[0]

    def rollout_handles(self) -> list[Any]:
        """What replicas talk to."""
        return list(self.actors)

    def max_memory_gb(self) -> float:
        """The largest worker's peak."""
        return max(self.call("memory_gb"))

    def close(self) -> None:
        """End the processes."""
        for actor in self.actors:
            self._ray.kill(actor)


__all__ = ["ActorRolloutRefWorker", "WorkerGroup"]
