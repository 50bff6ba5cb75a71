"""The embedded backend: diffusers modules in this process, sharing weights with the trainer or owning a copy.

The velocity is the same `model_specs` function that the trainer calls, and the sampler the same `sde_samplers` function
that replays, so log-probs of rollout and trainer agree to the bit when their batch shapes do.

Shapes: B sample, W window step, K denoising step, S prompt token, C H W T pixels, "…" the model's latent layout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sde_samplers import SigmaSchedule, from_diffusers, rollout, thin_tail
from torch import Tensor, nn

from .backend import Health, WeightReceipt
from .batching import plan_batches
from .counting import counted_rows
from .errors import MissingExtraError, RolloutConfigError
from .lifecycle import Lifecycle
from .module_weights import AdapterContext, ModuleWeights
from .noise import clean_latents, generators_of, start_noise
from .packing import pack
from .types import DiffusionOutput, GenerationRequest, aborted


class _AllAbortedError(Exception):
    """Ends a batch early once each of its samples was cancelled."""


class DiffusersBackend:
    """Samples with diffusers modules.

    Args:
        spec: the architecture (`model_specs.ModelSpec`).
        transformer: the policy; PEFT adapters inside it are switched by `adapter_ctx`.
        encoder: `model_specs.PromptEncoder`; it encodes each distinct prompt once and remembers it.
        vae: decoder of the latents.
        scheduler: the pipeline's diffusers scheduler, from which the sigma grid comes.
        max_batch_size: samples denoised together.
        device: where the transformer is; latents are drawn on the CPU and moved.
        adapter_ctx: context manager that makes one adapter sample; None allows only "default", the module as it is.
        shares_weights: True when the trainer updates this very module: `update_lora` then only proves that the
            payload is what the module holds. False binds the payload.
    """

    def __init__(
        self,
        spec: Any,
        transformer: nn.Module,
        encoder: Any,
        vae: nn.Module,
        scheduler: Any,
        *,
        max_batch_size: int = 64,
        device: torch.device | str = "cpu",
        adapter_ctx: AdapterContext | None = None,
        shares_weights: bool = True,
    ) -> None:
        self.spec, self.transformer, self.encoder, self.vae, self.scheduler = spec, transformer, encoder, vae, scheduler
        self.max_batch_size = max_batch_size
        self.device = torch.device(device)
        self.shares_weights = shares_weights
        self._weights = ModuleWeights(transformer, shared=shares_weights, adapter_ctx=adapter_ctx)
        self._schedules: dict[tuple[int, ...], SigmaSchedule] = {}
        self._aborted: set[str] = set()
        self._running: set[str] = set()
        self._abort_lock = threading.Lock()
        self._generated = 0
        self._batches: dict[int, int] = {}
        self._seconds = {"encode": 0.0, "denoise": 0.0, "decode": 0.0, "sync": 0.0}
        self.lifecycle = Lifecycle()
        self.lifecycle.load()
        self.lifecycle.loaded()

    @classmethod
    def from_pretrained(
        cls, path: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", **options: Any
    ) -> DiffusersBackend:
        """A backend with its own weights, from a diffusers pipeline folder. `options` go to the constructor.

        Raises `MissingExtraError` without the extra that holds model_specs.
        """
        try:
            from model_specs import get_spec_for
        except ImportError as error:
            raise MissingExtraError(
                "The diffusers backend needs model-specs: pip install './packages/omni-rollout[diffusers]'"
            ) from error
        spec = get_spec_for(path)
        transformer = spec.load_transformer(path, dtype, device).eval().requires_grad_(False)
        parts = (spec.load_encoder(path, dtype, device), spec.load_vae(path, dtype, device), spec.load_scheduler(path))
        return cls(spec, transformer, *parts, device=device, **{"shares_weights": False, **options})

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample now; 0 before the first sync."""
        return self.lifecycle.policy_version

    # ------------------------------------------------------------------------------------------------ generation

    def generate(self, requests: Sequence[GenerationRequest]) -> list[DiffusionOutput]:
        """Draw the samples, one output per request and in their order.

        Compatible requests are batched in order, so equal calls give bitwise equal outputs.
        """
        from model_specs.errors import SpecError

        outputs: list[DiffusionOutput | None] = [None] * len(requests)
        with self.lifecycle.generating(len(requests)):
            ids = {request.request_id for request in requests}
            with self._abort_lock:
                self._running |= ids
            try:
                for positions in plan_batches(requests, self.max_batch_size):
                    batch = [requests[position] for position in positions]
                    for position, output in zip(positions, self._generate_batch(batch), strict=True):
                        outputs[position] = output
            except SpecError as error:  # a size or a prompt that this architecture does not take
                raise RolloutConfigError(str(error)) from error
            finally:
                with self._abort_lock:
                    self._running -= ids
                    self._aborted -= ids
        return [output for output in outputs if output is not None]

    def generate_sequences(self, requests: Sequence[GenerationRequest]) -> list[DiffusionOutput]:
        """`generate` under the name that replicas call on an actor."""
        return self.generate(requests)

    @torch.no_grad()
    def _generate_batch(self, batch: list[GenerationRequest]) -> list[DiffusionOutput]:
        first = batch[0]
        size = {"height": first.height, "width": first.width, "num_frames": first.num_frames}
        with self._timed("encode"):
            cond = self.encoder.encode([r.prompt for r in batch], first.max_sequence_length).to(self.device)
            negative = None
            if first.uses_cfg:
                texts = [r.negative_prompt or "" for r in batch]
                negative = self.encoder.encode(texts, first.max_sequence_length).to(self.device)
        schedule = self._schedule(first)
        try:
            # The count is of this batch alone: a trainer's own calls of a shared module lie outside the block.
            with self._timed("denoise"), self._sampling(first.adapter), counted_rows([self.transformer]) as count:
                trajectory = self._denoise(batch, schedule, cond, negative, size)
        except _AllAbortedError:
            return [aborted(request, self.policy_version) for request in batch]
        self._batches[len(batch)] = self._batches.get(len(batch), 0) + 1
        with self._timed("decode"):
            pictures = self.spec.decode(self.vae, trajectory.final, **size).cpu()
        stamps: dict[str, Any] = {"policy_version": self.policy_version, "forwards": count.rows / len(batch)}
        outputs = pack(batch, trajectory, pictures, schedule, cond=cond, negative=negative, **stamps)
        with self._abort_lock:
            dropped = {r.request_id for r in batch} & self._aborted
        self._generated += len(batch) - len(dropped)
        return [
            aborted(request, self.policy_version) if request.request_id in dropped else output
            for request, output in zip(batch, outputs, strict=True)
        ]

    def _denoise(
        self, batch: list[GenerationRequest], schedule: SigmaSchedule, cond: Any, negative: Any, size: dict[str, int]
    ) -> Any:
        first = batch[0]
        generators = generators_of(batch)
        shape = self.spec.latent_shape(first.height, first.width, first.num_frames)
        x = start_noise(batch, generators, shape).to(self.device)
        options = {"true_cfg_scale": first.true_cfg_scale, "guidance_scale": first.guidance_scale, **size}
        ids = {request.request_id for request in batch}

        def velocity(x_t: Tensor, sigma: Tensor) -> Tensor:
            if ids <= self._aborted:
                raise _AllAbortedError
            return self.spec.velocity(self.transformer, x_t, sigma, cond, negative=negative, **options)

        start, part = first.start_step, schedule
        if start:  # an edit: the given picture, noised to the level at which the run begins
            clean = torch.stack([clean_latents(request.init_latents, shape) for request in batch]).to(self.device)
            level = float(schedule.sigmas[start])
            x, part = (1 - level) * clean + level * x, SigmaSchedule(schedule.sigmas[start:])
        window = torch.tensor([r.window for r in batch], dtype=torch.long) - start if first.window else None
        names: dict[str, Any] = {"kind": first.kind, "solver": first.solver}  # checked when the requests were made
        names |= {"solver_steps": "post" if first.tail_ratio < 1 else "all", "return_means": first.return_means}
        return rollout(velocity, x, part, noise_level=first.noise_level, window=window, generators=generators, **names)

    def _schedule(self, request: GenerationRequest) -> SigmaSchedule:
        key = (request.num_inference_steps, request.height, request.width, request.num_frames)
        if key not in self._schedules:
            steps, *size = key
            keywords = self.spec.schedule_kwargs(self.scheduler, steps, *size)
            self._schedules[key] = from_diffusers(self.scheduler, steps, **keywords)
        full = self._schedules[key]
        return full if request.tail_ratio == 1 else thin_tail(full, request.window_end, request.tail_ratio)

    @contextmanager
    def _sampling(self, adapter: str) -> Iterator[None]:
        """The adapter switched on and the module in eval mode; both as they were afterwards."""
        training = self.transformer.training
        self.transformer.eval()
        try:
            with self._weights.using(adapter):
                yield
        finally:
            self.transformer.train(training)

    # --------------------------------------------------------------------------------------------------- weights

    def update_lora(self, payload: Any, adapter: str = "default") -> Any:
        """Bind a `LoRAPayload`, or prove that the shared module holds it already. Returns a `LoRAReceipt`.

        Several adapters may be sent at one version. Raises `SyncError` when a shared module's adapter differs.
        """
        with self.lifecycle.syncing(payload.version, lora=True), self._timed("sync"):
            return self._weights.bind(payload, adapter)

    def remove_lora(self, adapter: str = "default") -> bool:
        """Forget an adapter of our own; "default" then samples from the base. False when it was not there."""
        if not self._weights.has(adapter):
            return False
        with self.lifecycle.syncing(self.policy_version):
            self._weights.drop(adapter)
        return True

    def update_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> WeightReceipt:
        """Replace transformer weights by name. Every tensor sent must find its parameter."""
        with self.lifecycle.syncing(version, full=True), self._timed("sync"):
            return self._weights.replace(named, version)

    # ------------------------------------------------------------------------------------------------- lifecycle

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory back.

        The VAE and a transformer of our own go to the CPU, the text encoder is dropped.
        """
        self.lifecycle.sleep(level)
        self.encoder.unload()
        self.vae.to("cpu")
        if not self.shares_weights:
            self.transformer.to("cpu")

    def wake_up(self) -> None:
        """Bring the modules back."""
        self.vae.to(self.device)
        if not self.shares_weights:
            self.transformer.to(self.device)
        self.lifecycle.wake_up()

    def pause(self) -> None:
        """Refuse new requests."""
        self.lifecycle.pause()

    def resume(self) -> None:
        """Take requests again."""
        self.lifecycle.resume()

    def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Cancel requests of a `generate` that runs in another thread; their outputs come back as aborted."""
        with self._abort_lock:
            hit = set(self._running) if request_ids is None else self._running & set(request_ids)
            self._aborted |= hit
        return len(hit)

    def health(self) -> Health:
        """State, counters and time per phase."""
        life = self.lifecycle
        return Health(
            life.state.value,
            life.policy_version,
            life.in_flight,
            self._generated,
            dict(self._batches),
            dict(self._seconds),
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start
