"""One vLLM-Omni engine on one node, as an asyncio object that a Ray actor (or a test) holds.

`vLLMOmniHttpServer` starts the engine, turns requests into samples with their trajectories, and changes weights under the
lifecycle's rules. Importing this module imports neither vllm nor vllm_omni; `launch_server` does.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lora_sync import stream_weights
from torch import Tensor

from ..backend import Health
from ..config import DiffusionRolloutConfig
from ..errors import LifecycleError, ReplicaDeadError, ReplicaError, RolloutConfigError
from ..kept import with_latents
from ..lifecycle import Lifecycle
from ..openai_api import ImageServer
from ..samples import parted, stacked
from ..specs import spec_of
from ..types import GenerationRequest
from .cpu_platform import enabled
from .engine_weights import EngineWeights
from .launch import start_engine
from .rpc import checked
from .translate import engine_params, engine_prompt, sample_row

if TYPE_CHECKING:
    from lora_sync import LoRAPayload, LoRAReceipt, WeightBucket, WeightReceipt
    from lora_sync.one_copy import Layout, LentLoRA, Loan
    from lora_sync.transport import Link
    from tensordict import TensorDict


class vLLMOmniHttpServer:
    """The engine of one node; see the module.

    Args:
        config: the rollout configuration.
        path: diffusers pipeline folder.
        standalone: True forbids generation before the first full sync; False takes the checkpoint's weights as the policy's.
        cuda_visible_devices: the engine's GPUs, which a trainer shares; "" leaves the environment as it is.
    """

    def __init__(
        self, config: DiffusionRolloutConfig, path: str, *, standalone: bool = False, cuda_visible_devices: str = ""
    ) -> None:
        self.config, self.path, self.cuda_visible_devices = config, path, cuda_visible_devices
        self.spec = spec_of(path, config.architecture)
        self.lifecycle = Lifecycle(needs_sync=standalone)
        self.engine: Any = None
        several = config.vllm_omni.gpus > 1
        self._weights = EngineWeights(self._rpc, self.lifecycle, self.spec.lora_names, use_shm=several)
        self._ids: set[str] = set()
        self._generated = 0
        self._sizes: Counter[int] = Counter()  # samples by the size of the batch they were drawn in
        self._seconds = {"start": 0.0, "generate": 0.0}
        self._prompt_check: Callable[[str, int], None] | None = None
        self._busy_since = 0.0
        self._images: ImageServer | None = None

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample now."""
        return self.lifecycle.policy_version

    # ---------------------------------------------------------------------------------------------------- start, stop

    async def launch_server(self) -> float:
        """Start the engine. Returns the seconds it took."""
        self.lifecycle.load()
        start = time.perf_counter()
        try:
            self.engine = start_engine(self.config, self.path, self.spec, self.cuda_visible_devices)
            await self._rpc("engine_facts")  # an engine that answers has its extension in place
            if (
                self.cuda_visible_devices and self.config.vllm_omni.enable_sleep_mode is not False
            ):  # beside a trainer, where it will sleep
                await self._rpc("keep_host_copy")
        except Exception as error:
            self.lifecycle.fail(f"start failed: {error}")
            raise
        self.lifecycle.loaded()
        port = self.config.vllm_omni.openai_port
        if port is not None:
            self._images = ImageServer(self.generate, self.config.val_kwargs.pipeline, Path(self.path).name)
            await self._images.start(port)
        self._seconds["start"] = time.perf_counter() - start
        return self._seconds["start"]

    async def shutdown(self) -> None:
        """End the engine and its processes."""
        engine, self.engine = self.engine, None
        if self._images is not None:
            await self._images.close()
        self.lifecycle.fail("it was shut down")
        if engine is not None:
            engine.shutdown()

    # ----------------------------------------------------------------------------------------------------- generation

    async def generate(self, requests: Sequence[GenerationRequest]) -> TensorDict:
        """Their samples, in order, see `samples` for the keys; the engine batches what is in flight together."""
        tasks = [asyncio.ensure_future(self._draw(request)) for request in requests]
        try:
            return stacked(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def draw(
        self, requests: Sequence[GenerationRequest], owners: Sequence[int] = (), *latents: np.ndarray
    ) -> tuple[Any, ...]:
        """See `samples.parted`, and for the latents `kept.by_number`."""
        return parted(requests, await self.generate(with_latents(requests, latents)), owners)

    async def _draw(self, request: GenerationRequest) -> dict[str, Tensor]:
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        settings = request.settings
        for text in (request.prompt, request.negative_prompt if settings.guided else None):
            if text is not None:
                self._check_prompt(text, settings.max_sequence_length)
        fields = engine_params(request, self.spec, self._weights.adapters)
        final = None
        with self.lifecycle.generating():
            if self.lifecycle.in_flight == 1:
                self._busy_since = time.perf_counter()
            self._ids.add(request.request_id)
            try:
                stream = self.engine.generate(
                    prompt=engine_prompt(request),
                    request_id=request.request_id,
                    sampling_params_list=[OmniDiffusionSamplingParams(**fields)],
                )
                async for output in stream:
                    final = output
            except Exception as error:
                raise await self._typed(error) from error
            finally:
                self._ids.discard(request.request_id)
                if self.lifecycle.in_flight == 1:  # this was the last: nothing overlaps any more
                    self._seconds["generate"] += time.perf_counter() - self._busy_since
        row = sample_row(request, final)
        self._generated += 1
        self._sizes[int(row["batch_rows"])] += 1
        return row

    def _check_prompt(self, text: str, limit: int) -> None:
        """Raise `RolloutConfigError` for a prompt of more than `limit` tokens, alone and by name: the engine crops some in silence
        and fails the whole batch for others."""
        from model_specs import SpecError

        if self._prompt_check is None:
            self._prompt_check = lru_cache(maxsize=4096)(self.spec.prompt_check(self.path))
        try:
            self._prompt_check(text, limit)
        except SpecError as error:
            raise RolloutConfigError(str(error)) from error

    async def _typed(self, error: Exception) -> Exception:
        """The engine's error as one of ours; a dead engine ends this server."""
        if isinstance(error, (RolloutConfigError, ReplicaError, LifecycleError)):
            return error
        try:
            await self.engine.check_health()
        except Exception as dead:
            self.lifecycle.fail(f"the engine died: {dead}")
            return ReplicaDeadError(f"the engine died: {error}")
        return ReplicaError(f"the engine failed: {type(error).__name__}: {error}")

    # -------------------------------------------------------------------------------------------------------- weights

    async def update_lora(self, payload: LoRAPayload | LentLoRA, adapter: str = "default") -> LoRAReceipt:
        """Bind an adapter from the trainer; the next samples use it. Several may be sent at one version.

        Raises `SyncError` unless every element arrived.
        """
        return await self._weights.bind(payload, adapter)

    async def remove_lora(self, adapter: str = "default") -> bool:
        """Forget an adapter: "default" then samples from the base. False when it was not there."""
        return await self._weights.drop(adapter)

    async def update_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> WeightReceipt:
        """Replace all transformer weights, bucket by bucket."""
        return await self._weights.replace(stream_weights(named, version=version))

    async def update_weights_bucket(self, bucket: WeightBucket) -> WeightReceipt | None:
        """One bucket of a full update; the receipt comes with the last. Generation is refused in between."""
        return await self._weights.take(bucket)

    async def receive_weights(self, link: Link, number: int) -> WeightReceipt:
        """A full update that a trainer sends through `link`, to receiver `number` of it; it arrives in this process."""
        device = "cpu" if link.kind == "shared_memory" or enabled() else "cuda"
        transport = await asyncio.to_thread(link.receiver, number, device)
        with transport:
            while True:
                message: Any = await asyncio.to_thread(transport.receive)
                if receipt := await self._weights.take(message):
                    return receipt

    async def base_layout(self) -> dict[str, Layout]:
        """How the engine's base weights lie; see `borrow_base`."""
        self._must_be("base_layout", "ready")
        layout: dict[str, Layout] = await self._rpc("base_layout")
        return layout

    async def borrow_base(
        self, loans: dict[str, Loan], adapters: dict[str, dict[str, Loan]] | None = None
    ) -> tuple[int, int]:
        """Sample with the frozen weights of a trainer on the same device; (bytes shared, bytes of all base weights).

        Adapters that are lent too may come to `update_lora` as a `LentLoRA`.
        """
        self._must_be("borrow_base", "ready")
        shared, whole = await self._rpc("borrow_base", loans, adapters)
        return shared, whole

    async def weights_sum(self) -> str:
        """Content sum of the transformer's base weights (see `lora_sync.content_sum`)."""
        self._must_be("weights_sum", "ready", "syncing")
        return str(await self._rpc("weights_sum"))

    async def facts(self) -> dict[str, Any]:
        """What the worker says about itself: policy version, LoRA layers and ids, prompts in the cache."""
        self._must_be("facts", "ready", "syncing")
        facts: dict[str, Any] = await self._rpc("engine_facts")
        return facts

    # ------------------------------------------------------------------------------------------------------ lifecycle

    async def sleep(self) -> None:
        """Free the GPU; weights wait in host memory."""
        self.lifecycle.sleep()
        await self._rpc("put_weights_away")
        await self.engine.sleep(level=1)

    async def release_memory(self) -> None:
        """Give back what the last samples used on the GPU; weights stay."""
        self._must_be("release_memory", "ready")
        await self._rpc("release_memory")

    async def wake_up(self) -> None:
        """Weights back on the GPU."""
        self._must_be("wake_up", "asleep")
        await self.engine.wake_up()
        self.lifecycle.wake_up()

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Cancel requests: their call raises `AbortedError`. Returns how many were in flight."""
        ids = self._ids if request_ids is None else self._ids & set(request_ids)
        if ids:
            await self.engine.abort(list(ids))
        return len(ids)

    async def health(self) -> Health:
        """State and counters; marks the server failed when the engine is dead."""
        life = self.lifecycle
        if self.engine is not None:
            try:
                await self.engine.check_health()
            except Exception as error:
                life.fail(f"the engine died: {error}")
        return Health(
            life.state.value,
            life.policy_version,
            life.in_flight,
            self._generated,
            {size: round(samples / size) for size, samples in self._sizes.items()},
            self._seconds | {"sync": self._weights.seconds},
        )

    async def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def _must_be(self, what: str, *states: str) -> None:
        if (state := self.lifecycle.state.value) not in states:
            raise LifecycleError(f"{what} is refused: the engine is {state}, it must be {' or '.join(states)}.")

    async def _rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return checked(method, await self.engine.collective_rpc(method, args=args, kwargs=kwargs))
