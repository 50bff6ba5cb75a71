"""All replicas of a run as one: started where they fit, synced together, replaced when they die.

    fleet = await Fleet.launch(config, path)
    async for places, samples in fleet.router.stream(requests): ...
    receipts = await fleet.update_lora(payload)

A replica that is replaced gets the newest adapters before it takes a request, so that nobody samples from an old policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from .backend import RolloutBackend
from .config import DiffusionRolloutConfig
from .placement import Node, assign, cluster_nodes, import_ray, on_node
from .remote import ASIDE
from .replica import DiffusersReplica, Lend, Replica
from .router import Router

Send = Callable[[Sequence[Replica]], Awaitable[None]]
LendTo = Callable[[Node, str | None], Lend]
"""(node and GPUs of a replica) → what lends it the weights that lie there."""


class Fleet:
    """Use `launch`.

    Args:
        config: the rollout configuration.
        path: diffusers pipeline folder; one for all nodes, or by node id.
    """

    def __init__(self, config: DiffusionRolloutConfig, path: str | Mapping[str, str]) -> None:
        self.config, self.path = config, path
        self.router: Router
        self._send: Send | None = None
        self._lend: LendTo | None = None
        self._payloads: dict[str, tuple[Any, Any]] = {}
        self._base_syncs = 0
        self._asleep = False
        self._places: list[tuple[Node, str | None]] = []

    @classmethod
    async def launch(
        cls,
        config: DiffusionRolloutConfig,
        path: str | Mapping[str, str],
        *,
        cpus: float = 1.0,
        beside: Sequence[tuple[str, str]] | None = None,
    ) -> Fleet:
        """Start `config.num_replicas` replicas, or as many as find a GPU.

        Args:
            config, path: as for the constructor.
            cpus: CPU cores that Ray reserves for each replica.
            beside: (node id, GPU id) of GPUs that trainers hold already. Replicas then share them: they reserve no GPU in
                Ray, and each is given the next ones of a node, in order. None: GPUs of their own, placed by
                `config.placement`. Replicas that need no GPU are always placed so.

        Raises:
            RolloutConfigError: at once, when they do not fit, with what is missing.
        """
        fleet = cls(config, path)
        fleet._cpus = cpus
        fleet._places = assign(
            cluster_nodes(),
            config.num_replicas,
            gpus=fleet.gpus,
            cpus=cpus,
            strategy=config.placement,
            beside=beside if fleet.gpus else None,
        )
        replicas = await asyncio.gather(*(fleet._start(place) for place in range(len(fleet._places))))
        fleet.router = Router(replicas, config.router, restart=fleet._restart)
        return fleet

    _cpus: float = 1.0

    @property
    def gpus(self) -> int:
        """GPUs that one replica needs."""
        if self.config.backend == "diffusers":
            return 0 if self.config.device == "cpu" else 1
        from .vllm_omni.replica import vLLMOmniReplica

        return vLLMOmniReplica(self.config, "").gpus

    async def _start(self, place: int) -> Replica:
        node, devices = self._places[place]
        path = self.path if isinstance(self.path, str) else self.path[node.node_id]
        if self.config.backend == "vllm_omni":
            from .vllm_omni.replica import vLLMOmniReplica

            replica = vLLMOmniReplica(self.config, path, place, node=node, cpus=self._cpus, devices=devices)
            await replica.launch()
            return replica
        from .hosted import HostedDiffusersBackend

        ray = import_ray()
        actor = ray.remote(
            num_gpus=self.gpus if devices is None else 0,
            num_cpus=self._cpus,
            concurrency_groups={ASIDE: 1},
            scheduling_strategy=on_node(node),
        )(HostedDiffusersBackend)
        options = {
            "max_batch_size": self.config.max_batch_size,
            "fp8": self.config.fp8,
            "device": self.config.device,
            "architecture": self.config.architecture,
            "cuda_visible_devices": devices,
        }
        handle = actor.remote(path, self.config.dtype, **options)
        hosted = DiffusersReplica(handle, self.config.max_batch_size, name=f"diffusers-{place}")
        async with asyncio.timeout(self.config.router.start_timeout_s):
            await hosted.backend.call(RolloutBackend.health)  # queued behind the loading, whose errors come out here
        return hosted

    async def _restart(self, place: int) -> Replica:
        await self.router.replicas[place].close()
        replica = await self._start(place)
        if self._lend is not None:
            await replica.borrow_base(self._lend(*self._places[place]))
        await self._bring_up_to_date(replica)
        return replica

    async def _bring_up_to_date(self, replica: Replica) -> None:
        """Base weights, adapters and sleep, as the living replicas have them.

        What the fleet was sent while this one was starting went to the others alone, so it is asked again until nothing
        is left to do; there is no await between the last look and the return.
        """
        base, bound = 0, dict[str, Any]()
        while True:
            if base != self._base_syncs:
                base = self._base_syncs
                assert self._send is not None
                await self._send([replica])
                continue
            missing = [item for item in self._payloads.items() if bound.get(item[0]) is not item[1]]
            if missing:
                adapter, sent = min(missing, key=lambda item: item[1][0].version)  # a backend refuses to go back
                await self._bind(replica, sent, adapter)
                bound[adapter] = sent
                continue
            if self._asleep:  # the others gave their GPUs back meanwhile
                await replica.sleep()
                if not self._asleep:
                    await replica.wake_up()
                    continue
            return

    @staticmethod
    async def _bind(replica: Replica, sent: tuple[Any, Any], adapter: str) -> Any:
        from lora_sync import verify

        payload, reference = sent
        return verify(payload, await replica.update_lora(reference, adapter))

    # ----------------------------------------------------------------------------------------------------------- weights

    async def update_lora(self, payload: Any, adapter: str = "default", *, reference: Any = None) -> list[Any]:
        """Every replica gets the adapter between two requests, never during one.

        Args:
            payload: a `LoRAPayload`, or where a reference is given, its `Promise`.
            adapter: the name that requests ask for.
            reference: to the payload in Ray's store; without one it is put there, once for all replicas.

        Returns the verified receipts of the living; one that has died meanwhile gets the adapter when it is back.
        """
        sent = payload, import_ray().put(payload) if reference is None else reference
        await self.router.drain()
        try:
            self._payloads[adapter] = sent
            return await self.router.each(lambda replica: self._bind(replica, sent, adapter))
        finally:
            self.router.admit()

    async def update_weights(self, send: Send) -> None:
        """Every replica gets full weights between two requests, never during one.

        Args:
            send: gives them to some replicas and checks their receipts. It is kept for those that are started again later.
        """
        await self.router.drain()
        try:
            self._base_syncs += 1
            self._send = send
            await send(self.router.living())
        finally:
            self.router.admit()

    async def borrow_base(self, lend: LendTo) -> tuple[int, int]:
        """Let every replica, also one that is started again later, sample with a trainer's frozen weights where it has the same.

        Returns:
            Bytes that are shared, and bytes of all their base weights.
        """
        self._lend = lend
        homes = zip(self.router.replicas, self._places, strict=True)
        answers = await asyncio.gather(*(replica.borrow_base(lend(*place)) for replica, place in homes))
        return sum(shared for shared, _ in answers), sum(whole for _, whole in answers)

    @property
    def nodes(self) -> set[str]:
        """Ray's ids of the nodes that the replicas are on."""
        return {node.node_id for node, _ in self._places}

    async def release_memory(self) -> None:
        """Finish what is in flight, then give back what samples used of the GPUs."""
        await self.router.drain()
        try:
            await self.router.each(lambda replica: replica.release_memory())
        finally:
            self.router.admit()

    async def sleep(self) -> None:
        """Finish what is in flight, then give the GPUs back; requests wait until `wake_up`."""
        await self.router.drain()
        self._asleep = True
        await self.router.each(lambda replica: replica.sleep())

    async def wake_up(self) -> None:
        """Take the GPUs again and let requests through."""
        self._asleep = False
        await self.router.each(lambda replica: replica.wake_up())
        self.router.admit()

    async def close(self) -> None:
        """End all replicas."""
        for replica in self.router.replicas:
            await replica.close()
