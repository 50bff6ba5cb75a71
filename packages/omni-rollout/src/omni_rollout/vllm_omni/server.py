"""One vLLM-Omni engine on one node, as an asyncio object that a Ray actor (or a test) holds.

`vLLMOmniHttpServer` starts the engine, turns requests into samples with their trajectories, and changes weights under the
lifecycle's rules. Importing this module imports neither vllm nor vllm_omni; `launch_server` does.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..backend import Health, WeightReceipt
from ..config import DiffusionRolloutConfig
from ..errors import LifecycleError, MissingExtraError, ReplicaDeadError, ReplicaError, RolloutConfigError, SyncError
from ..lifecycle import Lifecycle
from ..types import DiffusionOutput, GenerationRequest, aborted
from .pipelines import entry_for, pipeline_for
from .rpc import checked
from .shared import buckets, write_bucket
from .tokens import Prompts

if TYPE_CHECKING:
    from lora_sync import LoRAPayload, LoRAReceipt

_EXTENSION = "omni_rollout.vllm_omni.worker_extension.vLLMOmniColocateWorkerExtension"
_BUCKET_BYTES = 512 * 1024 * 1024


class vLLMOmniHttpServer:
    """Args as in the system this design follows.

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
        self._adapters: dict[str, int] = {}
        self._lora_ids = itertools.count(1)
        self._ids: set[str] = set()
        self._generated = 0
        self._sizes: Counter[int] = Counter()  # samples by the size of the batch they were drawn in
        self._seconds = {"start": 0.0, "generate": 0.0, "sync": 0.0}
        self._stream = ExitStack()
        self._sent = 0
        self._prompts = Prompts(model_config.path, self.entry)
        self._busy_since = 0.0
        self._serving: asyncio.Future[None] | None = None

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
        settings = self.config.vllm_omni
        if self.cuda_visible_devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.cuda_visible_devices
        os.environ.setdefault("DIFFUSION_ATTENTION_BACKEND", settings.rollout_attn_backend)
        try:
            from vllm_omni import AsyncOmni
        except ImportError as error:
            self.lifecycle.fail("vllm-omni is not installed")
            raise MissingExtraError(
                "The vllm_omni backend needs vLLM-Omni: pip install './packages/omni-rollout[vllm]'"
            ) from error
        # The engine collects garbage again and again while it starts, each time over all that these imports made: set it
        # aside. A start takes a seventh of the time.
        gc.freeze()
        keywords: dict[str, Any] = {
            "dtype": self.config.dtype,
            "enforce_eager": settings.enforce_eager,
            "max_num_seqs": settings.max_num_seqs,
            "request_batch_max_wait_ms": settings.request_batch_max_wait_ms,
            "enable_sleep_mode": settings.enable_sleep_mode,
            "step_execution": settings.step_execution,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "custom_pipeline_args": {"pipeline_class": pipeline_for(self.model_config.path, self._algorithm())},
            "worker_extension_cls": _EXTENSION,
            "max_cpu_loras": 4,
            **settings.engine_kwargs,
        }
        if settings.tensor_model_parallel_size > 1:
            keywords["tensor_parallel_size"] = settings.tensor_model_parallel_size
        try:
            self.engine = AsyncOmni(model=self.model_config.path, **keywords)
            await self._rpc("engine_facts")  # an engine that answers has its extension in place
        except Exception as error:
            self.lifecycle.fail(f"start failed: {error}")
            raise
        self.lifecycle.loaded()
        if settings.openai_port is not None:
            self._serving = asyncio.ensure_future(self._serve(settings.openai_port))
        self._seconds["start"] = time.perf_counter() - start
        return self._seconds["start"]

    async def _serve(self, port: int) -> None:
        """The image route for people, on this machine only."""
        import uvicorn

        from ..openai_api import create_app

        app = create_app(_People(self), self.config.val_kwargs.pipeline, Path(self.model_config.path).name)
        await uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning")).serve()

    def _algorithm(self) -> str:
        return getattr(self.model_config, "algorithm", None) or "flow_grpo"

    async def shutdown(self) -> None:
        """End the engine and its processes."""
        engine, self.engine = self.engine, None
        if self._serving is not None:
            self._serving.cancel()
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
        params = OmniDiffusionSamplingParams(**self._params(request))
        prompt = {"prompt": request.prompt}
        if request.uses_cfg:
            prompt["negative_prompt"] = request.negative_prompt or ""
        final = None
        with self.lifecycle.generating():
            if self.lifecycle.in_flight == 1:
                self._busy_since = time.perf_counter()
            self._ids.add(request.request_id)
            try:
                stream = self.engine.generate(
                    prompt=prompt, request_id=request.request_id, sampling_params_list=[params], priority=priority
                )
                async for output in stream:
                    final = output
            except Exception as error:
                raise await self._typed(error) from error
            finally:
                self._ids.discard(request.request_id)
                if self.lifecycle.in_flight == 1:  # this was the last: nothing overlaps any more
                    self._seconds["generate"] += time.perf_counter() - self._busy_since
        return self._output(request, final)

    def _params(self, request: GenerationRequest) -> dict[str, Any]:
        from vllm_omni.lora.request import LoRARequest

        from .rollout_batch import KNOBS, Knobs

        knobs = Knobs(
            seed=request.seed,
            uid=request.uid,
            index=request.index,
            kind=request.kind,
            noise_level=request.noise_level,
            window=request.window,
            return_trajectory=request.return_trajectory,
            start_step=request.start_step,
            init_latents=request.init_latents,
            solver=request.solver,
            shared_noise=request.shared_noise,
            tail_ratio=request.tail_ratio,
        )
        cfg = request.true_cfg_scale
        guidance = cfg + self.entry.guidance_offset if self.entry.cfg_is_guidance else request.guidance_scale
        params: dict[str, Any] = {
            "height": request.height,
            "width": request.width,
            "num_frames": request.num_frames,
            "num_inference_steps": request.num_inference_steps,
            "max_sequence_length": request.max_sequence_length,
            "true_cfg_scale": cfg,
            "extra_args": {KNOBS: knobs},
        }
        if guidance is not None:
            params |= {"guidance_scale": guidance, "guidance_scale_provided": True}
        if self.entry.linear_sigmas:
            params["sigmas"] = torch.linspace(
                1.0, 1 / request.num_inference_steps, request.num_inference_steps
            ).tolist()
        if knobs.tail is not None:
            # Part of the engine's batching key, and read by none of these pipelines: rows that step over different tables
            # must not share a batch.
            params["decode_timestep"] = [float(value) for value in knobs.tail]
        if self._boundary is not None:
            params["boundary_ratio"] = self._boundary
        if request.adapter in self._adapters:
            number = self._adapters[request.adapter]
            params["lora_request"] = LoRARequest(request.adapter, number, f"/in-memory/{request.adapter}")
        elif request.adapter not in ("default", "reference"):
            known = ", ".join(sorted(self._adapters)) or "none"
            raise RolloutConfigError(f"adapter={request.adapter!r} was never sent to this engine; it has {known}.")
        return params

    def _output(self, request: GenerationRequest, final: Any) -> DiffusionOutput:
        if final is None:
            raise ReplicaError(f"the engine gave no answer to request {request.request_id!r}.")
        reasons = {getattr(part, "finish_reason", None) for part in final.outputs or []}
        if "abort" in reasons:
            return aborted(request, self.policy_version)
        if final.error:
            raise ReplicaError(f"request {request.request_id!r} failed in the engine: {final.error}")
        fields = dict(final.trajectory_log_probs or {})
        if not fields or not final.images:
            raise ReplicaError(f"request {request.request_id!r} came back without a trajectory or without a picture.")
        latents, W = final.trajectory_latents, len(request.window) if request.return_trajectory else 0
        fields["final_latents"] = latents[-1].clone()
        if W:
            fields |= {"latents": latents[:W].clone(), "next_latents": latents[W : 2 * W].clone()}
        fields["seed"] = request.seed
        log_probs = fields.pop("log_probs", None)
        self._generated += 1
        self._sizes[int(fields["batch_size"])] += 1
        return DiffusionOutput(_to_tensor(final.images, request), log_probs, "completed", 0, fields).check()

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
        """Bind an adapter from the trainer; the next samples use it. Raises `SyncError` unless every element arrived."""
        from lora_sync import LoRAReceipt

        from .lora_request import make_request

        with self.lifecycle.syncing(payload.version, lora=True):
            start = time.perf_counter()
            number = next(self._lora_ids)
            request = make_request(payload, number, adapter)
            facts = await self._rpc("bind_lora", request, payload.version)
            if facts["differing"]:
                await self._rpc("drop_lora", number)
                raise SyncError(
                    f"{facts['differing']} elements of adapter {adapter!r} read back different from the payload."
                )
            old = self._adapters.get(adapter)
            self._adapters[adapter] = number
            if old is not None:
                await self._rpc("drop_lora", old)
            self._seconds["sync"] += time.perf_counter() - start
            return LoRAReceipt(payload.version, payload.hash, facts["modules"], facts["tensors"], 0, None)

    async def remove_lora(self, adapter: str = "default") -> bool:
        """Forget an adapter: "default" then samples from the base. False when it was not there."""
        if adapter not in self._adapters:
            return False
        with self.lifecycle.syncing(self.policy_version):
            return bool(await self._rpc("drop_lora", self._adapters.pop(adapter)))

    async def update_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> WeightReceipt:
        """Replace all transformer weights, bucket by bucket."""
        receipt, first = None, True
        for bucket, last in buckets(named, _BUCKET_BYTES):
            receipt = await self.update_weights_bucket(bucket, version, first=first, last=last)
            first = False
        assert receipt is not None
        return receipt

    async def update_weights_bucket(
        self, bucket: list[tuple[str, Tensor]], version: int, *, first: bool, last: bool
    ) -> WeightReceipt | None:
        """One bucket of a full update; the receipt comes with the last. Generation is refused in between."""
        if first:
            self._stream.enter_context(self.lifecycle.syncing(version, full=True))
            self._sent = 0
        start = time.perf_counter()
        shm = self.config.vllm_omni.tensor_model_parallel_size > 1
        block = write_bucket(bucket) if shm else None
        options = {"use_shm": shm, "first": first, "last": last, "version": version}
        try:
            with ExitStack() as stack:
                if block is not None:
                    stack.callback(block.unlink)
                    stack.callback(block.close)
                facts = await self._rpc(
                    "update_weights_from_ipc", bucket=block.name if block is not None else bucket, **options
                )
            self._sent += len(bucket)
            if not last:
                return None
            if facts["unwritten"] or (facts["sent"] is not None and facts["sent"] != facts["held"]):
                raise SyncError(
                    f"full weights, version {version}: {facts['unwritten']} of {facts['elements']} elements were not "
                    f"written, sum sent {facts['sent']}, held {facts['held']}. The stream must hold every transformer "
                    "weight of this architecture exactly once."
                )
        except BaseException as error:
            self._stream.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            self._seconds["sync"] += time.perf_counter() - start
        self._stream.close()
        return WeightReceipt(version, self._sent, self._sent, facts["held"])

    async def weights_sum(self) -> str:
        """Content sum of the transformer's base weights (see `weights.content_sum`)."""
        self._awake("weights_sum")
        return str(await self._rpc("weights_sum"))

    async def facts(self) -> dict[str, Any]:
        """What the worker says about itself: policy version, LoRA layers and ids, prompts in the cache."""
        self._awake("facts")
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
        self._asleep()
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
            dict(self._seconds),
        )

    def _awake(self, what: str) -> None:
        if self.lifecycle.state.value not in ("ready", "paused", "syncing"):
            raise LifecycleError(f"{what} is refused: the engine is {self.lifecycle.state.value}.")

    def _asleep(self) -> None:
        if self.lifecycle.state.value != "asleep":
            raise LifecycleError(f"wake_up is refused: the engine is {self.lifecycle.state.value}, it must be asleep.")

    async def _rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return checked(method, await self.engine.collective_rpc(method, args=args, kwargs=kwargs))


class _People:
    """The server as a client that takes whole requests, which `generate` (tokens in, picture out) does not."""

    def __init__(self, server: vLLMOmniHttpServer) -> None:
        self._server = server

    async def generate(self, request: GenerationRequest) -> DiffusionOutput:
        return await self._server.generate_one(request)


def _to_tensor(images: list[Any], request: GenerationRequest) -> Tensor:
    """What the engine calls images to uint8 [C, H, W] or [T, C, H, W]: PIL pictures, or one array of frames in [0, 1]."""
    frames = np.stack([np.array(image) for image in images])
    frames = frames[0] if frames.ndim == 6 else frames  # a list of one batch of one video
    frames = frames[0] if frames.ndim == 5 else frames
    if frames.dtype != np.uint8:
        frames = (frames * 255).round().clip(0, 255).astype(np.uint8)
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()
    return pixels[0] if request.num_frames == 1 else pixels
