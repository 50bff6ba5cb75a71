"""The hybrid worker: one engine that trains, one backend that samples, the same weights.

A plain class, so that it can be used without Ray; `group.WorkerGroup` makes a Ray actor of it for each training process.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fsdp_diffusers_engine.batch import OWN
from fsdp_diffusers_engine.config import DREW
from omni_rollout.kept import with_latents
from omni_rollout.samples import Rows, parted
from omni_rollout.types import GenerationRequest

from .card_memory import GB, Needs, measure
from .cluster import available_cpus, memory_mb
from .config import RunConfig, SyncMode, updates_per_step
from .given import Finished
from .model_folder import read_index
from .models import check_present, fetch
from .placement import Placement
from .rows import Store
from .rules import check_experts

if TYPE_CHECKING:
    from diffusion_losses import Statistic
    from lora_sync import LoRAPayload, Promise, WeightBucket, WeightReceipt
    from lora_sync.one_copy import Layout, LentLoRA, Loan
    from lora_sync.transport import Link
    from tensordict import TensorDict


class ActorRolloutRefWorker:
    """Trains, samples and scores a reference with one set of weights.

    Args:
        config: of the run.
        rank, world_size: of the training processes.
    """

    def __init__(self, config: RunConfig, *, rank: int = 0, world_size: int = 1):
        self.config, self.rank, self.world_size = config, rank, world_size
        self.version = -1
        torch.set_num_threads(config.ray.worker_threads or max(available_cpus() // world_size, 1))

    def meeting_point(self) -> str:
        """Where the processes of a group find each other: this node's address as Ray's other nodes know it, and a free port."""
        from fsdp_diffusers_engine.worker import meeting_point

        return meeting_point()

    def needs(self, text: int) -> Needs | None:
        """What the model needs on a card, with prompts of `text` tokens; fetches it first. None for weights that are not read."""
        folder = check_present(self.config.model.path, fetch(self.config.model.path))
        return None if self.config.model.transformer_config else measure(folder, self.config, text)

    def card_bytes(self) -> float:
        """Memory of this process's GPU, or its share of the machine's."""
        if torch.cuda.is_available() and self.config.actor.fsdp_config.device != "cpu":
            return self.config.ray.gpu_memory_gb * GB if self.config.ray.gpu_memory_gb else torch.cuda.mem_get_info()[1]
        return memory_mb() * 2**20 / self.world_size

    def init_model(self, meeting_point: str | None = None, placement: Placement | None = None) -> None:
        """Join the process group when there are several processes, and build engine and backend.

        Args:
            meeting_point: where the processes find each other.
            placement: what `placement.place` chose; None: as the config says.
        """
        from fsdp_diffusers_engine.config import TrainingWorkerConfig
        from fsdp_diffusers_engine.worker import TrainingWorker

        actor = self.config.actor
        for name in ("sharding", "fsdp_size", "state_offload", "optimizer_offload") if placement else ():
            setattr(actor.fsdp_config, name, getattr(placement, name))
        folder = fetch(actor.model_config.path)
        check_experts(self.config, read_index(folder))  # a model from the Hub is first seen here
        actor.model_config.path = str(folder)
        self.trainer = TrainingWorker(TrainingWorkerConfig(actor, self.rank, self.world_size, meeting_point))
        self.trainer.reset()
        self.engine = self.trainer.engine
        names = self.engine.objective.reads(self.config.actor.diffusion_loss)
        names += ("final_latents",) if self.config.goes_on and "final_latents" not in names else ()
        self.rows = Store((*names, "means") if self.config.rollout_means else names)
        # None where engines in other processes sample: then no text encoder and no decoder is loaded here.
        self.finished = Finished(self.config.rollout.pipeline.num_frames, lambda pixels: self.backend.clean(pixels))
        self.backend: Any = self._make_backend() if self.config.shares_weights else None

    def _make_backend(self) -> Any:
        from omni_rollout.diffusers_backend import DiffusersBackend

        spec, path, rollout = self.engine.spec, self.config.actor.model_config.path, self.config.rollout
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
            sharers=self.engine.layout.sp_size,
            fp8=rollout.fp8,
        )

    def gpu_places(self) -> list[tuple[str, str]]:
        """(Ray node, GPU) of every GPU that this process holds."""
        import ray

        context = ray.get_runtime_context()
        return [(context.get_node_id(), str(gpu)) for gpu in context.get_accelerator_ids().get("GPU", [])]

    # ---- rollout and rows ------------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[GenerationRequest], *latents: np.ndarray
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Draw samples and keep those that are for training, or that an agent loop may go on from.

        Args:
            requests: of one kind; those of edits begin from `latents`, see `omni_rollout.kept.by_number`.

        Returns:
            `omni_rollout.samples.FACTS` and, where they are kept, the rows' `slot` here, [b] each; what `GenerationRequest.shown`
            names, [b, …] each.
        """
        with self.engine.eval_mode():
            facts, shown, rows = parted(requests, self.backend.generate(with_latents(requests, latents)))
        if requests[0].return_trajectory or self.config.goes_on:
            facts["slot"] = np.array(self.rows.keep(rows))
        return facts, shown

    def take(self, requests: Sequence[GenerationRequest], files: Sequence[str]) -> list[int]:
        """Keep finished pictures from files, as if these requests had drawn them; their slots here."""
        return self.rows.keep(self.backend.take(requests, self.finished.latents(files)))

    def keep(self, rows: Rows, copies: bool = False) -> list[int]:
        """Take rows of another process, which may be copies of those that it keeps; their slots here."""
        return self.rows.keep(rows, copies)

    def give(self, slots: Sequence[int]) -> Rows:
        """Rows, for a worker that shall train them."""
        return self.rows.rows(slots)

    def final_latents(self, slots: Sequence[int]) -> np.ndarray:
        """[b, …] of rows."""
        return self.rows.rows(slots).tensors["final_latents"].numpy()

    def forget(self) -> None:
        """Drop all rows: the next step begins."""
        self.rows.clear()

    def retain(self, slots: Sequence[int]) -> None:
        """Drop all rows but these, in slots from 0 on."""
        self.rows.retain(slots)

    def save_rows(self, file: str, slots: Sequence[int]) -> None:
        """Write rows that wait for a later step, for `load_rows` of a resumed run."""
        self.rows.save(Path(file), slots)

    def load_rows(self, file: str) -> None:
        """The counterpart of `save_rows`."""
        self.rows.load(Path(file))

    def write_rows(self, folder: str) -> None:
        """Write the rows into a file of this rank's, to be looked at after a failure."""
        self.rows.write(Path(folder) / f"rows_rank{self.rank}.safetensors")

    def choose_steps(self, slots: Sequence[int], chosen: np.ndarray) -> None:
        """Leave some steps of the rows' trajectories; see `Store.choose_steps`."""
        self.rows.choose_steps(slots, torch.from_numpy(chosen.copy()))

    def abort(self, request_ids: Sequence[str]) -> int:
        """Cancel requests in flight; called while `generate` runs."""
        return int(self.backend.abort(request_ids))

    # ---- policy ----------------------------------------------------------------------------------------------------------

    def compute_log_prob(self, slots: Sequence[int]) -> np.ndarray:
        """Keep `old_log_probs` [W] and, where the loss reads them, `old_means` [W, …] of each row, under the present weights.

        Returns:
            [b, 2, W] these log-probs, and the rollout's.
        """
        scores = self._scores(slots, "default", len(slots) / (len(slots) + self._left))
        self._left = 0
        found = {"old_log_probs": scores["log_probs"]}
        if self.config.actor.diffusion_loss.needs_old_means:
            found["old_means"] = scores["means"]
        self.rows.put(slots, found)
        return self._beside_the_rollouts(slots, scores["log_probs"])

    def leave_old_log_prob(self, slots: Sequence[int]) -> None:
        """Let the update's own forward give these rows' `old_log_probs`: they are of the first mini-batch."""
        self._left = len(slots)
        self.rows.put(
            slots, {"old_log_probs": torch.full_like(self.rows.rows(slots).tensors["rollout_log_probs"], OWN)}
        )

    _left = 0
    """Rows of this step that `compute_log_prob` is not asked for."""

    def measure_log_prob(self, slots: Sequence[int]) -> np.ndarray:
        """What `compute_log_prob` returns; nothing is kept."""
        return self._beside_the_rollouts(slots, self._scores(slots, "default")["log_probs"])

    def _beside_the_rollouts(self, slots: Sequence[int], log_probs: torch.Tensor) -> np.ndarray:
        theirs = self.rows.rows(slots).tensors["rollout_log_probs"]
        return torch.stack([log_probs[: len(slots)], theirs], dim=1).numpy()

    def compute_ref_log_prob(self, slots: Sequence[int]) -> None:
        """Keep `ref_means` [W, …] of each row: under the same weights with the adapter off."""
        self.rows.put(slots, {"ref_means": self._scores(slots, "reference")["means"]})

    def _scores(self, slots: Sequence[int], adapter: str, share: float = 1.0) -> TensorDict:
        actor, count = self.config.actor, len(slots)
        if self._scores_itself:  # then in batches of the update's size, on which the last bits depend
            size = actor.log_prob_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
            count = -(-count // size) * size
        return self.trainer.compute_log_prob(self.rows.batch(np.resize(slots, count).tolist()), adapter, share)

    @property
    def _scores_itself(self) -> bool:
        return self.config.algorithm.old_log_probs != "rollout" and self.config.actor.diffusion_loss.spec.replays

    def update_actor(
        self, slots: Sequence[int], numbers: np.ndarray, tensors: Mapping[str, np.ndarray], step: int
    ) -> dict[str, Statistic]:
        """The optimizer steps of training step `step` on this process's rows.

        Args:
            slots: of the rows.
            numbers: [b] the rows' places in the whole batch; none where this rank has no row to train.
            tensors: what the driver adds, [b, …] each.
            step: of the run.

        Returns:
            Metrics in the form that pools over ranks.
        """
        if not len(slots):
            slots, numbers, tensors = (
                [0],
                np.array([-1]),
                {k: np.zeros((1, *v.shape[1:]), v.dtype) for k, v in tensors.items()},
            )
        data = self.rows.batch(slots)
        for name, values in tensors.items():
            data[name] = torch.from_numpy(values.copy())
        if "old_log_probs" not in data.keys() and "rollout_log_probs" in data.keys():
            data["old_log_probs"] = data["rollout_log_probs"]
        if self.config.rollout_means:
            data["old_means"] = data["means"]
        data["row"] = torch.from_numpy(numbers.copy())
        data.set_non_tensor("global_step", step)
        # As many as a whole batch has, also where rows were left out: what published codes do, and what the schedule expects.
        data.set_non_tensor("mini_batches", updates_per_step(self.config) // self.config.actor.ppo_epochs)
        data.set_non_tensor("whole_micro_batches", self._scores_itself)
        return dict(self.trainer.train_mini_batch(data)["statistics"])

    def take_forwards(self) -> dict[str, float]:
        """Transformer rows per sample that `compute_log_prob` and `compute_ref_log_prob` spent since the last call."""
        return self.trainer.take_forwards()

    def bad_gradient(self) -> str:
        """First parameter whose gradient was not finite in the update that was skipped last; empty where its rank saw none."""
        return self.engine.bad_gradient

    # ---- sync, checkpoints, export ---------------------------------------------------------------------------------------

    def update_weights(self, global_steps: int, mode: SyncMode = "lora") -> dict[str, float]:
        """Prove that the sampler's module holds what the trainer sends: its adapters tensor by tensor, or all weights by checksum.

        With shared weights there is nothing to move; with merged ones the sampler gets a second set of the adapted layers. The
        receipts must say: everything is bound, and the version is new.
        """
        from lora_sync import verify

        previous = self.version if self.version >= 0 else None
        bound = 0
        for adapter in self.config.sampling_adapters:
            if mode != "lora":
                named, fold = self._named(adapter), mode == "merged"
                bound = self.backend.hold_weights(named, global_steps, adapter, fold=fold).tensors_bound
                continue
            payload = self._payload(adapter, global_steps)
            bound = verify(payload, self.backend.update_lora(payload, adapter), previous_version=previous).tensors_bound
        self.version = global_steps
        return {"sync/version": float(global_steps), "sync/tensors_bound": float(bound)}

    def lora_payload(
        self, adapter: str, version: int, lent: bool = False
    ) -> tuple[Promise, LoRAPayload | LentLoRA | None]:
        """The adapter for samplers in other processes, and what they must answer. All ranks gather it, the first one sends it; or
        they read it where it is, if it was lent to them."""
        from lora_sync.one_copy import lent_adapter

        there = lent_adapter(self.engine.module, adapter, version) if lent else None
        payload = there or self._payload(adapter, version)
        self.version = version
        return payload.promise, payload if self.rank == 0 else None

    def lend(self, wanted: Mapping[str, Layout]) -> tuple[dict[str, Loan], dict[str, dict[str, Loan]]]:
        """Lend the frozen weights to an engine beside this process, as it lays them out, and the adapters that sample; see
        `lora_sync.one_copy`."""
        from lora_sync.one_copy import lend, lend_adapter

        module = self.engine.module
        base = lend(module, wanted, self.engine.spec.lora_names)
        return base, {adapter: lend_adapter(module, adapter) for adapter in self.config.sampling_adapters}

    def _named(self, state: str) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights of a policy state as whole tensors, one at a time; a collective where they are sharded."""
        return self.engine.get_per_tensor_param(layered_summon=True, adapter_name=state)[0]

    def open_weights(self, state: str, version: int) -> None:
        """Begin a stream of all weights for samplers in other processes: `next_bucket` on every rank that shares them."""
        from lora_sync import WeightStream

        dtype = getattr(torch, self.config.rollout.dtype)
        self.stream = WeightStream(self._named(state), version=version, dtype=dtype)
        self._buckets = iter(self.stream)
        self.version = version

    def next_bucket(self) -> tuple[bool, WeightBucket | None]:
        """(whether it is the last, the next message on the first rank and None on the others)."""
        bucket = next(self._buckets)
        return bucket.last, bucket if self.rank == 0 else None

    def sent_weights(self) -> WeightReceipt:
        """What whoever got the whole stream must answer."""
        return self.stream.receipt

    def send_weights(self, link: Link, state: str, version: int) -> WeightReceipt:
        """The whole stream through a link, from the first rank; what its receivers must answer."""
        self.open_weights(state, version)
        with link.sender(self.engine.device) if self.rank == 0 else nullcontext() as transport:
            for bucket in self._buckets:
                if transport is not None:
                    transport.send(bucket)
        return self.stream.receipt

    def free_address(self) -> str:
        """`host:port` on which this process can listen."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def _payload(self, adapter: str, version: int) -> LoRAPayload:
        return self.trainer.save_weights(adapter, version=version)

    def refresh_old_policy(self, step: int) -> dict[str, float]:
        """Let the policy state `old` follow the trained one after training step `step`, as `algorithm.old_policy` says. What drew
        the next step's samples is kept before, where the loss will compare with it."""
        old = self.config.algorithm.old_policy
        if self.config.keeps_drew:
            self.keep_drew()
            if self.config.drawing_state != "old":
                self.engine.copy_adapter("default", self.config.drawing_state)
        if "old" not in self.config.model.policy_state_adapters or (step + 1) % old.update_every:
            return {}
        decay = old.decay(self.engine.optimizer_steps)
        self.trainer.update_old_policy(decay)
        return {"actor/old_policy_decay": decay}

    def keep_drew(self) -> None:
        """Compare, from here on, with the policy that the sampler holds since the last sync."""
        self.engine.copy_adapter(self.config.drawing_state, DREW)

    def save_checkpoint(self, path: str, step: int) -> None:
        """Everything that decides the next step, as the engine sees it."""
        self.trainer.save_state(path, global_step=step)

    def load_checkpoint(self, path: str) -> None:
        """The counterpart of `save_checkpoint`."""
        self.trainer.load_state(path)

    def export(self, folder: str) -> list[str]:
        """Write what was trained, and its average where one is kept, as stock diffusers loads them; their folders.

        An adapter: `lora`, for `load_lora_weights`, loaded again and compared. All weights: `transformer`, for `from_pretrained`.
        """
        from lora_sync import export

        written = []
        for state, end in (("default", ""), ("ema", "_ema"))[: 1 + (self.config.actor.fsdp_config.ema_decay > 0)]:
            if self.config.model.lora_rank > 0:
                payload, target = self._payload(state, max(self.version, 0)), Path(folder, f"lora{end}")
                written.append(str(export(payload, "diffusers", target, architecture=self.engine.spec.lora_names)))
                continue
            with self.engine.use_adapter(state):
                written.append(str(self.engine.export_transformer(Path(folder, f"transformer{end}"))))
        return written

    def describe(self) -> dict[str, str]:
        """What trains where, for the report."""
        parameters = sum(p.numel() for p in self.engine.module.parameters() if p.requires_grad)
        return {"device": str(self.engine.device), "trained parameters": f"{parameters:,}"}

    def release_memory(self) -> None:
        """Give what the update used and no longer holds back to the card, for an engine that shares it."""
        if self.engine.device.type == "cuda":
            torch.cuda.empty_cache()

    def memory_gb(self) -> float:
        """Peak resident memory of this process, in GB (1e9 bytes); on CUDA the peak of allocated device memory."""
        if self.engine.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.engine.device) / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
