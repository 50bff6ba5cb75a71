"""`vLLMOmniReplica`: boots one engine in a Ray actor and forwards what a driver asks of it."""

from __future__ import annotations

import asyncio
import os

from ..config import DiffusionRolloutConfig
from ..errors import ReplicaDeadError
from ..placement import Node, assign, cluster_nodes, import_ray, on_node
from ..remote import Remote
from ..replica import Lend, Replica
from .server import vLLMOmniHttpServer


class vLLMOmniReplica(Replica):
    """One engine, seen from the driver. `await launch()` before anything else.

    Args:
        config, path: as for `vLLMOmniHttpServer`.
        number: of the replica.
        node: where the engine runs; None picks one with enough free.
        cpus: CPU cores that the actor reserves.
        devices: GPU ids on `node` that the engine shares with a trainer ("0" or "0,1"); it then reserves none in Ray.
    """

    def __init__(
        self,
        config: DiffusionRolloutConfig,
        path: str,
        number: int = 0,
        *,
        node: Node | None = None,
        cpus: float = 1.0,
        devices: str | None = None,
    ) -> None:
        self.config, self.path, self.node, self.cpus, self.devices = config, path, node, cpus, devices
        self.remote = None
        self.name, self.batch_size = f"vllm-omni-{number}", config.vllm_omni.max_num_seqs

    server_class: type[vLLMOmniHttpServer] = vLLMOmniHttpServer
    """What the actor is made of."""

    @property
    def gpus(self) -> int:
        """GPUs that the engine needs: one per tensor-parallel rank, none on the CPU platform."""
        return 0 if self._on_cpu() else self.config.vllm_omni.gpus

    @staticmethod
    def _on_cpu() -> bool:
        return os.environ.get("OMNI_ROLLOUT_CPU") == "1"

    async def launch(self) -> None:
        """Start the actor and its engine. Raises `RolloutConfigError` at once when the cluster has not enough."""
        ray = import_ray()
        node = self.node or assign(cluster_nodes(), 1, gpus=self.gpus, cpus=self.cpus)[0][0]
        variables = {name: os.environ[name] for name in ("OMNI_ROLLOUT_CPU", "OMP_NUM_THREADS") if name in os.environ}
        actor = ray.remote(self.server_class).options(
            num_gpus=self.gpus if self.devices is None else 0,
            num_cpus=self.cpus,
            max_concurrency=10_000,  # requests are coroutines: the engine batches them, the router bounds them
            scheduling_strategy=on_node(node),
            runtime_env={"env_vars": variables} if variables else None,
        )
        handle = actor.remote(self.config, self.path, cuda_visible_devices=self.devices or "")
        server = Remote(handle, self.name, asynchronous=True)
        limit = self.config.router.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                await server.call(vLLMOmniHttpServer.launch_server)
        except TimeoutError as error:
            ray.kill(handle)
            raise ReplicaDeadError(f"{self.name} did not start in {limit} s.") from error
        self.remote = server

    async def borrow_base(self, lend: Lend) -> tuple[int, int]:
        """See `vLLMOmniHttpServer.borrow_base`. An engine over several GPUs holds parts, and keeps its own."""
        if self.config.vllm_omni.gpus > 1:
            return 0, 0
        loans, adapters = await lend(await self.backend.call(vLLMOmniHttpServer.base_layout))
        return await self.backend.call(vLLMOmniHttpServer.borrow_base, loans, adapters)

    async def close(self) -> None:
        """End the engine and its actor."""
        remote, self.remote = self.remote, None
        if remote is None:
            return
        try:
            async with asyncio.timeout(10):
                await remote.call(vLLMOmniHttpServer.shutdown)
        except Exception:  # it may be dead already; the kill below settles it either way
            pass
        finally:
            import_ray().kill(remote.actor)
