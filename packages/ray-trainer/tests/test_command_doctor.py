"""`doctor` on the tiny policy: a table that ends with a count, a remedy for what is wrong, exit codes 0, 1 and 2."""

import itertools
from types import SimpleNamespace

import pytest
from flowgrpo.cli import APP
from ray_trainer.cli import run
from ray_trainer.commands import doctor


@pytest.fixture
def no_slow_checks(monkeypatch):
    """Without the ones that import a network: a failure of another check is what is looked at."""
    monkeypatch.setattr(doctor, "CHECKS", {k: v for k, v in doctor.CHECKS.items() if k not in ("torch", "LoRA")})


def test_a_run_that_works_is_all_right(monkeypatch, capsys):
    # A container's small /dev/shm and a GPU that somebody else uses would be warnings.
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: SimpleNamespace(free=1e12))
    monkeypatch.setattr(doctor, "gpus", list)
    assert run(APP, ["doctor"]) == 0
    out = capsys.readouterr().out
    for subject in (
        "Python",
        "torch",
        "vLLM-Omni",
        "Ray",
        "disk",
        "model",
        "LoRA",
        "data.train_file",
        "reward",
        "config",
    ):
        assert f"ok    {subject}" in out
    assert "48 layers, 294,912 parameters" in out
    assert "'one red circle on a white background'" in out
    assert "0 warn, 0 fail" in out.splitlines()[-1]


def test_every_fault_is_named_at_once_with_its_remedy(no_slow_checks, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a cat"}\n{"prompt": "a dog"}\n')
    keys = ["model.path=/nowhere/model", f"data.train_file={prompts}", "reward.name=ocr", "trainer.num_workers=1"]
    assert run(APP, ["doctor", *keys]) == 2
    lines = capsys.readouterr().out.splitlines()
    failed = {line.split()[1] for line in lines if line.startswith("fail")}
    assert {"model", "config"} <= failed
    assert all(after.strip().startswith("→") for line, after in itertools.pairwise(lines) if line.startswith("fail"))
    assert any(line.startswith("ok    data.train_file") for line in lines)
    assert sum("there is no /nowhere/model/model_index.json" in line for line in lines) == 1
    assert sum("→ see memory" in line for line in lines) >= 2


def test_a_gated_model_and_one_that_is_not_there(monkeypatch):
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    answer = httpx.Response(403, request=httpx.Request("GET", "https://hub"))
    for error, said in ((GatedRepoError, "accept its licence"), (RepositoryNotFoundError, "correct model.path")):

        def refuse(location, error=error):
            raise error("refused", response=answer)

        monkeypatch.setattr(huggingface_hub, "auth_check", refuse)
        finding = doctor._on_the_hub("someone/model")
        assert (finding.status, said in finding.remedy) == ("fail", True)
    monkeypatch.setattr(huggingface_hub, "auth_check", lambda location: None)
    assert doctor._on_the_hub("someone/model").status == "warn"


@pytest.mark.parametrize(
    ("versions", "pin", "backend", "status", "said"),
    [
        ({}, None, "diffusers", "ok", "only rollout.backend=vllm_omni needs it"),
        ({}, None, "vllm_omni", "fail", "--extra vllm"),
        ({"vllm": "0.30.0", "vllm-omni": "0.29.1"}, None, "vllm_omni", "fail", "the same version"),
        ({"vllm": "0.30.0", "vllm-omni": "0.30.1"}, "2.10.0", "diffusers", "warn", "was built for torch 2.10.0"),
        ({"vllm": "0.30.0", "vllm-omni": "0.30.1"}, "2.11.0", "vllm_omni", "ok", "vllm 0.30.0"),
    ],
)
def test_the_engines_versions_fit_each_other_and_torch(monkeypatch, versions, pin, backend, status, said):
    from ray_trainer.app import parse

    monkeypatch.setattr(doctor, "_installed", {"torch": "2.11.0+cu130", **versions}.get)
    monkeypatch.setattr(doctor, "_pinned", lambda package, name: pin)
    config, _ = parse(APP, [f"rollout.backend={backend}"])
    (finding,) = doctor._vllm(config)
    assert finding.status == status
    assert said in finding.said + finding.remedy


def test_help_and_a_mistyped_command(capsys):
    assert run(APP, ["doctor", "--help"]) == 0
    assert "exit code 0" in capsys.readouterr().out
    assert run(APP, ["docter"]) == 2
    assert "did you mean 'doctor'?" in capsys.readouterr().err


def test_trackers_are_installed_and_have_a_key(monkeypatch, tmp_path):
    from ray_trainer.app import parse

    config, _ = parse(APP, ["trainer.trackers=[wandb]"])
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    (finding,) = doctor._trackers(config)
    assert (finding.status, "--extra trackers apps/flowgrpo" in finding.remedy) == ("fail", True)
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for key in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(key, raising=False)
    assert [f.status for f in doctor._trackers(config)] == ["warn"]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert [f.status for f in doctor._trackers(config)] == ["ok"]
    assert [f.status for f in doctor._trackers(parse(APP, [])[0])] == ["ok"]


def test_too_little_shared_memory_and_a_busy_gpu_are_warnings(monkeypatch):
    from ray_trainer.app import parse

    config, _ = parse(APP, [])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: SimpleNamespace(free=64 * 2**20))
    (found,) = doctor._ray(config)
    if doctor.Path("/dev/shm").is_dir():
        assert found.status == "warn"
        assert "lower ray.object_store_mb=256" in found.remedy
    card = {"name": "H100", "driver_version": "580", "memory.total": "81559", "memory.free": "40000"}
    monkeypatch.setattr(doctor, "gpus", lambda: [card])
    found = next(iter(doctor._gpu_memory(config)))
    assert (found.status, found.subject) == ("warn", "GPU")
    assert "GB are in use" in found.remedy
