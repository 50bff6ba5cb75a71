"""The README's cluster command, on a cluster that was started from another folder by a person who has a token and no history.

Who joins must have the token. A cluster that does not answer is named soon.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
import yaml
from flowgrpo.cli import main
from ray_trainer.assets import builtin
from ray_trainer.cluster import JOIN_TIMEOUT_S

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "5e" * 32
# As small as the command can be made without changing what it does.
SMALL = [
    "trainer.num_workers=2",
    "actor.fsdp_config.device=cpu",
    "trainer.total_steps=1",
    "trainer.save_every=1",
    "rollout.pipeline.height=64",
    "rollout.pipeline.width=64",
    "rollout.val_kwargs.pipeline.num_inference_steps=6",
    "rollout.pipeline.true_cfg_scale=1.0",
    "rollout.n=2",
    "data.prompts_per_step=2",
    "data.val_max_prompts=2",
    "actor.ppo_mini_batch_size=4",
    "reward.num_workers=1",
    "reward.num_cpus=0.1",
]


def readme_command():
    """The arguments of `uv run apps/flowgrpo …` in the cluster part of the README."""
    part = (ROOT / "README.md").read_text(encoding="utf-8").split("## On a GPU cluster")[1].split("\n## ")[0]
    command = re.search(r"uv run apps/flowgrpo ((?:.*\\\n)*.*)", part)[1].replace("\\\n", " ")
    return shlex.split(command, comments=True)


@pytest.fixture
def here(tmp_path):
    """A folder with a prompt file, as a person has it, and the shipped model in the place of the named one."""
    folder = tmp_path / "work"
    folder.mkdir()
    lines = [json.dumps({"prompt": f"{number} red circles on a white background"}) for number in range(20)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    arguments = [a for a in readme_command() if not a.startswith("model.path=")]
    assert len(arguments) < len(readme_command())
    return folder, [*arguments, f"model.path={builtin('models', 'tiny_qwen_image')}"]


def test_the_readmes_command_dry_runs_as_written(here, monkeypatch, capsys):
    folder, arguments = here
    monkeypatch.chdir(folder)
    assert main(["--dry-run", *arguments]) == 0
    plan = capsys.readouterr().out
    assert "2 held-out prompts of prompts.jsonl" in plan
    assert "warning" not in plan
    for line in (
        "enable_gradient_checkpointing: true",
        "old_log_probs: trainer",
        "lr: 0.0003",
        f"run folder {folder}/runs/",
    ):
        assert line in plan


def test_the_cluster_pages_scripts_and_its_rayjob_are_whole(here, monkeypatch, capsys):
    """Bash that parses, YAML that parses, and commands whose keys and values are accepted."""
    folder, _ = here
    monkeypatch.chdir(folder)
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    scripts = re.findall(r"```(?:bash)?\n(.*?)```", page, re.S)
    job = yaml.safe_load((ROOT / "docs" / "rayjob.yaml").read_text(encoding="utf-8"))
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == ray.__version__
    assert not set("&|;<>") & set(job["spec"]["entrypoint"])  # KubeRay writes it into a shell without quotes
    for script in (*scripts, job["spec"]["entrypoint"]):
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert "uv run" not in script or checked.returncode == 0, checked.stderr
    text = "\n".join((*scripts, job["spec"]["entrypoint"])).replace("\\\n", " ")
    text = text.replace("…", "recipe=full_size reward.name=jpeg_compressibility")  # what the loop does not repeat
    commands = re.findall(r"uv run (?:--directory \S+ )?apps/flowgrpo (.*)", text)
    assert len(commands) == 4
    for command in commands:
        words = shlex.split(command.replace("$gpus", "16").replace("$address", "10.0.0.1"), comments=True)
        keys = [w for w in words if "=" in w and not w.startswith(("model.path=", "data.train_file="))]
        small = [f"model.path={builtin('models', 'tiny_qwen_image')}", "data.train_file=prompts.jsonl"]
        assert main(["--dry-run", *keys, *small]) == 0, capsys.readouterr()


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """`ray start --head` in a folder of its own with a new HOME and its token; (address, environment). Its workers are forks."""
    place = tmp_path_factory.mktemp("elsewhere")
    (place / ".ray").mkdir()
    (place / ".ray" / "auth_token").write_text(TOKEN)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"HOME": str(place)}
    temp = Path("/tmp") / f"ray-test-{os.getpid()}"  # not in pytest's folder, whose path is too long for Ray's sockets
    options = {
        "port": free_port(),
        "ray-client-server-port": free_port(),
        "include-dashboard": "false",
        "num-cpus": 4,
        "object-store-memory": 200_000_000,
        "temp-dir": temp,
    }
    ray = [sys.executable, ROOT / "tests" / "forks.py", "ray"]
    process = subprocess.Popen(
        [*ray, "start", "--head", "--block", "--disable-usage-stats", *(f"--{k}={value}" for k, value in options.items())],
        cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    address = None
    deadline = time.monotonic() + 120
    for line in process.stdout:
        assert time.monotonic() < deadline
        if found := re.search(r"--address='([^']+)'", line):
            address = found[1]
            break
    assert address, "ray start did not come up"
    yield address, environment
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    shutil.rmtree(temp, ignore_errors=True)
    assert [
        p.name for p in place.iterdir() if not p.name.startswith(".")
    ] == []  # nothing was written where the raylet lives


SESSION = """
import sys
from ray_trainer import cluster
from ray_trainer.cluster import prepare_environment, ray_session
prepare_environment()
cluster.JOIN_TIMEOUT_S = float(sys.argv[2])
from ray_trainer.config import RayConfig
from ray_trainer.errors import TrainerError
try:
    with ray_session(RayConfig(address=sys.argv[1])):
        import ray
        print("answer", ray.get(ray.remote(lambda: 6 * 7).remote()), flush=True)
        look = lambda: sorted(f"{k}={v}" for k, v in __import__("os").environ.items() if v.startswith("mark-"))
        for variable in ray.get(ray.remote(look).remote()):
            print(variable, flush=True)
except TrainerError as error:
    print(error, file=sys.stderr)
    raise SystemExit(2)
"""


def session(home, address, patience=JOIN_TIMEOUT_S, **env):
    """(exit code, output, errors, seconds) of a program that joins a cluster with this home."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", SESSION, address, str(patience)],
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


GIVEN = ("HF_HOME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "WANDB_MODE", "https_proxy", "HTTPS_PROXY", "OPENAI_API_KEY")


@pytest.fixture(scope="module")
def joined(cluster):
    """What a session says that joined from where the token is, with these variables and some that are no cluster's business."""
    address, environment = cluster
    given = {name: f"mark-{place}" for place, name in enumerate(GIVEN)}
    others = {"AWS_SECRET_ACCESS_KEY": "mark-no", "GITHUB_TOKEN": "mark-no"}
    code, out, err, _ = session(environment["HOME"], address, **others, **given)
    assert code == 0, err
    return out.splitlines()


def test_a_cluster_with_a_token_is_joined_from_where_the_token_is(cluster, joined, tmp_path):
    assert joined[0] == "answer 42"
    code, out, err, _ = session(tmp_path, cluster[0], RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN)
    assert (code, out) == (0, "answer 42\n"), err


def test_a_joined_clusters_processes_get_the_variables_of_the_list_and_no_others(joined):
    assert joined[1:] == sorted(f"{name}=mark-{place}" for place, name in enumerate(GIVEN))


def test_a_missing_token_is_said(cluster, tmp_path):
    code, _, err, _ = session(tmp_path, cluster[0])
    assert code == 2
    assert "demands a token that this machine does not have" in err


@pytest.mark.parametrize("where", ["closed", "silent"])
def test_a_cluster_that_is_gone_is_one_line_within_half_a_minute(nobody, where):
    assert JOIN_TIMEOUT_S == 30
    port, done = nobody[where]
    code, _, err, seconds = done.result()
    assert code == 2
    assert f"no Ray cluster answers at ray.address='127.0.0.1:{port}'" in err
    assert err.count("\n") == 1
    assert seconds < 39  # 9 s for the answer; the rest is for a busy machine that starts Python


def test_the_readmes_command_trains_on_a_cluster_from_another_folder(here, cluster, forked):
    folder, arguments = here
    address, environment = cluster
    arguments = [a for a in arguments if not a.startswith("ray.address=")]
    command = [ROOT / "apps" / "flowgrpo", *arguments, f"ray.address={address}", *SMALL]
    program = forked(command, env=environment, cwd=folder)
    out, err = program.communicate(timeout=400)
    assert program.returncode == 0, out[-2000:] + err[-4000:]
    (run,) = (folder / "runs").iterdir()
    assert json.loads((run / "checkpoints" / "latest.json").read_text()) == {"step": 1}
    assert (run / "checkpoints" / "step_000001").is_dir()
    assert list((run / "lora").iterdir())


WORKERS = """
import sys, ray
from fsdp_diffusers_engine import DiffusionModelConfig, FSDPDiffusionActorConfig, FSDPEngineConfig, remote_workers
from fsdp_diffusers_engine.config import TrainingWorkerConfig
from fsdp_diffusers_engine.errors import EngineError

model = DiffusionModelConfig(path=sys.argv[2], lora_rank=4)
actor = FSDPDiffusionActorConfig(model_config=model, fsdp_config=FSDPEngineConfig(device="cpu"))
ray.init(address=sys.argv[1], log_to_driver=False, runtime_env={"py_executable": "/nowhere/uv run python"})
try:
    remote_workers(TrainingWorkerConfig(actor), 2)
except EngineError as error:
    print(error)
ray.shutdown()
ray.init(address=sys.argv[1], log_to_driver=False)
workers = remote_workers(TrainingWorkerConfig(actor), 2, num_cpus=0.5)
ray.get([worker.reset.remote() for worker in workers])
payload = ray.get([worker.save_weights.remote("default", version=1) for worker in workers])[0]
print("gathered", len(payload.tensors))
"""


def test_the_engines_own_workers_meet_at_the_first_ones_node(cluster, forked, tmp_path):
    address, environment = cluster
    (tmp_path / "workers.py").write_text(WORKERS)
    command = [tmp_path / "workers.py", address, builtin("models", "tiny_qwen_image")]
    program = forked(command, env=environment | {"RAY_AUTH_MODE": "token", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"})
    out, err = program.communicate(timeout=300)
    assert program.returncode == 0, err[-4000:]
    assert "RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 before Ray is imported" in out
    assert "gathered" in out
