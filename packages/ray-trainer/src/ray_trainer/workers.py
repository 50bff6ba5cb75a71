"""The hybrid worker: one engine that trains, one backend that samples, the same weights.

A plain class, so that it can be used without Ray; `group.WorkerGroup` makes a Ray actor of it for each training process.
"""

from __future__ import annotations

import datetime
import resource
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from omni_rollout.types import DiffusionOutput, GenerationRequest
from tensordict import TensorDict

from ray_trainer.cluster import available_cpus
from ray_trainer.config import RunConfig
from ray_trainer.prompts import resolve
from ray_trainer.update import MetricLog, UpdateLoss, mini_batches

if TYPE_CHECKING:
    from lora_sync import LoRAPayload


class ActorRolloutRefWorker:
    """Trains, samples and scores a reference with one set of weights.

    Args:
        config: of the run.
        role: what this worker does; "actor_rollout_ref" is the hybrid one.
        rows_per_unit: rows of an update that belong together (2 for preference pairs).
        rank, world_size: of the training processes.
    """

    def __init__(
        self,
        config: RunConfig,
        role: str = "actor_rollout_ref",
        *,
        rows_per_unit: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.config, self.role, self.rank, self.world_size = config, role, rank, world_size
        self.rows_per_unit = rows_per_unit
        self.version = -1
        torch.set_num_threads(config.ray.worker_threads or max(available_cpus() // world_size, 1))

    def meeting_point(self) -> str:
        """Address of this machine with a free port, where the processes of a group find each other."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return f"tcp://{socket.gethostbyname(socket.gethostname())}:{port}"

    def init_model(self, meeting_point: str = "") -> None:
        """Join the process group when there are several processes, and build engine and backend."""
        from fsdp_diffusers_engine import ForwardProcessDiffusersFSDPEngine, PPODiffusersFSDPEngine

        config = self.config
        config.model.path = resolve("models", config.model.path)
        settings = config.actor.fsdp_config
        if self.world_size > 1:
            torch.distributed.init_process_group(
                "nccl" if torch.cuda.is_available() and settings.device != "cpu" else "gloo",
                init_method=meeting_point,
                rank=self.rank,
                world_size=self.world_size,
                timeout=datetime.timedelta(seconds=settings.timeout_s),
            )
        parts = (config.model, settings, config.actor.optim, config.actor.checkpoint)
        self.engine: Any = (
            ForwardProcessDiffusersFSDPEngine(*parts, config.actor.forward_process)
            if config.actor.diffusion_loss.family == "forward_process"
            else PPODiffusersFSDPEngine(*parts)
        )
        self.engine.initialize()
        self.backend = self._make_backend()

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
        from fsdp_diffusers_engine import gather_outputs

        outputs = gather_outputs(self.engine.forward_backward_batch(data, None, forward_only=True))
        return TensorDict({key: outputs[key].cpu() for key in ("log_probs", "means")}, batch_size=data.batch_size[:1])

    def update_actor(self, data: TensorDict, step: int) -> dict[str, float]:
        """The optimizer steps of training step `step` on this process's rows; metrics averaged over micro-batches."""
        actor = self.config.actor
        data = self._with_settings(data)
        batches = mini_batches(
            len(data),
            actor.ppo_mini_batch_size // self.world_size,
            epochs=actor.ppo_epochs,
            shuffle=actor.shuffle,
            seed=(seed := actor.data_loader_seed * 1_000_003 + step),
            unit=self.rows_per_unit,
        )
        log = MetricLog()
        with self.engine.train_mode():
            for number, order in enumerate(batches):
                mini = data[order]
                mini.set_non_tensor("noise_seed", seed * 1009 + number)  # forward-process losses draw from it
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
