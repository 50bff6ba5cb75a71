"""What people and other programs touch: the image route, the benchmark, the platform entry points, full-weight checks."""

import base64
import io
import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
from omni_rollout.config import DiffusionPipelineConfig
from omni_rollout.specs import pipeline_class, spec_of
from omni_rollout.vllm_omni import cpu_platform
from omni_rollout.vllm_omni.rpc import checked
from omni_rollout.vllm_omni.shared import read_bucket, write_bucket


@pytest.fixture
def route(arithmetic_replica):
    from fastapi.testclient import TestClient
    from omni_rollout.openai_api import create_app

    replica = arithmetic_replica()
    client = TestClient(create_app(replica.generate, DiffusionPipelineConfig(height=64, width=64)))
    client.backend = replica
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
        ({"prompt": "x", "qualty": "hd"}, "qualty"),
        ({"prompt": "x", "response_format": "url"}, "b64_json"),
        ({"prompt": "x", "output_format": "webp"}, "'png'"),
        ({"prompt": "x", "stream": True}, "stream=True"),
        ({"prompt": " "}, "not empty"),
        ({"prompt": ["x"]}, "must be a text"),
        ({"prompt": "x", "negative_prompt": 3}, "negative_prompt=3 must be a text"),
        ({"prompt": "x", "adapter": 3}, "adapter=3 must be a text"),
        *(({"prompt": "x", "n": n}, "a whole number from 1 to 16") for n in (0, -1, 1.5, "2", True, 10**400)),
        *(
            ({"prompt": "x", "size": s}, "a multiple of 16 from 16 to 4096")
            for s in ("0x0", "99999999x64", "65x64", "64x8", "64", "64x64x64", "-64x64", "6４x64", 64, [64, 64], "")
        ),
        *(({"prompt": "x", "seed": s}, "from 0 to 9223372036854775807") for s in (-1, 2**70, 1.5, "3", True)),
        *(({"prompt": "x", "num_inference_steps": s}, "from 1 to 1000") for s in (0, -1, 10.5, 10**6)),
        *(
            ({"prompt": "x", name: v}, f"{name}=")
            for name in ("true_cfg_scale", "guidance_scale")
            for v in (float("nan"), float("inf"), -1, "4", 1e30)
        ),
    ],
)
def test_the_image_route_refuses_what_it_cannot_do(route, body, words):
    answer = route.post("/v1/images/generations", content=json.dumps(body))
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "no JSON"), (b"{", "no JSON"), (b"\xff", "no JSON"), (b"[1]", "a list"), (b"null", "a NoneType")],
)
def test_the_image_route_refuses_bodies_that_are_no_object(route, content, words):
    answer = route.post("/v1/images/generations", content=content)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert words in answer.json()["error"]["message"]


def test_the_image_route_takes_what_clients_send(route):
    from omni_rollout.openai_api import _FIELDS

    plain = route.post("/v1/images/generations", json={"prompt": "a cat"}).json()
    nulls = {name: None for name in (*_FIELDS, "quality", "extra") if name != "prompt"}
    assert route.post("/v1/images/generations", json={"prompt": "a cat", **nulls}).json()["data"] == plain["data"]
    assert "note" not in plain
    sent = {
        "quality": "high",
        "style": "vivid",
        "background": "auto",
        "size": "auto",
        "user": "u",
        "model": "gpt-image-1",
    }
    answer = route.post("/v1/images/generations", json={"prompt": "a cat", **sent}).json()
    assert answer["data"] == plain["data"]
    assert answer["note"].endswith("quality, style, background")


def test_the_image_route_reports_a_failing_backend(route):
    route.backend.errors = [ValueError("bad luck")]
    answer = route.post("/v1/images/generations", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


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
    from omni_rollout.errors import RolloutConfigError

    module = "omni_rollout.vllm_omni.pipelines.qwen_image."
    assert pipeline_class(spec_of(tiny), True) == module + "QwenImageStepwisePipeline"
    assert pipeline_class(spec_of(tiny), False) == module + "QwenImageRolloutPipeline"
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(RolloutConfigError, match="cannot run step by step"):
        pipeline_class(spec_of(str(tmp_path)), True)
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(RolloutConfigError, match="No spec for the architecture 'StableDiffusionPipeline'"):
        spec_of(str(tmp_path))


def test_a_failed_rpc_is_an_error():
    from omni_rollout.errors import ReplicaError

    assert checked("x", [[{"a": 1}]]) == {"a": 1}
    for answer in ([{"supported": False, "error": "no such method"}], [[{"error": "boom"}]], [], [{"todo": True}]):
        with pytest.raises(ReplicaError):
            checked("x", answer)


def test_buckets_through_shared_memory():
    named = [
        ("a", torch.randn(10)),
        ("b", torch.randn(300)),
        ("c", torch.randn(2, 3).bfloat16()),
        ("d", torch.arange(4)),
    ]
    block = write_bucket(named)
    try:
        back = dict(read_bucket(block.name))
    finally:
        block.close()
        block.unlink()
    assert all(torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in named)


def test_the_negative_prompt_of_the_route_is_the_pipelines():
    from omni_rollout.openai_api import requests_of

    pipeline = DiffusionPipelineConfig(height=64, width=64, true_cfg_scale=3.0, negative_prompt="blurry")
    assert requests_of({"prompt": "x"}, pipeline, 0)[0].negative_prompt == "blurry"
    assert requests_of({"prompt": "x", "negative_prompt": "dark"}, pipeline, 0)[0].negative_prompt == "dark"
