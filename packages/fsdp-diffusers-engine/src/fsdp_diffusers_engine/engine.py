"""`DiffusersFSDPEngine`: one diffusers transformer, trained by LoRA or in full, in one process or many.

The engine owns what every algorithm shares: the module, sharding, modes, the optimizer step, policy states, weights for the
rollout, checkpoints. How a batch is prepared and scored is its objective's business (`ppo`, `forward_process`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lora_sync.layers import adapter_names, adapter_parameters, copy_into, reshard
from torch import Tensor, nn

from . import adapters, checkpoint, compiling, loading, losses, offload, optim, sharding, weights
from .config import MISSING, CheckpointConfig, DiffusionModelConfig, FSDPEngineConfig, FSDPOptimizerConfig
from .determinism import make_deterministic
from .errors import EngineError, EngineStateError
from .failures import shared_failure
from .forwards import ForwardCounter
from .objective import ALL_STEPS, LossFunction, Objective, stack_steps
from .precision import dtype_of, keep_adapters_in
from .recompute import Recompute
from .states import PolicyStatesMixin, WeightStates

if TYPE_CHECKING:
    from model_specs import ModelSpec, PromptEmbeds
    from sde_samplers.settings import SamplerSettings
    from tensordict import TensorDict


class DiffusersFSDPEngine(PolicyStatesMixin):
    """Engine over one transformer. Construct, `initialize`, then train.

    Args:
        model_config: what is trained.
        engine_config: where and how.
        optimizer_config, checkpoint_config: as named.
        objective: how a batch is prepared and scored; a subclass may bring its own.

    Attributes (after `initialize`):
        module: the transformer with its adapters, perhaps sharded.
        spec: its `model_specs.ModelSpec`.
        device: where it computes.
        layout: ranks; `layout.dp_rank` of `layout.dp_size` says which part of a batch this process must be given.
        optimizer_steps, skipped_steps, empty_steps: counters; a step is skipped when its gradient is not finite, and is
            empty when its gradient is zero everywhere.
        bad_gradient: first parameter whose gradient was not finite when a step was skipped last.
        forwards: rows that went through the module, with and without gradients.
    """

    objective: Objective
    spec: ModelSpec
    device: torch.device
    layout: sharding.Layout
    optimizer: torch.optim.Optimizer
    lr_scheduler: optim.LRSchedule

    def __init__(
        self,
        model_config: DiffusionModelConfig,
        engine_config: FSDPEngineConfig | None = None,
        optimizer_config: FSDPOptimizerConfig | None = None,
        checkpoint_config: CheckpointConfig | None = None,
        objective: Objective | None = None,
    ) -> None:
        if objective is not None:
            self.objective = objective
        self.model_config = model_config
        self.engine_config = engine_config or FSDPEngineConfig()
        self.optimizer_config = optimizer_config or FSDPOptimizerConfig()
        self.checkpoint_config = checkpoint_config or CheckpointConfig()
        optim.check_optimizer_config(self.optimizer_config)
        checkpoint.check_config(self.checkpoint_config)
        if model_config.lora_rank < 0:
            raise EngineError(f"lora_rank={model_config.lora_rank!r} must be 0 (train everything) or positive")
        self.trainable: dict[str, nn.Parameter] = {}
        self.states = None
        self.optimizer_steps = 0
        self.skipped_steps = self.empty_steps = 0
        self.bad_gradient = ""
        self.forwards = ForwardCounter()
        self._initialized = False

    # ------------------------------------------------------------------ building

    @property
    def lora(self) -> bool:
        """Whether adapters are trained rather than the transformer itself."""
        return self.model_config.lora_rank > 0

    def initialize(self) -> None:
        """Build the module, its optimizer and its schedule; calling it again starts over from the same weights."""
        config, engine = self.model_config, self.engine_config
        if engine.full_determinism:
            make_deterministic()
        self.device = sharding.pick_device(engine)
        self.layout = sharding.make_layout(engine, self.device)
        self.spec = _spec_of(config)
        dtype = dtype_of(engine.model_dtype, "model_dtype")
        module, source = loading.build(
            self.spec, config, dtype, self.device, meta=self.layout.world_size > 1 or self.layout.sharded
        )
        self._configure(module)
        if self.lora:
            adapters.inject_adapters(module, config, self.spec, self._adapter_names())
            keep_adapters_in(module, dtype_of(config.lora_dtype, "lora_dtype"))
        else:
            module.requires_grad_(True)
        self.blocks = sharding.blocks_of(module, config)
        compiled = engine.use_torch_compile
        if (
            compiled is None
        ):  # kernels that the compiler picks by timing them are no help to a run that must repeat itself
            compiled = self.device.type == "cuda" and not engine.full_determinism
        if compiled:
            compiling.compile_blocks(self.blocks)
        if config.enable_gradient_checkpointing:
            self.recompute = Recompute(self.blocks, self.device, self._recomputed())
            module.enable_gradient_checkpointing(self.recompute)  # type: ignore[operator]
        if self.layout.sharded:
            sharding.shard(module, self.blocks, self.layout, engine)
        if source is not None:
            loading.materialise(module, source, config, self._storage_device())
        elif self.lora:
            for adapter in adapter_names(module):
                for name, parameter in adapter_parameters(module, adapter).items():
                    copy_into(parameter, adapters.draw_initial(name, parameter.shape, config))
        module.eval()
        self.module = module
        self.forwards.watch(module)
        self.trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if self.lora and config.lora_adapter_path:
            weights.warm_start(module, config, self.spec.lora_names)
        if not self.lora:
            kept_on = torch.device("cpu") if engine.state_offload else None
            self.states = WeightStates(self.trainable, self._state_names(), lambda: reshard(module), kept_on)
        self.optimizer = optim.build_optimizer(self.trainable.values(), self.optimizer_config)
        self.lr_scheduler = optim.LRSchedule(self.optimizer, self.optimizer_config)
        self.optimizer_steps = self.skipped_steps = self.empty_steps = 0
        self._initialized = True
        self.to("cpu", model=engine.param_offload, optimizer=bool(engine.optimizer_offload), grad=engine.param_offload)

    def _configure(self, module: Any) -> None:
        if self.model_config.attn_backend:
            try:
                module.set_attention_backend(self.model_config.attn_backend)
            except (ValueError, RuntimeError, ImportError) as error:
                raise EngineError(f"attn_backend={self.model_config.attn_backend!r} cannot be used: {error}") from error
        if self.layout.sequence_mesh is not None:
            from .sequence_parallel import enable_ulysses

            enable_ulysses(module, self.layout, self.device)

    def _recomputed(self) -> int | None:
        """Blocks to recompute; None leaves it to a measurement."""
        count, most = self.model_config.recompute_blocks, len(self.blocks)
        if count is not None and not 0 <= count <= most:
            raise EngineError(f"recompute_blocks={count!r} must be from 0 to {most}, the number of blocks, or null")
        # Ranks that gather each other's shards while they recompute must all recompute the same blocks.
        mesh = self.layout.shard_mesh
        gathers = mesh is not None and mesh.size(mesh.ndim - 1) > 1
        return most if count is None and gathers else count

    def _state_names(self) -> list[str]:
        names = [name for name in self.model_config.policy_state_adapters if name != adapters.TRAINED]
        if self.engine_config.ema_decay > 0 and adapters.EMA not in names:
            names.append(adapters.EMA)
        return names

    def _adapter_names(self) -> list[str]:
        return [adapters.TRAINED, *(name for name in self._state_names() if name != adapters.REFERENCE)]

    def _storage_device(self) -> torch.device:
        return torch.device("cpu") if self.engine_config.offload_policy else self.device

    def _need(self, what: str) -> None:
        if not self._initialized:
            raise EngineStateError(f"{what} was called before initialize(); call engine.initialize() first")

    # ------------------------------------------------------------------ modes and devices

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Training inside: dropout on, offloaded parameters and optimizer on the device; both leave at the end."""
        self._need("train_mode")
        yield from self._mode(train=True)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Evaluation inside: no gradients, offloaded parameters on the device."""
        self._need("eval_mode")
        with torch.no_grad():
            yield from self._mode(train=False)

    def _mode(self, train: bool) -> Iterator[None]:
        engine = self.engine_config
        self.to("device", model=engine.param_offload, optimizer=train and bool(engine.optimizer_offload), grad=train)
        self.module.train(train)
        try:
            yield
        finally:
            self.module.eval()
            self.to(
                "cpu", model=engine.param_offload, optimizer=bool(engine.optimizer_offload), grad=engine.param_offload
            )

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move by hand, whatever the offload settings say. `device`: `"cpu"`, or `"device"` for the engine's."""
        self._need("to")
        target = torch.device("cpu") if device == "cpu" else self.device
        if self.engine_config.offload_policy:
            return
        if model:
            reshard(self.module)
            offload.move_module(self.module, target, grad=grad)
        if optimizer:
            offload.move_optimizer(self.optimizer, target)

    # ------------------------------------------------------------------ forward and backward

    def forward_backward_batch(
        self, data: TensorDict, loss_function: LossFunction | None, forward_only: bool = False
    ) -> list[dict[str, Any]]:
        """Forward and backward over a batch in micro-batches; gradients add up until the optimizer step.

        Returns one dict per micro-batch and step, the loss's metrics; with `forward_only` one dict per micro-batch,
        the scores [b, W, …] (`gather_outputs` joins them), and `loss_function` may be None. Ranks may hold
        different numbers of samples.
        """
        self._need("forward_backward_batch")
        with shared_failure("forward_backward_batch"):
            if not forward_only and loss_function is None:
                raise EngineError("loss_function is None; give one, or pass forward_only=True for scores alone")
            return self._run_batch(data, None if forward_only else loss_function)

    def _run_batch(self, data: TensorDict, loss_function: LossFunction | None) -> list[dict[str, Any]]:
        config, training = losses.config_of(loss_function), loss_function is not None
        micros, steps = self.objective.prepare(self, data, config, training)
        group = self.layout.dp_group
        rounds = int(sharding.all_reduce_number(len(micros), group, torch.distributed.ReduceOp.MAX))
        plan = [ALL_STEPS] if config is not None and config.needs_trajectory else list(range(steps))
        outputs: list[dict[str, Any]] = []
        for number in range(rounds):
            # A rank with fewer samples repeats its last micro-batch with a zero loss: the others' collectives need it.
            idle = number >= len(micros)
            micro = micros[min(number, len(micros) - 1)]
            parts = []
            for step in plan:
                with torch.set_grad_enabled(training):
                    loss, part = self.objective.forward(self, micro, loss_function, step, steps)
                if loss is not None:
                    self.backward(loss * 0.0 if idle else loss, last=number == rounds - 1 and step == plan[-1])
                parts.append(part)
            if not idle:
                outputs += parts if training else [stack_steps(parts)]
        if not training:
            reshard(self.module)
        return outputs

    def forward_backward(self, data: TensorDict, loss_function: LossFunction) -> list[dict[str, Any]]:
        """Short form of `forward_backward_batch` in training mode."""
        with self.train_mode():
            return self.forward_backward_batch(data, loss_function)

    def step(self) -> dict[str, float]:
        """Optimizer step, schedule and zeroed gradients in one call.

        Returns `actor/grad_norm`, `actor/lr`, and whether this step moved nothing: `actor/skipped_steps` (the gradient
        was not finite) and `actor/empty_steps` (it was zero), each 0 or 1.
        """
        lr = self.optimizer.param_groups[0]["lr"]
        skipped, empty = self.skipped_steps, self.empty_steps
        norm = self.optimizer_step()
        self.lr_scheduler_step()
        self.optimizer_zero_grad()
        return {
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "actor/skipped_steps": float(self.skipped_steps - skipped),
            "actor/empty_steps": float(self.empty_steps - empty),
        }

    def velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        cond: PromptEmbeds,
        negative: PromptEmbeds | None,
        settings: SamplerSettings,
    ) -> Tensor:
        """The transformer's velocity, [B, …] fp32; the same function that the rollout calls."""
        keep: AbstractContextManager[Any] = nullcontext()
        if self.engine_config.activation_offload and torch.is_grad_enabled():
            keep = offload.activations_on_cpu()
        with keep:
            return self.spec.velocity(self.module, latents, sigma, cond, settings, negative)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Backward of one micro-batch; gradients cross ranks at the last one only (whole copies, LoRA) or at each (full)."""
        sharding.set_gradient_sync(self.module, last or not self.lora)
        (loss * self.layout.loss_scale if self.layout.loss_scale != 1.0 else loss).backward()
        if last:
            sharding.average_gradients(self.trainable.values(), self.layout)

    # ------------------------------------------------------------------ optimizer

    def optimizer_zero_grad(self) -> None:
        """Drop all gradients."""
        self._need("optimizer_zero_grad")
        self.optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self) -> float:
        """Clip, step, update the EMA; returns the norm before clipping.

        A norm that is not finite skips the step, drops the gradients and counts in `skipped_steps`. So does one that is
        exactly zero, in `empty_steps`: there was nothing to learn, and momentum and weight decay must not move the weights
        for it. The norm is that of all ranks, so they all do the same.
        """
        self._need("optimizer_step")
        with shared_failure("optimizer_step"):
            reshard(self.module)
            parameters = list(self.trainable.values())
            norm = optim.gradient_norm(parameters)
            value = float(norm)
            if not math.isfinite(value):
                self.skipped_steps += 1
                self.bad_gradient = optim.not_finite(self.trainable)
                self.optimizer.zero_grad(set_to_none=True)
                return value
            if value == 0.0:
                self.empty_steps += 1
                return value
            if self.optimizer_config.clip_grad > 0:
                optim.scale_gradients(parameters, norm, self.optimizer_config.clip_grad)
            self.optimizer.step()
            self.optimizer_steps += 1
            self._average()
            return value

    def _average(self) -> None:
        """Let the state `ema` follow after an optimizer step."""
        engine, n = self.engine_config, self.optimizer_steps
        if engine.ema_decay > 0 and n % engine.ema_every == 0:
            decay = min((1 + n) / (10 + n), engine.ema_decay) if engine.ema_warmup else engine.ema_decay
            self.ema_update_adapter(adapters.TRAINED, adapters.EMA, decay)

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; returns the learning rate of the next optimizer step."""
        self._need("lr_scheduler_step")
        self.lr_scheduler.step()
        return self.lr_scheduler.get_last_lr()[0]

    # ------------------------------------------------------------------ weights out, checkpoints

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, adapter_name: str | None = None
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Weights for a rollout, one tensor at a time, and the adapter's PEFT config or None. See `weights`."""
        self._need("get_per_tensor_param")
        merge = self.model_config.lora.merge
        tensors, config = weights.per_tensor(self.module, self.states, adapter_name, merge, base_sync_done)
        return tensors if layered_summon else iter(list(tensors)), config

    def save_checkpoint(self, local_path: str | Path, global_step: int = 0) -> Path:
        """Write a checkpoint folder; complete or absent, never half. See `checkpoint`."""
        self._need("save_checkpoint")
        with shared_failure("save_checkpoint"):
            path, rank, contents = Path(local_path), self.layout.rank, set[str](self.checkpoint_config.save_contents)
            with checkpoint.writing(path, self.layout) as folder:
                tensors = self._kept(contents)
                checkpoint.write_tensors(folder, tensors, self.layout)
                if "extra" in contents:
                    checkpoint.save_rng(folder / "rng" / f"rank{rank}.safetensors", self.device)
                if "lora" in contents and self.lora:
                    version = self.optimizer_steps
                    weights.export_lora(self.module, folder / "lora", self.spec.lora_names, version, write=rank == 0)
                if "hf_model" in contents:
                    self.export_transformer(folder / "hf_model")
                if rank == 0:
                    checkpoint.write_record(folder, self._record(global_step, contents, len(tensors)))
            return path

    def export_transformer(self, folder: Path) -> Path:
        """Write the whole transformer of the active policy state, an adapter folded in, as `from_pretrained` loads it."""
        kind, parts, write = self.spec.transformer_class, self._parts(), self.layout.rank == 0
        weights.export_transformer(self.module, self.lora, kind, parts, folder, write=write)
        return folder

    def load_checkpoint(self, local_path: str | Path) -> int:
        """Restore a checkpoint, saved by any number of ranks; returns its `global_step`."""
        self._need("load_checkpoint")
        with shared_failure("load_checkpoint"), torch.no_grad():
            path, record = Path(local_path), checkpoint.read_record(Path(local_path))
            checkpoint.check_fit(path, record, self.spec.transformer_class, self._lora_shape())
            checkpoint.read_tensors(path, self._kept({"model", "optimizer"}, create=True), self.layout)
            optim.set_steps(self.optimizer, self.trainable, record["optimizer"])
            self.optimizer_steps, self.skipped_steps = record["optimizer_steps"], record["skipped_steps"]
            self.lr_scheduler.set_step(record["scheduler_step"])
            checkpoint.load_rng(path / "rng" / f"rank{self.layout.rank}.safetensors", self.device)
            return int(record["global_step"])

    def _kept(self, contents: set[str], *, create: bool = False) -> dict[str, Tensor]:
        """Everything that is kept, by name in the files: live tensors, which saving reads and loading writes in place."""
        found: dict[str, Tensor] = {}
        if "model" in contents:
            found |= {f"model.{name}": p.detach() for name, p in self.trainable.items()}
            if self.states is not None:
                for state, copies in self.states.copies.items():
                    found |= {f"state.{state}.{name}": copy for name, copy in copies.items()}
            for name, p in self.module.named_parameters():  # adapters of the other policies too
                if ".lora_A." in name or ".lora_B." in name:
                    found.setdefault(f"model.{name}", p.detach())
        if "optimizer" in contents:
            found |= optim.moments(self.optimizer, self.trainable, create=create)
        return found

    def _record(self, global_step: int, contents: set[str], tensors: int) -> dict[str, Any]:
        return {
            "global_step": global_step,
            "contents": sorted(contents),
            "world_size": self.layout.world_size,
            "architecture": self.spec.transformer_class,
            "lora": self._lora_shape(),
            "optimizer_steps": self.optimizer_steps,
            "skipped_steps": self.skipped_steps,
            "scheduler_step": self.lr_scheduler.last_epoch,
            "optimizer": optim.steps_of(self.optimizer, self.trainable),
            "tensors": tensors,
        }

    def _lora_shape(self) -> dict[str, int]:
        return {"rank": self.model_config.lora_rank, "alpha": self.model_config.lora_alpha}

    def _parts(self) -> list[str]:
        """Name prefixes of the transformers inside the module: one empty one, or Wan's two."""
        if self.model_config.transformer_config is not None or self.model_config.transformer_subfolder is not None:
            return [""]
        return list(self.spec.transformer_folders(self.model_config.path))


def _spec_of(config: DiffusionModelConfig) -> ModelSpec:
    from model_specs import get_spec, get_spec_for

    random_weights = config.transformer_config is not None and config.architecture is not None
    if not random_weights and config.path in ("", MISSING, None):
        raise EngineError("model.path is not set; give the folder of a diffusers pipeline (it holds model_index.json)")
    try:
        return get_spec(str(config.architecture)) if random_weights else get_spec_for(config.path, config.architecture)
    except ValueError as error:
        raise EngineError(f"model.architecture={config.architecture!r}, path={config.path!r}: {error}") from error
