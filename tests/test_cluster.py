"""The README's cluster command, on a cluster that was started from another folder and by a person without a history."""

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
from pathlib import Path

import pytest
import ray
import yaml
from flowgrpo.cli import main
from ray_trainer.assets import builtin

ROOT = Path(__file__).resolve().parent.parent
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
    """`ray start --head` in a folder of its own with a new HOME; (address, environment). Its workers are forks."""
    place = tmp_path_factory.mktemp("elsewhere")
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
    program = forked(command, env=environment | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"})
    out, err = program.communicate(timeout=300)
    assert program.returncode == 0, err[-4000:]
    assert "RAY_ENABLE_UV_RUN_RUNTIME_ENV=0 before Ray is imported" in out
    assert "gathered" in out
