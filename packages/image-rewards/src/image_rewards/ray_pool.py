"""The few things that are asked of Ray: start an actor, kill it, reserve room for it."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from image_rewards.errors import RewardConfigError, RewardError, missing_extra


def import_ray() -> Any:
    """Import ray, with its hook for `uv run` off: that hook would give each worker an environment of its own."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    try:
        import ray
    except ImportError as error:
        raise missing_extra("ray", "ray", "RewardLoopManager") from error
    return ray


class Pool:
    """Starts actors of class `cls(*arguments)`, all with the same needs. Starts Ray on this machine when none runs."""

    def __init__(
        self,
        cls: type,
        arguments: tuple[Any, ...],
        *,
        num_workers: int,
        num_cpus: float,
        num_gpus: float,
        concurrency: int,
        placement_group: Any = None,
        own_pool: bool = False,
    ) -> None:
        if own_pool and placement_group is not None:
            raise RewardConfigError("own_pool=True and a placement_group exclude each other: say one.")
        ray = import_ray()
        self._own_ray = not ray.is_initialized()
        if self._own_ray:
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        self._arguments, self._group, self._own_group = arguments, placement_group, own_pool
        if own_pool:
            bundle = {"CPU": num_cpus, **({"GPU": num_gpus} if num_gpus else {})}
            self._group = ray.util.placement_group([bundle] * num_workers, strategy="PACK")
            ready, _ = ray.wait([self._group.ready()], timeout=60)
            if not ready:
                ray.util.remove_placement_group(self._group)
                raise RewardError(
                    f"Ray has no room for {num_workers} reward workers with {num_cpus} CPUs and {num_gpus} GPUs each. "
                    f"Free: {ray.available_resources()!r}. Ask for fewer, or share with placement_group=."
                )
        self._bundles = len(self._group.bundle_specs) if self._group is not None else 0
        self._actor = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_concurrency=concurrency)(cls)

    def start(self, index: int) -> Any:
        """Start worker `index` and return its handle at once; calls wait until it is up."""
        if self._group is None:
            return self._actor.remote(*self._arguments)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index % self._bundles)
        return self._actor.options(scheduling_strategy=strategy).remote(*self._arguments)

    def kill(self, actor: Any) -> None:
        """Kill a worker, dead or alive."""
        with contextlib.suppress(Exception):
            import_ray().kill(actor, no_restart=True)

    def stop(self, actors: list[Any]) -> None:
        """Kill all workers and give back what was reserved; ends Ray when this pool started it."""
        ray = import_ray()
        if not ray.is_initialized():
            return
        for actor in actors:
            self.kill(actor)
        if self._own_group:
            ray.util.remove_placement_group(self._group)
        if self._own_ray:
            ray.shutdown()
