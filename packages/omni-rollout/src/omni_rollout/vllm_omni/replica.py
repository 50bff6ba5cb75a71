"""`vLLMOmniReplica`: boots one engine in a Ray actor and forwards what a driver asks of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..backend import WeightReceipt
from ..config import DiffusionRolloutConfig
from ..errors import ReplicaDeadError
from ..placement import Node, assign_nodes, cluster_nodes, import_ray, on_node
from ..replica import Replica, typed_error
from ..types import DiffusionOutput, GenerationRequest
from .server import vLLMOmniHttpServer
from .shared import buckets

_BUCKET_BYTES = 256 * 1024 * 1024


class vLLMOmniReplica(Replica):
    """One engine, seen from the driver. `await launch()` before anything else.

    Args:
        config, model_config: as for `vLLMOmniHttpServer`.
        replica_rank: number of the replica.
        rollout_mode: "colocated" or "standalone".
        node: where the engine runs; None picks one with enough free.
        cpus: CPU cores that the actor reserves.
        devices: GPU ids on `node` that the engine shares with a trainer ("0" or "0,1"); it then reserves none in Ray.
        handle: an actor that exists already (its `launch_server` done), instead of a new one.
    """

    def __init__(
        self,
        config: DiffusionRolloutConfig,
        model_config: Any,
        replica_rank: int = 0,
        *,
        rollout_mode: str = "colocated",
        node: Node | None = None,
        cpus: float = 1.0,
        devices: str | None = None,
        handle: Any = None,
    ) -> None:
        self.config, self.model_config, self.replica_rank = config, model_config, replica_rank
        self.rollout_mode, self.node, self.cpus, self.handle = rollout_mode, node, cpus, handle
        self.devices = devices
        self.name = f"vllm-omni-{replica_rank}"

    server_class: type[vLLMOmniHttpServer] = vLLMOmniHttpServer
    """What the actor is made of."""

    @property
    def gpus(self) -> int:
        """GPUs that the engine needs: one per tensor-parallel rank, none on the CPU platform."""
        return 0 if self._on_cpu() else self.config.vllm_omni.tensor_model_parallel_size

    @staticmethod
    def _on_cpu() -> bool:
        return os.environ.get("OMNI_ROLLOUT_CPU") == "1"

    async def launch(self) -> None:
        """Start the actor and its engine. Raises `RolloutConfigError` at once when the cluster has not enough."""
        ray = import_ray()
        node = self.node or assign_nodes(cluster_nodes(), 1, gpus=self.gpus, cpus=self.cpus)[0]
        variables = {name: os.environ[name] for name in ("OMNI_ROLLOUT_CPU", "OMP_NUM_THREADS") if name in os.environ}
        actor = ray.remote(self.server_class).options(
            num_gpus=self.gpus if self.devices is None else 0,
            num_cpus=self.cpus,
            max_concurrency=10_000,  # requests are coroutines: the engine batches them, the router bounds them
            scheduling_strategy=on_node(node),
            runtime_env={"env_vars": variables} if variables else None,
        )
        gpus_per_node = max(self.gpus, 1)
        self.handle = actor.remote(
            self.config,
            self.model_config,
            self.rollout_mode,
            (),
            self.replica_rank,
            0,
            gpus_per_node,
            1,
            self.devices or "",
        )
        limit = self.config.router.start_timeout_s
        try:
            await asyncio.wait_for(_await(self.handle.launch_server.remote()), limit)
        except TimeoutError as error:
            ray.kill(self.handle)
            raise ReplicaDeadError(f"{self.name} did not start in {limit} s.") from error
        except Exception as error:
            raise typed_error(self.name, error) from error

    async def generate(self, request: GenerationRequest) -> DiffusionOutput:
        """One sample; the engine batches what is in flight together."""
        output: DiffusionOutput = await self.call("generate_one", request)
        return output

    async def update_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> WeightReceipt:
        """Replace all transformer weights, bucket by bucket, so that neither side holds them twice."""
        receipt, first = None, True
        for bucket, last in buckets(named, _BUCKET_BYTES):
            receipt = await self.call("update_weights_bucket", bucket, version, first=first, last=last)
            first = False
        assert receipt is not None
        return receipt

    async def close(self) -> None:
        """End the engine and its actor."""
        if self.handle is None:
            return
        handle, self.handle = self.handle, None
        try:
            await asyncio.wait_for(_await(handle.shutdown.remote()), 10)
        except Exception:  # it may be dead already; the kill below settles it either way
            pass
        finally:
            import_ray().kill(handle)


async def _await(reference: Any) -> Any:
    """Ray's references are awaitable but are no coroutines, which wait_for wants."""
    return await reference
