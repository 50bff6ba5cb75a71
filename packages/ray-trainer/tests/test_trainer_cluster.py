"""Ray started here leaves nothing behind; a cluster is joined with and without a token; one that is gone is named soon."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray_trainer import cluster, group
from ray_trainer.compose import compose
from ray_trainer.config import RayConfig
from ray_trainer.errors import TrainerError

TINY = Path(str(files("flowgrpo"))) / "recipes" / "tiny_flow_grpo.yaml"

SESSION = """
import sys
from ray_trainer import cluster
from ray_trainer.cluster import prepare_environment, ray_session
prepare_environment()
cluster.JOIN_TIMEOUT_S = float(sys.argv[3])
from ray_trainer.config import RayConfig
from ray_trainer.errors import TrainerError
try:
    for _ in range(int(sys.argv[2])):
        with ray_session(RayConfig(address=sys.argv[1], num_cpus=2, object_store_mb=80)):
            import ray
            print("answer", ray.get(ray.remote(lambda: 6 * 7).remote()), flush=True)
            look = lambda: sorted(f"{k}={v}" for k, v in __import__("os").environ.items() if v.startswith("mark-"))
            for variable in ray.get(ray.remote(look).remote()):
                print(variable, flush=True)
except TrainerError as error:
    print(error, file=sys.stderr)
    raise SystemExit(2)
"""


def session(home, address="", times=1, patience=cluster.JOIN_TIMEOUT_S, **env):
    """(exit code, output, errors, seconds) of a program that opens Ray sessions with this home."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SESSION, address, str(times), str(patience)],
        env={**clean, "HOME": str(home), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr, time.monotonic() - start


@pytest.fixture(scope="module", autouse=True)
def nobody(tmp_path_factory):
    """What `session` gives, in the end, where no cluster answers: at a port that is closed, and at one where something listens."""
    home = tmp_path_factory.mktemp("nobody")
    with socket.socket() as silent, ThreadPoolExecutor() as beside:  # they only wait, while other tests run
        silent.bind(("127.0.0.1", 0))
        silent.listen(4)
        ports = {"closed": (1, 9), "silent": (silent.getsockname()[1], 7)}
        yield {
            name: (port, beside.submit(session, home, f"127.0.0.1:{port}", patience=patience))
            for name, (port, patience) in ports.items()
        }


def test_the_environment_names_the_cluster_too(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster.cluster_address(RayConfig()) == "10.0.0.1:6379"
    assert cluster.cluster_address(RayConfig(address="auto")) == "auto"
    assert cluster.cluster_address(RayConfig(address="local")) == ""


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """(home, address) of a cluster of one node that demands the token in that home."""
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("5e" * 32)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="drh-", dir="/tmp")  # short: sockets lie in it
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += ["--include-dashboard=false", "--num-cpus=1", "--object-store-memory=80000000", f"--temp-dir={folder}"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env = {**clean, "HOME": str(home), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    log = Path(folder) / "start.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while "started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield home, f"127.0.0.1:{port}"
    finally:
        started = [process, *psutil.Process(process.pid).children(recursive=True)]
        for one in reversed(started):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


GIVEN = ("HF_HOME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "WANDB_MODE", "https_proxy", "HTTPS_PROXY", "OPENAI_API_KEY")


@pytest.fixture(scope="module")
def joined(head):
    """What a session says that joined from where the token is, with these variables and some that are no cluster's business."""
    home, address = head
    given = {name: f"mark-{place}" for place, name in enumerate(GIVEN)}
    code, out, err, _ = session(home, address, AWS_SECRET_ACCESS_KEY="mark-no", GITHUB_TOKEN="mark-no", **given)
    assert code == 0, err
    return out.splitlines()


def test_a_cluster_with_a_token_is_joined_from_where_the_token_is(head, joined, tmp_path):
    assert joined[0] == "answer 42"
    code, out, err, _ = session(tmp_path, head[1], RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="5e" * 32)
    assert (code, out) == (0, "answer 42\n"), err


def test_a_joined_clusters_processes_get_the_variables_of_the_list_and_no_others(joined):
    assert joined[1:] == sorted(f"{name}=mark-{place}" for place, name in enumerate(GIVEN))


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


def test_a_missing_token_is_said(head, tmp_path):
    code, _, err, _ = session(tmp_path, head[1])
    assert code == 2
    assert "demands a token that this machine does not have" in err


@pytest.mark.parametrize("where", ["closed", "silent"])
def test_a_cluster_that_is_gone_is_one_line_within_half_a_minute(nobody, where):
    assert cluster.JOIN_TIMEOUT_S == 30
    port, done = nobody[where]
    code, _, err, seconds = done.result()
    assert code == 2
    assert f"no Ray cluster answers at ray.address='127.0.0.1:{port}'" in err
    assert err.count("\n") == 1
    assert seconds < 39  # 9 s for the answer; the rest is for a busy machine that starts Python


def test_the_object_store_must_fit_the_machine():
    cluster.check_ray(RayConfig(object_store_mb=256))
    cluster.check_ray(RayConfig(object_store_mb=10**8, address="auto"))  # the cluster's own is used
    with pytest.raises(TrainerError, match=rf"must be 75 to {cluster.memory_mb()}, the memory of this machine"):
        cluster.check_ray(RayConfig(object_store_mb=10**8))
