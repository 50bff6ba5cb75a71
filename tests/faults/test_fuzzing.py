"""Files, settings and requests of any content: read, or refused by an error of ours. Nightly with many more examples."""

import json
import os
from contextlib import contextmanager

import pytest
from flowgrpo.cli import APP
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

MANY = bool(os.environ.get("FAULTS_EXAMPLES"))
few = settings(
    max_examples=int(os.environ.get("FAULTS_EXAMPLES", "40")),
    deadline=None,
    derandomize=not MANY,
    phases=[Phase.explicit, Phase.generate],  # making a found example smaller takes minutes
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@contextmanager
def only(kind):
    """Nothing is raised but errors of this kind, which say something."""
    try:
        yield
    except kind as error:
        if not str(error).strip():
            raise AssertionError(f"{kind.__name__} without a word") from error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = ["trainer", "model", "actor", "rollout", "base", "total_steps", "lr", "betas", "options", "n", "path", "<<"]
TREES = st.recursive(
    JSON | st.sampled_from(["${trainer.seed}", "${trainer.run_dir}", "1e3", ".nan", "0x10", "~"]),
    lambda inner: st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=10,
)


@st.composite
def damaged(draw, whole):
    """A good file that was cut, or of which some bytes are others."""
    data = bytearray(whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole)
    for _ in range(draw(st.integers(0, 6)) if data else 0):
        data[draw(st.integers(0, min(len(data), 600) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


@few
@given(tree=TREES, text=st.text(max_size=60), binary=st.binary(max_size=60), kind=st.integers(0, 2))
@example(tree={}, text="a: &a [*a]", binary=b"", kind=1)
@example(tree={}, text="trainer: " + "[" * 1200, binary=b"", kind=1)
@example(tree={"base": {"model": {}, "rollout": [], "trainer": "x" * 300}}, text="", binary=b"", kind=0)
@example(tree={"base": "x" * 300}, text="", binary=b"", kind=0)
@example(tree={}, text="trainer: {total_steps: 1" + "0" * 5000 + "}", binary=b"", kind=1)
def test_any_recipe(tree, text, binary, kind, tmp_path):
    from ray_trainer.compose import compose
    from ray_trainer.errors import TrainerError

    file = tmp_path / "recipe.yaml"
    file.write_bytes([json.dumps(tree).encode(), text.encode("utf-8", "surrogatepass"), binary][kind])
    with only(TrainerError):
        compose(APP.name, file, [])


@few
@given(
    key=st.sampled_from(["trainer.total_steps", "actor.optim.betas", "reward.options", "rollout.n", "x", "trainer."]),
    value=st.text(),
)
def test_any_override(key, value):
    from ray_trainer.cli import parse
    from ray_trainer.errors import TrainerError

    with only(TrainerError):
        parse(APP, [f"{key}={value}"])


SUFFIXES = (".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet")
GOOD = b'{"prompt": "two red circles", "metadata": {"count": 2}}\n{"prompt": "a cat", "negative_prompt": null}\n'


@few
@given(
    data=st.binary(max_size=80)
    | st.text(max_size=80).map(str.encode)
    | damaged(GOOD)
    | st.lists(JSON, max_size=3).map(lambda rows: "\n".join(map(json.dumps, rows)).encode()),
    suffix=st.sampled_from(SUFFIXES),
)
@example(data=b"[" * 100_000, suffix=".json")
@example(data=b'{"prompt": ' + b"9" * 5000 + b"}", suffix=".jsonl")
@example(data=b'prompt\n"' + b"x" * 200_000, suffix=".csv")
@example(data=b"PAR1\x00PAR1", suffix=".parquet")
def test_any_prompt_file(data, suffix, tmp_path):
    from image_rewards.errors import RewardError
    from image_rewards.prompt_files import read_prompts

    file = tmp_path / f"prompts{suffix}"
    file.write_bytes(data)
    with only(RewardError):
        assert read_prompts(file)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A payload, its file, and the file of an export."""
    import torch
    from lora_sync import LoRAPayload
    from lora_sync.export import export

    name = "transformer_blocks.0.attn.to_q"
    tensors = {f"{name}.lora_A.weight": torch.ones(2, 8), f"{name}.lora_B.weight": torch.ones(8, 2)}
    payload = LoRAPayload.build(tensors, alphas=4.0, version=3)
    folder = tmp_path_factory.mktemp("adapter")
    payload.save(folder / "payload.safetensors")
    return payload, (folder / "payload.safetensors").read_bytes(), export(payload, "peft", folder / "peft").read_bytes()


@few
@given(data=st.data())
def test_any_lora_file_or_payload(adapter, data, tmp_path):
    from lora_sync import LoRAPayload, LoRASyncError, load_any

    payload, own, foreign = adapter
    file = tmp_path / "file.safetensors"
    file.write_bytes(data.draw(damaged(own)))
    with only(LoRASyncError):
        assert LoRAPayload.load(file).hash == payload.hash
    file.write_bytes(data.draw(damaged(foreign) | st.binary(max_size=64)))
    with only(LoRASyncError):
        load_any(file, architecture="qwen_image")


@few
@given(data=st.data())
def test_any_header_of_a_message(adapter, data):
    from lora_sync import LoRASyncError
    from lora_sync.message import Message, parse_header

    header = adapter[0].header()
    given_header = data.draw(damaged(header) | JSON.map(json.dumps).map(str.encode) | st.binary(max_size=40))
    with only(LoRASyncError):
        meta, specs = parse_header(given_header)
        sizes = [spec.nbytes for spec in specs]
        if sum(sizes) < 1 << 20:
            import torch

            tensors = {spec.name: spec.over(torch.zeros(spec.nbytes, dtype=torch.uint8)) for spec in specs}
            Message.restore(tensors, meta, "a test")


@few
@given(
    body=JSON.map(json.dumps).map(str.encode)
    | st.binary(max_size=60)
    | st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("image", "frames", "prompt", "metadata", "uid", "index", "more"), JSON)
    ).map(lambda row: json.dumps({"samples": [row]}).encode()),
    kind=st.sampled_from(["application/json", "application/x-safetensors", "text/plain", ""]),
)
def test_any_request_to_a_scorer(body, kind):
    from image_rewards import RewardInputError
    from image_rewards.wire import decode_samples

    with only(RewardInputError):
        decode_samples(body, kind, 4)


@few
@given(
    body=JSON.map(json.dumps).map(str.encode)
    | st.binary(max_size=60)
    | st.fixed_dictionaries(
        {
            "results": st.lists(
                st.fixed_dictionaries({}, optional=dict.fromkeys(("score", "components", "error", "retryable"), JSON)),
                max_size=2,
            )
        }
    ).map(lambda answer: json.dumps(answer).encode())
)
def test_any_answer_of_a_scorer(body):
    from image_rewards import RewardServiceError
    from image_rewards.wire import decode_results

    with only(RewardServiceError):
        for result in decode_results(body, 1, "a scorer"):
            assert result.error is not None or result.score == result.score


@pytest.fixture(scope="module")
def scorer():
    """The scorer's application, with a token."""
    from fastapi.testclient import TestClient
    from image_rewards import load
    from image_rewards.server import create_app

    with TestClient(create_app(load("jpeg_compressibility"), token="t")) as client:
        yield client


@few
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]),
    path=st.sampled_from(["/score", "/health", "/metrics", "/", "/../etc/passwd", "/score/", "/openapi.json", "/docs"]),
    body=st.binary(max_size=60) | JSON.map(json.dumps).map(str.encode),
    coding=st.sampled_from(["", "gzip", "deflate", "br", "gzip, gzip"]),
    token=st.sampled_from(["Bearer t", "Bearer ", "t", ""]),
)
def test_any_call_of_the_scorer(scorer, method, path, body, coding, token):
    headers = {"Content-Type": "application/json", "Content-Encoding": coding, "Authorization": token}
    answer = scorer.request(method, path, content=body, headers=headers)
    assert answer.status_code in (200, 400, 401, 404, 405, 411, 413, 415, 422), answer.text
    if path == "/score" and method == "POST" and token != "Bearer t":
        assert answer.status_code == 401
    assert "Traceback" not in answer.text


@few
@given(
    body=JSON.map(json.dumps).map(str.encode)
    | st.fixed_dictionaries(
        {"prompt": st.text(max_size=9)}, optional=dict.fromkeys(("n", "size", "seed", "adapter"), JSON)
    ).map(lambda row: json.dumps(row).encode())
)
def test_any_call_of_the_image_route(body):
    from omni_rollout.config import DiffusionPipelineConfig
    from omni_rollout.errors import RolloutConfigError
    from omni_rollout.openai_api import _object, requests_of

    with only(RolloutConfigError):
        requests_of(_object(body), DiffusionPipelineConfig(height=64, width=64), 0)


@few
@given(data=st.data())
def test_any_damage_to_the_files_of_a_run(data, tmp_path):
    from ray_trainer import checkpoint
    from ray_trainer.errors import TrainerError
    from run_report import MetricsWriter, ReportError, write_report

    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    rows = b'{"step": 1, "reward/mean": 0.5}\n{"step": 2, "reward/mean": null}\n'
    (run / "metrics.jsonl").write_bytes(data.draw(damaged(rows)))
    (run / "environment.json").write_bytes(data.draw(damaged(b'{"python": "3.11"}')))
    (run / "changes.jsonl").write_bytes(data.draw(damaged(b'{"step": 1, "key": "a", "before": 1, "after": 2}\n')))
    (run / "config.yaml").write_bytes(data.draw(damaged(b"trainer:\n  seed: 0\n")))
    with only(ReportError):
        with MetricsWriter(run) as writer:
            writer.truncate_after(1)
        write_report(run)
    root = tmp_path / "checkpoints"
    for step in (1, 2):
        checkpoint.step_folder(root, step).mkdir(parents=True, exist_ok=True)
        (checkpoint.step_folder(root, step) / "engine.json").write_text("{}")
        checkpoint.publish(root, step, 2)
    for name in ("latest.json", "step_000002/files.json", "step_000002/engine.json"):
        (root / name).write_bytes(data.draw(damaged((root / name).read_bytes())))
    with only(TrainerError):
        assert checkpoint.latest(root) in (None, 1, 2)
        checkpoint.passed_over(root)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_same_with_many_examples():
    """Every test of this file again, 2,000 examples each, with new random ones every night."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-x", "--timeout=1700", __file__]
    done = subprocess.run(command, env={**os.environ, "FAULTS_EXAMPLES": "2000"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
