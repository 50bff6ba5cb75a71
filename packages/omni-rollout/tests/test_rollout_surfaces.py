"""What people and other programs touch: the image route, the benchmark, the platform entry points, full-weight checks."""

import base64
import io
import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from omni_rollout.__main__ import main
from omni_rollout.config import DiffusionPipelineConfig
from omni_rollout.replica import DiffusersReplica, LocalHandle
from omni_rollout.vllm_omni import cpu_platform
from omni_rollout.vllm_omni.pipelines import entry_for, pipeline_for
from omni_rollout.vllm_omni.rpc import checked
from omni_rollout.vllm_omni.shared import buckets, read_bucket, write_bucket
from omni_rollout.weights import content_sum


@pytest.fixture
def route(arithmetic_backend):
    from fastapi.testclient import TestClient
    from omni_rollout.openai_api import create_app

    backend = arithmetic_backend()
    client = TestClient(
        create_app(DiffusersReplica(LocalHandle(backend)), DiffusionPipelineConfig(height=64, width=64))
    )
    client.backend = backend
    return client


def test_the_image_route_answers_like_openai(route):
    from PIL import Image

    answer = route.post("/v1/images/generations", json={"prompt": "a cat", "n": 2, "size": "64x64", "seed": 3})
    assert answer.status_code == 200
    pictures = [Image.open(io.BytesIO(base64.b64decode(entry["b64_json"]))) for entry in answer.json()["data"]]
    assert [picture.size for picture in pictures] == [(2, 2), (2, 2)]
    assert pictures[0].tobytes() != pictures[1].tobytes()
    assert route.get("/health").json() == {"status": "ok"}
    assert route.get("/v1/models").json()["data"][0]["id"] == "policy"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompt=None"),
        ({"prompt": "x", "n": 99}, "n=99"),
        ({"prompt": "x", "size": "big"}, "size='big'"),
        ({"prompt": "x", "quality": "hd"}, "quality"),
        ({"prompt": "x", "response_format": "url"}, "b64_json"),
    ],
)
def test_the_image_route_refuses_what_it_cannot_do(route, body, words):
    answer = route.post("/v1/images/generations", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_the_image_route_reports_a_failing_backend(route):
    route.backend.errors = [ValueError("bad luck")]
    answer = route.post("/v1/images/generations", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


def test_bench_prints_one_object(tiny, capsys):
    sizes = ["--samples", "6", "--group", "3", "--batch", "4", "--rounds", "1", "--steps", "2", "--json"]
    assert main(["bench", "--model", tiny, *sizes]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["images_per_s"] > 0
    assert result["batches"] == {"2": 1, "4": 1}
    assert {"encode", "denoise", "decode"} <= set(result["seconds_per_image"])


def test_platform_entry_points_stay_out_of_the_way(monkeypatch):
    monkeypatch.delenv("OMNI_ROLLOUT_CPU", raising=False)
    for group in ("vllm.platform_plugins", "vllm_omni.platform_plugins"):
        (entry,) = [e for e in entry_points(group=group) if e.name == "omni_rollout_cpu"]
        assert entry.load()() is None
    monkeypatch.setenv("OMNI_ROLLOUT_CPU", "1")
    assert cpu_platform.vllm_platform().startswith("omni_rollout.vllm_omni.cpu.")
    assert cpu_platform.omni_platform().startswith("omni_rollout.vllm_omni.cpu.")


def test_importing_the_package_starts_nothing_heavy():
    code = (
        "import sys, omni_rollout.vllm_omni.server, omni_rollout.vllm_omni.replica, omni_rollout.agent_loop;"
        "print([m for m in ('vllm', 'vllm_omni', 'ray', 'diffusers', 'tensordict') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_stepwise_is_chosen_where_there_is_one(tiny, tmp_path):
    from types import SimpleNamespace

    from omni_rollout.config import DiffusionRolloutConfig, VllmOmniConfig
    from omni_rollout.errors import RolloutConfigError

    config = DiffusionRolloutConfig(vllm_omni=VllmOmniConfig(step_execution=True))
    model = SimpleNamespace(path=tiny, algorithm="flow_grpo")
    config.resolve_algorithm(model)
    assert model.algorithm == "flow_grpo_stepwise"
    assert pipeline_for(tiny, model.algorithm).endswith("QwenImageStepwisePipeline")
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    flux = SimpleNamespace(path=str(tmp_path), algorithm="flow_grpo")
    config.resolve_algorithm(flux)
    assert flux.algorithm == "flow_grpo"
    with pytest.raises(RolloutConfigError, match="cannot run step by step"):
        pipeline_for(flux.path, "flow_grpo_stepwise")
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(RolloutConfigError, match="no rollout pipeline; known are QwenImage"):
        entry_for(flux.path)


def test_a_failed_rpc_is_an_error():
    from omni_rollout.errors import ReplicaError

    assert checked("x", [[{"a": 1}]]) == {"a": 1}
    for answer in ([{"supported": False, "error": "no such method"}], [[{"error": "boom"}]], [], [{"todo": True}]):
        with pytest.raises(ReplicaError):
            checked("x", answer)


def test_content_sums_see_every_change_but_not_the_layout():
    weights = [torch.randn(5, 7), torch.randn(3, 7)]
    total = content_sum(weights)
    assert content_sum([torch.cat(weights)]) == total
    assert content_sum(reversed(weights)) == total
    changed = torch.cat(weights)
    changed[2, 3] = torch.nextafter(changed[2, 3], torch.tensor(9.0))
    assert content_sum([changed]) != total
    assert content_sum([weights[0]]) != total
    assert content_sum([*weights, torch.zeros(1)]) != total
    assert content_sum([w.bfloat16() for w in weights]) != total


def test_buckets_through_shared_memory():
    named = [
        ("a", torch.randn(10)),
        ("b", torch.randn(300)),
        ("c", torch.randn(2, 3).bfloat16()),
        ("d", torch.arange(4)),
    ]
    parts = list(buckets(named, 100))
    assert [[name for name, _ in bucket] for bucket, _ in parts] == [["a"], ["b"], ["c", "d"]]
    assert [last for _, last in parts] == [False, False, True]
    assert list(buckets([], 100)) == [([], True)]
    block = write_bucket(named)
    try:
        back = dict(read_bucket(block.name))
    finally:
        block.close()
        block.unlink()
    assert all(torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in named)
