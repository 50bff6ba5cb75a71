"""The embedded backend: diffusers modules in this process, sharing weights with the trainer or owning a copy.

The velocity is the same `model_specs` function that the trainer calls, and the sampler the same `sde_samplers` function
that replays, so log-probs of rollout and trainer agree to the bit when their batch shapes do.

Shapes: B sample, W window step, K denoising step, S prompt token, C H W T pixels, "…" the model's latent layout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lora_sync import WeightBucket, WeightReceipt, stream_weights
from lora_sync.transport import Link
from sde_samplers import SamplerSettings, SigmaSchedule, Trajectory, from_diffusers, rollout, thin_tail
from torch import Tensor, nn

from .backend import Health
from .batching import plan_batches
from .counting import counted_rows
from .errors import AbortedError, RolloutConfigError, SyncError
from .fp8 import fp8_weights
from .kept import with_latents
from .lifecycle import Lifecycle
from .module_weights import AdapterContext, ModuleWeights
from .noise import clean_latents, generators_of, start_noise
from .samples import Rows, denoised, given, in_order, parted
from .specs import spec_of
from .types import GenerationRequest

if TYPE_CHECKING:
    from tensordict import TensorDict


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
        sharers: processes that share the tokens of a sample (sequence parallelism), all of which make the same calls.
        shares_weights: True when the trainer updates this very module: `update_lora` then only proves that the
            payload is what the module holds. False binds the payload.
        fp8: sample with the frozen weights in fp8; see `fp8`.
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
        sharers: int = 1,
        shares_weights: bool = True,
        fp8: bool = False,
    ) -> None:
        self.spec, self.transformer, self.encoder, self.vae, self.scheduler = spec, transformer, encoder, vae, scheduler
        self.max_batch_size = max_batch_size
        self.device = torch.device(device)
        self.shares_weights, self.sharers = shares_weights, sharers
        self.fp8 = fp8
        self._weights = ModuleWeights(transformer, shared=shares_weights, adapter_ctx=adapter_ctx)
        self._stream = ExitStack()
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
        return cls(*load_parts(path, dtype, device), device=device, **{"shares_weights": False, **options})

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample now; 0 before the first sync."""
        return self.lifecycle.policy_version

    # ------------------------------------------------------------------------------------------------ generation

    def generate(self, requests: Sequence[GenerationRequest]) -> TensorDict:
        """Draw the samples, in the order of their requests; see `samples` for the keys.

        Compatible requests are batched in order, so equal calls give bitwise equal samples.

        Raises:
            RolloutConfigError: a size or a prompt that this architecture does not take, or requests of different shapes.
            AbortedError: some of them were cancelled meanwhile.
        """
        from model_specs.errors import SpecError

        ids = {request.request_id for request in requests}
        plan = plan_batches(requests, self.max_batch_size)
        with self.lifecycle.generating(len(requests)):
            with self._abort_lock:
                self._running |= ids
            try:
                return in_order([(places, self._generate_batch([requests[i] for i in places])) for places in plan])
            except SpecError as error:
                raise RolloutConfigError(str(error)) from error
            finally:
                with self._abort_lock:
                    self._running -= ids
                    self._aborted -= ids

    def draw(
        self, requests: Sequence[GenerationRequest], owners: Sequence[int] = (), *latents: np.ndarray
    ) -> tuple[Any, ...]:
        """See `samples.parted`, and for the latents `kept.by_number`."""
        return parted(requests, self.generate(with_latents(requests, latents)), owners)

    def clean(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        """Clean latents [...] fp32 of pictures or videos of one size, uint8 [3, H, W] or [T, 3, H, W] each."""
        with self._timed("encode"):
            return list(self.spec.encode(self.vae, torch.stack(list(pixels))).cpu())

    @torch.no_grad()
    def take(self, requests: Sequence[GenerationRequest], clean: Sequence[Tensor]) -> Rows:
        """Rows of pictures that are given, as if these requests, B of one kind of settings, had drawn their clean latents [...].

        Raises `RolloutConfigError` for a size that these settings do not have.
        """
        settings = requests[0].settings
        shape = self.spec.latent_shape(*_size(settings).values())
        for one in clean:
            if one.shape != shape:
                raise RolloutConfigError(
                    f"latents {tuple(one.shape)} do not fit {_size(settings)}, which needs {shape}."
                )
        with self._timed("encode"):
            cond = self._encode([request.prompt for request in requests], settings)
        return given(requests, torch.stack(list(clean)), self._schedule(settings), cond=cond, negative=None)

    @torch.no_grad()
    def _generate_batch(self, batch: list[GenerationRequest]) -> TensorDict:
        first, settings = batch[0], batch[0].settings
        with self._timed("encode"):
            cond = self._encode([request.prompt for request in batch], settings)
            negative = self._encode([r.negative_prompt or "" for r in batch], settings) if settings.guided else None
        schedule = self._schedule(settings)
        # The count is of this batch alone: a trainer's own calls of a shared module lie outside the block.
        with self._timed("denoise"), self._sampling(first.adapter), counted_rows([self.transformer]) as count:
            trajectory = self._denoise(batch, schedule, cond, negative)
        self._batches[len(batch)] = self._batches.get(len(batch), 0) + 1
        pictures = None
        if "pixels" in first.shown:
            with self._timed("decode"):
                # Copied in here, so that the wait for a GPU counts as decoding.
                pictures = self.spec.decode(self.vae, trajectory.final, **_size(settings)).cpu()
        self._generated += len(batch)
        stamps: dict[str, Any] = {"policy_version": self.policy_version, "forwards": count.rows / len(batch)}
        return denoised(batch, trajectory, pictures, schedule, cond=cond, negative=negative, **stamps)

    def _encode(self, texts: list[str], settings: SamplerSettings) -> Any:
        embeds = self.encoder.encode(texts, settings.max_sequence_length).to(self.device)
        return embeds.pad_to(-(-embeds.embeds.shape[1] // self.sharers) * self.sharers) if self.sharers > 1 else embeds

    def _denoise(self, batch: list[GenerationRequest], schedule: SigmaSchedule, cond: Any, negative: Any) -> Trajectory:
        settings = batch[0].settings
        generators = generators_of(batch)
        shape = self.spec.latent_shape(settings.height, settings.width, settings.num_frames)
        x = start_noise(batch, generators, shape).to(self.device)
        ids = {request.request_id for request in batch}

        def velocity(x_t: Tensor, sigma: Tensor) -> Tensor:
            if ids & self._aborted:
                raise AbortedError(f"{len(ids & self._aborted)} of {len(ids)} samples of a batch were cancelled.")
            return self.spec.velocity(self.transformer, x_t, sigma, cond, settings, negative)

        start, part = settings.start_step, schedule
        if start:  # an edit: the given picture, noised to the level at which the run begins
            clean = torch.stack([clean_latents(request.init_latents, shape) for request in batch]).to(self.device)
            level = float(schedule.sigmas[start])
            x, part = (1 - level) * clean + level * x, SigmaSchedule(schedule.sigmas[start:])
        windows = [request.settings.window for request in batch]
        return rollout(
            velocity,
            x,
            part,
            kind=settings.kind,
            noise_level=settings.noise_level,
            window=torch.tensor(windows, dtype=torch.long) - start if settings.window else None,
            generators=generators,
            solver=settings.solver,
            solver_steps="post" if settings.tail_ratio < 1 else "all",
            return_means=batch[0].return_means,
        )

    def _schedule(self, settings: SamplerSettings) -> SigmaSchedule:
        key = (settings.num_inference_steps, *_size(settings).values())
        if key not in self._schedules:
            keywords = self.spec.schedule_kwargs(self.scheduler, *key)
            self._schedules[key] = from_diffusers(self.scheduler, settings.num_inference_steps, **keywords)
        full = self._schedules[key]
        return full if settings.tail_ratio == 1 else thin_tail(full, settings.window_end, settings.tail_ratio)

    @contextmanager
    def _sampling(self, adapter: str) -> Iterator[None]:
        """The adapter switched on and the module in eval mode; both as they were afterwards."""
        training = self.transformer.training
        self.transformer.eval()
        try:
            with self._weights.using(adapter), fp8_weights(self.transformer) if self.fp8 else nullcontext():
                yield
        finally:
            self.transformer.train(training)

    # --------------------------------------------------------------------------------------------------- weights

    def update_lora(self, payload: Any, adapter: str = "default") -> Any:
        """Bind a `LoRAPayload`, or prove that the shared module holds it already. Returns a `LoRAReceipt`.

        Several adapters may be sent at one version. Raises `SyncError` when a shared module's adapter differs.
        """
        with self.lifecycle.syncing(payload.version), self._timed("sync"):
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
        return self._received(stream_weights(named, version=version))

    def update_weights_bucket(self, bucket: WeightBucket) -> WeightReceipt | None:
        """One message of a full update; the receipt comes with the last. Generation is refused in between."""
        if bucket.index == 0:
            self._stream = ExitStack()
            self._stream.enter_context(self.lifecycle.syncing(bucket.version, full=True))
        try:
            with self._timed("sync"):
                receipt = self._weights.take(bucket)
        except BaseException as error:
            self._stream.__exit__(type(error), error, error.__traceback__)
            raise
        if receipt is not None:
            self._stream.close()
        return receipt

    def receive_weights(self, link: Link, number: int) -> WeightReceipt:
        """A full update that a trainer sends through `link`, to receiver `number` of it."""
        with link.receiver(number, self.device) as transport:
            return self._received(iter(transport.receive, None))  # type: ignore[arg-type]

    def _received(self, stream: Iterable[WeightBucket]) -> WeightReceipt:
        for bucket in stream:
            if receipt := self.update_weights_bucket(bucket):
                return receipt
        raise SyncError("full weights: the stream ended without its last message; send it again.")

    def hold_weights(
        self, named: Iterable[tuple[str, Tensor]], version: int, adapter: str = "default", *, fold: bool = False
    ) -> WeightReceipt:
        """Prove that the trainer's own module samples with these weights; see `ModuleWeights.hold`."""
        with self.lifecycle.syncing(version, full=True), self._timed("sync"):
            return self._weights.hold(named, version, adapter, fold=fold)

    # ------------------------------------------------------------------------------------------------- lifecycle

    def release_memory(self) -> None:
        """Give back what the last samples used on the device; weights stay."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def sleep(self) -> None:
        """Give the device's memory back.

        The VAE and a transformer of our own go to the CPU, the text encoder is dropped.
        """
        self.lifecycle.sleep()
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

    def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Cancel requests of a `generate` that runs in another thread: it raises `AbortedError`."""
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


def load_parts(
    path: str, dtype: torch.dtype, device: torch.device | str, architecture: str | None = None
) -> tuple[Any, nn.Module, Any, nn.Module, Any]:
    """The first five arguments of `DiffusersBackend`, from a diffusers pipeline folder; `architecture` as for `spec_of`."""
    spec = spec_of(path, architecture)
    transformer = spec.load_transformer(path, dtype, device).eval().requires_grad_(False)
    return (
        spec,
        transformer,
        spec.load_encoder(path, dtype, device),
        spec.load_vae(path, dtype, device),
        spec.load_scheduler(path),
    )


def _size(settings: SamplerSettings) -> dict[str, int]:
    """Of the picture, in the order in which specs take it."""
    return {"height": settings.height, "width": settings.width, "num_frames": settings.num_frames}
