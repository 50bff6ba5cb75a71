"""One vLLM-Omni engine on one node, as an asyncio object that a Ray actor (or a test) holds.

`vLLMOmniHttpServer` starts the engine, turns requests into samples with their trajectories, and changes weights under the
lifecycle's rules. Importing this module imports neither vllm nor vllm_omni; `launch_server` does.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..backend import Health, WeightReceipt
from ..config import DiffusionRolloutConfig
from ..errors import LifecycleError, ReplicaDeadError, ReplicaError, RolloutConfigError
from ..lifecycle import Lifecycle
from ..openai_api import ImageServer
from ..types import DiffusionOutput, GenerationRequest
from .engine_weights import EngineWeights
from .launch import start_engine
from .pipelines import entry_for
from .rpc import checked
from .tokens import Prompts
from .translate import engine_params, engine_prompt, rollout_output

if TYPE_CHECKING:
    from lora_sync import LoRAPayload, LoRAReceipt


class vLLMOmniHttpServer:
    """Args as in verl-omni.

    Args:
        config: the rollout configuration.
        model_config: has `path` (diffusers pipeline folder) and, optionally, `algorithm`.
        rollout_mode: "colocated" (weights are the checkpoint's from the start) or "standalone" (no generation before the
            first full sync).
        workers: handles of the trainer's workers; kept for callers, unused here.
        replica_rank, node_rank: where this engine stands among its like.
        gpus_per_node, nnodes: size of the machine; one engine stays on one node.
        cuda_visible_devices: the engine's GPUs; "" leaves the environment as it is.
    """

    def __init__(
        self,
        config: DiffusionRolloutConfig,
        model_config: Any,
        rollout_mode: str = "colocated",
        workers: Sequence[Any] = (),
        replica_rank: int = 0,
        node_rank: int = 0,
        gpus_per_node: int = 1,
        nnodes: int = 1,
        cuda_visible_devices: str = "",
    ) -> None:
        if nnodes != 1:
            raise RolloutConfigError(f"nnodes={nnodes!r}: one engine stays on one node; use more replicas instead.")
        self.config, self.model_config = config, model_config
        self.workers, self.replica_rank, self.node_rank = tuple(workers), replica_rank, node_rank
        self.gpus_per_node, self.cuda_visible_devices = gpus_per_node, cuda_visible_devices
        config.resolve_algorithm(model_config) if hasattr(model_config, "algorithm") else None
        self.entry = entry_for(model_config.path)
        index = json.loads((Path(model_config.path) / "model_index.json").read_text())
        self._boundary: float | None = index.get("boundary_ratio")  # Wan's two experts
        self.lifecycle = Lifecycle(needs_sync=rollout_mode == "standalone")
        self.engine: Any = None
        several = config.vllm_omni.tensor_model_parallel_size > 1
        self._weights = EngineWeights(self._rpc, self.lifecycle, use_shm=several)
        self._ids: set[str] = set()
        self._generated = 0
        self._sizes: Counter[int] = Counter()  # samples by the size of the batch they were drawn in
        self._seconds = {"start": 0.0, "generate": 0.0}
        self._prompts = Prompts(model_config.path, self.entry)
        self._busy_since = 0.0
        self._images: ImageServer | None = None

    @property
    def policy_version(self) -> int:
        """Version of the weights that sample now."""
        return self.lifecycle.policy_version

    # ---------------------------------------------------------------------------------------------------- start, stop

    async def launch_server(
        self, master_address: str | None = None, master_port: int | None = None, dp_rpc_port: int | None = None
    ) -> float:
        """Start the engine. Returns the seconds it took. `master_…` are for engines over several nodes: leave them out."""
        if master_address or master_port or dp_rpc_port:
            raise RolloutConfigError("an engine over several nodes is not offered: leave master_address and ports out.")
        self.lifecycle.load()
        start = time.perf_counter()
        try:
            self.engine = start_engine(
                self.config, self.model_config.path, self._algorithm(), self.cuda_visible_devices
            )
            await self._rpc("engine_facts")  # an engine that answers has its extension in place
        except Exception as error:
            self.lifecycle.fail(f"start failed: {error}")
            raise
        self.lifecycle.loaded()
        port = self.config.vllm_omni.openai_port
        if port is not None:
            name = Path(self.model_config.path).name
            self._images = ImageServer(_People(self), self.config.val_kwargs.pipeline, name)
            await self._images.start(port)
        self._seconds["start"] = time.perf_counter() - start
        return self._seconds["start"]

    def _algorithm(self) -> str:
        return getattr(self.model_config, "algorithm", None) or "flow_grpo"

    async def shutdown(self) -> None:
        """End the engine and its processes."""
        engine, self.engine = self.engine, None
        if self._images is not None:
            await self._images.close()
        self.lifecycle.fail("it was shut down")
        if engine is not None:
            engine.shutdown()

    # ----------------------------------------------------------------------------------------------------- generation

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        negative_prompt_ids: list[int] | None = None,
        priority: int = 0,
    ) -> DiffusionOutput:
        """Tokens in, picture out. `sampling_params` are the other fields of `GenerationRequest` (uid, index, seed, …)."""
        if image_data or video_data:
            raise RolloutConfigError("image_data and video_data are for editing models, which are not served here yet.")
        negative = None if negative_prompt_ids is None else self._prompts.text(negative_prompt_ids)
        fields = {"uid": request_id, "index": 0, "negative_prompt": negative, **sampling_params}
        request = GenerationRequest(
            request_id=request_id, prompt=self._prompts.text(prompt_ids), prompt_ids=tuple(prompt_ids), **fields
        )
        return await self.generate_one(request, priority=priority)

    async def generate_sequences(self, requests: Sequence[GenerationRequest]) -> list[DiffusionOutput]:
        """One output per request, in order; the engine batches them itself."""
        return list(await asyncio.gather(*(self.generate_one(request) for request in requests)))

    async def generate_one(self, request: GenerationRequest, priority: int = 0) -> DiffusionOutput:
        """One sample."""
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        for text in (request.prompt, request.negative_prompt if request.uses_cfg else None):
            if text is not None:
                self._prompts.check(text, request.max_sequence_length)
        fields = engine_params(request, self.entry, self._weights.adapters, self._boundary)
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
                    priority=priority,
                )
                async for output in stream:
                    final = output
            except Exception as error:
                raise await self._typed(error) from error
            finally:
                self._ids.discard(request.request_id)
                if self.lifecycle.in_flight == 1:  # this was the last: nothing overlaps any more
                    self._seconds["generate"] += time.perf_counter() - self._busy_since
        output = rollout_output(request, final, self.policy_version)
        if output.stop_reason == "completed":
            self._generated += 1
            self._sizes[int(output.extra_fields["batch_size"])] += 1
        return output

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

    async def update_lora(self, payload: LoRAPayload, adapter: str = "default") -> LoRAReceipt:
        """Bind an adapter from the trainer; the next samples use it. Several may be sent at one version.

        Raises `SyncError` unless every element arrived.
        """
        return await self._weights.bind(payload, adapter)

    async def remove_lora(self, adapter: str = "default") -> bool:
        """Forget an adapter: "default" then samples from the base. False when it was not there."""
        return await self._weights.drop(adapter)

    async def update_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> WeightReceipt:
        """Replace all transformer weights, bucket by bucket."""
        return await self._weights.replace(named, version)

    async def update_weights_bucket(
        self, bucket: list[tuple[str, Tensor]], version: int, *, first: bool, last: bool
    ) -> WeightReceipt | None:
        """One bucket of a full update; the receipt comes with the last. Generation is refused in between."""
        return await self._weights.replace_bucket(bucket, version, first=first, last=last)

    async def weights_sum(self) -> str:
        """Content sum of the transformer's base weights (see `weights.content_sum`)."""
        self._must_be("weights_sum", "ready", "paused", "syncing")
        return str(await self._rpc("weights_sum"))

    async def facts(self) -> dict[str, Any]:
        """What the worker says about itself: policy version, LoRA layers and ids, prompts in the cache."""
        self._must_be("facts", "ready", "paused", "syncing")
        facts: dict[str, Any] = await self._rpc("engine_facts")
        return facts

    # ------------------------------------------------------------------------------------------------------ lifecycle

    async def pause(self) -> None:
        """Refuse new requests and wait until those in flight are finished."""
        self.lifecycle.pause()
        while self.lifecycle.in_flight:
            await asyncio.sleep(0.002)
        await self.engine.pause_generation(mode="keep")

    async def resume(self) -> None:
        """Take requests again."""
        await self.engine.resume_generation()
        self.lifecycle.resume()

    async def sleep(self, level: int = 1) -> None:
        """Free the GPU; weights wait in host memory."""
        self.lifecycle.sleep(level)
        await self.engine.sleep(level=1)

    async def wake_up(self) -> None:
        """Weights back on the GPU."""
        self._must_be("wake_up", "asleep")
        await self.engine.wake_up()
        self.lifecycle.wake_up()

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Cancel requests; they come back as aborted. Returns how many were in flight."""
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


class _People:
    """The server as a client that takes whole requests, which `generate` (tokens in, picture out) does not."""

    def __init__(self, server: vLLMOmniHttpServer) -> None:
        self._server = server

    async def generate(self, request: GenerationRequest) -> DiffusionOutput:
        return await self._server.generate_one(request)
