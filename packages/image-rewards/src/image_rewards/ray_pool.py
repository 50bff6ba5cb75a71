"""The few things that are asked of Ray: start an actor, kill it."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from image_rewards.errors import missing_extra


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
        num_cpus: float,
        num_gpus: float,
        concurrency: int,
        placement_group: Any = None,
    ) -> None:
        ray = import_ray()
        self._own_ray = not ray.is_initialized()
        if self._own_ray:
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        self._arguments, self._group = arguments, placement_group
        self._actor = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_concurrency=concurrency)(cls)

    def start(self, index: int) -> Any:
        """Start worker `index` and return its handle at once; calls wait until it is up."""
        if self._group is None:
            return self._actor.remote(*self._arguments)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = index % len(self._group.bundle_specs)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return self._actor.options(scheduling_strategy=strategy).remote(*self._arguments)

    def kill(self, actor: Any) -> None:
        """Kill a worker, dead or alive."""
        with contextlib.suppress(Exception):
            import_ray().kill(actor, no_restart=True)

    def stop(self, actors: list[Any]) -> None:
        """Kill all workers; ends Ray when this pool started it."""
        ray = import_ray()
        if not ray.is_initialized():
            return
        for actor in actors:
            self.kill(actor)
        if self._own_ray:
            ray.shutdown()
