"""`TrainingWorker`: an engine behind a few calls that cross process borders.

The fine calls are those of Tinker (https://thinkingmachines.ai/tinker/): `forward_backward`, `optim_step`,
`save_weights`, `save_state`, `load_state`. `train_mini_batch` is the coarse one: mini-batches, epochs, shuffling.
The class is plain Python; `remote_workers` makes Ray actors of it, one per rank.
"""

from __future__ import annotations

import datetime
import math
import os
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from diffusion_losses.config import DiffusionLossConfig
from diffusion_losses.statistics import Statistic, numbers, pool_statistics, statistic
from sde_samplers import seed_of
from tensordict import TensorDict

from . import batch, perf, sharding
from .config import TrainingWorkerConfig
from .engine import DiffusersFSDPEngine
from .errors import EngineError, EngineStateError
from .forward_process import ForwardProcess
from .losses import DiffusionLoss, FirstUpdateLoss
from .metrics import reduce_metrics
from .objective import gather_outputs
from .ppo import Replay

if TYPE_CHECKING:
    from lora_sync import LoRAPayload

FORWARDS_LOG_PROB = "forwards/log_prob"


class TrainingWorker:
    """One rank of a trainer.

    Args:
        config: the actor, and this process's place among the ranks. The objective follows from the loss: policy gradients
            replay trajectories, forward-process losses noise clean latents.
    """

    def __init__(self, config: TrainingWorkerConfig) -> None:
        self.config = config
        actor = config.actor
        self._join()
        objective = Replay() if actor.diffusion_loss.spec.replays else ForwardProcess(actor.forward_process)
        parts = (actor.model_config, actor.fsdp_config, actor.optim, actor.checkpoint)
        self.engine = DiffusersFSDPEngine(*parts, objective=objective)
        self._ready = False
        self._spent: dict[str, float] = {}
        self._base_fingerprint: str | None = None

    def _join(self) -> None:
        config, engine = self.config, self.config.actor.fsdp_config
        if config.world_size == 1 or dist.is_initialized():
            return
        if config.init_method is None:
            raise EngineError(
                f"world_size={config.world_size} needs init_method, the same on all ranks, e.g. 'tcp://10.0.0.1:29500'"
            )
        if interface := _interface_to(config.init_method):
            # Else gloo takes the one of the host's own name, which is 127.0.0.1 on many machines.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        device = sharding.pick_device(engine)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=config.init_method,
            rank=config.rank,
            world_size=config.world_size,
            timeout=datetime.timedelta(seconds=engine.timeout_s),
        )

    def reset(self) -> None:
        """Build the engine, or put it back to its first weights, optimizer and counters."""
        self.engine.initialize()
        self._ready = True

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move by hand; see `DiffusersFSDPEngine.to`."""
        self._engine.to(device, model, optimizer, grad)

    @property
    def _engine(self) -> DiffusersFSDPEngine:
        if not self._ready:
            raise EngineStateError("the worker was used before reset(); call worker.reset() first")
        return self.engine

    # ------------------------------------------------------------------ fine calls

    def forward_backward(self, data: TensorDict, loss: DiffusionLossConfig | str | None = None) -> dict[str, float]:
        """Add the gradient of `loss` (the actor's own by default) on this rank's samples; returns its metrics."""
        function = DiffusionLoss(self.config.actor.diffusion_loss if loss is None else loss)
        return reduce_metrics(self._engine.forward_backward(self._sized(data), function))

    def optim_step(self, params: dict[str, float] | None = None) -> dict[str, float]:
        """Clip and step. `params` may set `lr` for this step and `weight_decay` from now on."""
        engine = self._engine
        for name, value in (params or {}).items():
            if name not in ("lr", "weight_decay"):
                raise EngineError(f"optim_step has no parameter {name!r}; use 'lr' or 'weight_decay'")
            for group in engine.optimizer.param_groups:
                group[name] = value
        with engine.train_mode():
            return engine.step()

    def compute_log_prob(self, data: TensorDict, adapter: str = "default", share: float = 1.0) -> TensorDict:
        """Scores of the samples under a policy state (`reference`: adapters off): see the engine's forward-only pass. `share` says
        how many of a step's samples these are, for the count of `take_forwards`."""
        engine = self._engine
        size = self.config.actor.log_prob_micro_batch_size_per_gpu
        engine.forwards.take()  # what a rollout with the same weights forwarded is its own to report
        with engine.eval_mode(), engine.use_adapter(adapter):
            outputs = engine.forward_backward_batch(self._sized(data, size), None, forward_only=True)
        _, spent = engine.forwards.take().per_sample(data.batch_size[0])
        self._spent[FORWARDS_LOG_PROB] = self._spent.get(FORWARDS_LOG_PROB, 0.0) + spent * share
        scores = gather_outputs(outputs)
        return TensorDict({k: v.cpu() for k, v in scores.items()}, batch_size=[len(next(iter(scores.values())))])

    def take_forwards(self) -> dict[str, float]:
        """What `compute_log_prob` spent since the last take: `forwards/log_prob`, rows per sample over its calls
        (old and reference policy, say). An update's own are in the metrics of `train_mini_batch`."""
        spent, self._spent = self._spent, {}
        return spent

    def save_weights(self, name: str = "default", version: int | None = None) -> LoRAPayload:
        """Weights for a sampler: the adapter `name` as a payload on the host, with version, hash and the fingerprint of the
        base (16 elements of each parameter, read at the first call: the base is frozen). All ranks call it."""
        from lora_sync import extract_lora, fingerprint

        engine = self._engine
        if not engine.lora:
            raise EngineError("save_weights sends adapters, and lora_rank is 0; stream get_per_tensor_param instead")
        version = engine.optimizer_steps if version is None else version
        if self._base_fingerprint is None:
            self._base_fingerprint = fingerprint(engine.module)
        return extract_lora(engine.module, name, version=version, base_fingerprint=self._base_fingerprint, device="cpu")

    def save_state(self, path: str, global_step: int = 0) -> str:
        """Write a checkpoint; returns its folder."""
        return str(self._engine.save_checkpoint(path, global_step=global_step))

    def load_state(self, path: str) -> int:
        """Restore a checkpoint; returns its step."""
        return self._engine.load_checkpoint(path)

    def update_old_policy(self, decay: float = 0.0, target: str = "old") -> None:
        """`target ← decay · target + (1 - decay) · default`."""
        self._engine.ema_update_adapter("default", target, decay)

    # ------------------------------------------------------------------ coarse call

    def train_mini_batch(self, data: TensorDict) -> TensorDict:
        """Optimizer steps over this rank's samples: `ppo_epochs` passes in mini-batches of `ppo_mini_batch_size`
        samples over all ranks.

        A mini-batch is made of the same samples whatever the number of ranks. `row` int64 [b] says which sample of all
        ranks' each one is, -1 one that is not trained; without it a rank's samples follow those of the ranks before. Ranks
        with fewer samples of a mini-batch fill up with masked ones.

        Non-tensor data: `global_step` (seeds the shuffle and the noise); `mini_batches` asks for that many whatever the
        number of samples, for a batch of which some were left out: smaller mini-batches then, not fewer steps;
        `whole_micro_batches` fills up the last micro-batch too.

        Returns a TensorDict whose `metrics` is one dict of numbers for the call on this rank; `forwards/train` and
        `forwards/no_grad` among them are the rows that were forwarded with and without gradients, per sample. Its
        `statistics` are the same in the form that pools over ranks (`diffusion_losses.pool_statistics`).
        """
        engine, actor = self._engine, self.config.actor
        step, group = int(batch.plain(data, "global_step", 0)), self._engine.layout.dp_group
        numbers_here = data.get("row", None)
        if numbers_here is None:
            numbers_here = sharding.first_row(len(data), group) + torch.arange(len(data))
        mine = (numbers_here >= 0).nonzero()[:, 0]
        total = int(sharding.all_reduce_number(len(mine), group))
        place = torch.full((total,), -1)
        place[numbers_here[mine]] = mine
        multiple = actor.ppo_micro_batch_size_per_gpu if batch.plain(data, "whole_micro_batches", False) else 1
        planned = batch.plain(data, "mini_batches")
        loss, first = DiffusionLoss(actor.diffusion_loss), FirstUpdateLoss(actor.diffusion_loss)
        rows: list[dict[str, Any]] = []
        samples = 0
        start = time.perf_counter()
        engine.forwards.take()
        with engine.train_mode():
            for epoch in range(actor.ppo_epochs):
                for number, chosen in enumerate(batch.mini_batches(actor, total, step, epoch, planned)):
                    here = (place[chosen] >= 0).nonzero()[:, 0]
                    most = int(sharding.all_reduce_number(len(here), group, dist.ReduceOp.MAX))
                    mini = _filled(data[place[chosen][here]], data, -(-most // multiple) * multiple)
                    mini["noise_row"] = torch.cat([here, torch.zeros(len(mini) - len(here), dtype=torch.long)])
                    mini = self._sized(mini)
                    mini.set_non_tensor("noise_seed", seed_of(actor.data_loader_seed, "noise", step, epoch, number))
                    engine.optimizer_zero_grad()
                    rows += engine.forward_backward_batch(mini, first if epoch == number == 0 else loss)
                    rows.append(_step_statistics(engine.step()))
                    samples += len(mini)
        pooled = pool_statistics(rows) | self._speed(data, samples // actor.ppo_epochs, time.perf_counter() - start)
        result = TensorDict({}, batch_size=[])
        result.set_non_tensor("metrics", numbers(pooled))
        result.set_non_tensor("statistics", pooled)
        return result

    def _sized(self, data: TensorDict, size: int | None = None) -> TensorDict:
        data = data.copy()
        data.set_non_tensor("micro_batch_size", size or self.config.actor.ppo_micro_batch_size_per_gpu)
        return data

    def _speed(self, data: TensorDict, samples: int, seconds: float) -> dict[str, Statistic]:
        rows = self.engine.forwards.take()
        train, no_grad = rows.per_sample(samples)
        flops = perf.training_flops(self.engine, rows, batch.settings_of(data), batch.text_tokens(data))
        return {
            "forwards/train": statistic("mean", train, samples),
            "forwards/no_grad": statistic("mean", no_grad, samples),
            "perf/mfu": statistic("mean", perf.mfu(self.engine, flops, seconds)),
            "time/train_mini_batch": statistic("max", seconds),  # the slowest rank's: the others wait for it
        }

    def shutdown(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _filled(mini: TensorDict, data: TensorDict, count: int) -> TensorDict:
    """`count` rows: those of `mini`, and masked ones from the start of `data`."""
    missing = count - len(mini)
    if not missing:
        return mini
    extra = data[torch.arange(missing) % len(data)]
    masks = [part.get("mask", torch.ones(len(part), dtype=torch.bool)) for part in (mini, extra)]
    mini, extra = mini.copy(), extra.copy()
    mini["mask"], extra["mask"] = masks[0], torch.zeros_like(masks[1])
    return TensorDict.cat([mini, extra])


def _step_statistics(step: dict[str, float]) -> dict[str, Statistic]:
    """What an optimizer step reports, the same on all ranks. A norm that is not finite counts as a skipped step only."""
    norm = step["actor/grad_norm"]
    finite = math.isfinite(norm)
    return {
        "actor/grad_norm": statistic("mean", norm if finite else 0.0, float(finite)),
        "actor/lr": statistic("mean", step["actor/lr"]),
        "actor/skipped_steps": statistic("events", step["actor/skipped_steps"]),
        "actor/empty_steps": statistic("events", step["actor/empty_steps"]),
    }


def _interface_to(init_method: str) -> str | None:
    """The network interface by which this machine reaches `tcp://HOST:PORT`; None where that cannot be told."""
    import psutil

    place = urlsplit(init_method)
    if place.scheme != "tcp" or place.hostname is None:
        return None
    try:
        kind = socket.getaddrinfo(place.hostname, place.port)[0][0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect((place.hostname, place.port or 1))  # sends nothing: it asks for the route
            own = probe.getsockname()[0]
    except OSError:
        return None
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if any(one.address == own for one in addresses)), None)


def meeting_point() -> str:
    """`tcp://ADDRESS:PORT` where the ranks of a group find each other; this process, which must be rank 0's, listens there already.

    So no other program can take the port before the ranks come: `init_process_group` takes the store that is there. The address is
    the one by which Ray's other nodes know this machine. The host's own name is not asked: it resolves to 127.0.0.1 on many
    machines, and to nothing on others.
    """
    address = import_ray().util.get_node_ip_address()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    _MEETINGS.append(store)
    return f"tcp://[{address}]:{store.port}" if ":" in address else f"tcp://{address}:{store.port}"


_MEETINGS: list[dist.TCPStore] = []
"""They listen as long as they are held."""


class _Rank(TrainingWorker):
    """A worker that joins its group when it is told where, which only the first one's node can say."""

    def __init__(self) -> None:
        self._ready = False

    def meeting_point(self) -> str:
        return meeting_point()

    def start(self, config: TrainingWorkerConfig) -> None:
        super().__init__(config)


def remote_workers(config: TrainingWorkerConfig, num_workers: int = 1, **options: Any) -> list[Any]:
    """`num_workers` Ray actors, one per rank, joined into one group; `options` go to `ray.remote`.

    `config.init_method` is replaced by an address of the first actor's node.

    Raises:
        EngineError: there is no Ray, or the one that runs would start each worker through `uv run`.
    """
    ray = import_ray()
    if ray.is_initialized() and "uv run" in str(ray.get_runtime_context().runtime_env.get("py_executable")):
        raise EngineError(
            "Ray would start each worker through `uv run` in a copy of this folder, where everything is installed again; set "
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 before Ray is imported"
        )
    actor = ray.remote(**options)(_Rank) if options else ray.remote(_Rank)
    workers: list[Any] = [actor.remote() for _ in range(num_workers)]
    address: Any = ray.get(workers[0].meeting_point.remote()) if num_workers > 1 else None
    ray.get(
        [
            worker.start.remote(replace(config, rank=rank, world_size=num_workers, init_method=address))
            for rank, worker in enumerate(workers)
        ]
    )
    return workers


def import_ray() -> Any:
    """Import Ray, with its hook for `uv run` off: it would start every worker in an uploaded copy of the folder."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
    except ImportError as error:
        raise EngineError("Ray is missing: uv pip install './packages/fsdp-diffusers-engine[ray]'") from error
    return ray
