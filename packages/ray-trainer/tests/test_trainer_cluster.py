"""What is asked of a cluster, and in which order. One that is joined: `tests/test_cluster.py`."""

from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray_trainer import cluster, group
from ray_trainer.compose import compose
from ray_trainer.config import RayConfig
from ray_trainer.errors import TrainerError

TINY = Path(str(files("flowgrpo"))) / "recipes" / "tiny_flow_grpo.yaml"


def test_the_environment_names_the_cluster_too(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster.cluster_address(RayConfig()) == "10.0.0.1:6379"
    assert cluster.cluster_address(RayConfig(address="auto")) == "auto"
    assert cluster.cluster_address(RayConfig(address="local")) == ""


def test_one_process_of_each_machine_fetches_the_model_before_all_of_them_load_it(monkeypatch):
    """Five processes on three machines; they meet at the first one's."""
    asked, config = [], compose("flowgrpo", TINY, ["trainer.num_workers=5"])
    nodes, placed = ["a", "a", "b", "c", "c"], SimpleNamespace(sharding="replicate")
    gang = SimpleNamespace(nodes=nodes, machines=[], strategy=lambda rank: nodes[rank], release=lambda: None)

    def handle(config, rank, world_size):
        def submit(method, *arguments):
            asked.append((method.__name__, rank, arguments))
            return 1.0

        return SimpleNamespace(submit=submit)

    monkeypatch.setattr(group, "reserve", lambda config, cpus: (gang, False))
    monkeypatch.setattr(group, "place", lambda config, machines, needs, card: placed)
    monkeypatch.setattr(group, "Remote", lambda actor, name: actor)
    options = SimpleNamespace(options=lambda scheduling_strategy: SimpleNamespace(remote=handle))
    monkeypatch.setattr(ray, "remote", lambda **needs: lambda kind: options)
    monkeypatch.setattr(ray, "get", lambda references: references)
    group.WorkerGroup(config)
    assert [rank for name, rank, _ in asked if name == "needs"] == [0, 2, 3]
    assert [rank for name, rank, _ in asked if name == "meeting_point"] == [0]
    order = [name for name, _, _ in asked]
    assert order.index("init_model") > max(place for place, name in enumerate(order) if name == "needs")
    assert [(rank, arguments) for name, rank, arguments in asked if name == "init_model"] == [
        (rank, (1.0, placed)) for rank in range(5)
    ]


def test_the_object_store_must_fit_the_machine():
    cluster.check_ray(RayConfig(object_store_mb=256))
    cluster.check_ray(RayConfig(object_store_mb=10**8, address="auto"))  # the cluster's own is used
    with pytest.raises(TrainerError, match=rf"must be 75 to {cluster.memory_mb()}, the memory of this machine"):
        cluster.check_ray(RayConfig(object_store_mb=10**8))
