"""A live engine among people, crowds and faults: the image route, a full queue, errors, and kill -9 in the middle of a batch."""

import asyncio
import base64
import io
import json
import os
import platform
import signal
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest
from lora_sync import verify
from omni_rollout.config import RouterConfig
from omni_rollout.errors import ReplicaDeadError, ReplicaError
from omni_rollout.router import Router
from PIL import Image

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="vLLM-Omni has wheels for Linux x86-64 only"
)

PROMPT = "three red circles on a black background"


def test_the_image_route_of_a_live_engine(engine, fleet, embedded, draw, make_request):
    url = f"http://127.0.0.1:{fleet.config.vllm_omni.openai_port}"
    body = {"prompt": PROMPT, "n": 2, "size": "64x64", "seed": 7, "num_inference_steps": 6}

    def ask(route, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{url}{route}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    assert ask("/health") == {"status": "ok"}
    assert ask("/v1/models")["data"][0]["id"] == "tiny_qwen_image"
    pictures = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(entry["b64_json"]))))
        for entry in ask("/v1/images/generations", body)["data"]
    ]
    expected = draw(embedded, [make_request(i, uid="image", index=i, kind="ode", window=()) for i in range(2)])
    for picture, output in zip(pictures, expected, strict=True):
        assert np.abs(picture.astype(int) - output["responses"].permute(1, 2, 0).numpy().astype(int)).max() <= 1
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask("/v1/images/generations", {**body, "size": "63x63x"})


def test_whole_batches_reach_the_engine(engine, runner, make_request, collect):
    """A call of several batches: two are in the engine at any time, so it never waits and never mixes in stragglers."""
    router = Router([engine], RouterConfig(request_timeout_s=60))
    samples = runner.run(collect(router, [make_request(i) for i in range(4 * engine.batch_size)]))
    assert samples["batch_rows"].tolist() == [engine.batch_size] * len(samples)
    assert router.metrics()["rollout/completed"] == len(samples)


def test_engine_errors_are_tried_again(engine, server, draw, runner, make_request, collect, difference):
    requests = [make_request(i) for i in range(8)]
    expected = draw(engine, requests)
    runner.run(engine.backend.call(server.fail_next, 3))
    router = Router([engine], RouterConfig(request_timeout_s=60))
    samples = runner.run(collect(router, requests))
    assert all(difference(a, b) <= 1e-4 for a, b in zip(samples, expected, strict=True))
    metrics = router.metrics()
    assert [metrics[f"rollout/{name}"] for name in ("errors", "retried", "completed", "failed")] == [8, 8, 8, 0]
    runner.run(engine.backend.call(server.fail_next, 3))
    with pytest.raises(ReplicaError, match="illegal memory access"):  # three attempts, three errors
        runner.run(collect(router, requests[:1]))
    assert len(draw(engine, requests[:1])) == 1


def test_a_killed_engine_comes_back_at_the_newest_adapters(
    engine, server, fleet, draw, runner, make_request, adapter, collect, difference
):
    """The process dies in the middle of a batch, and the batch is as if it had not."""
    payloads = {"default": adapter(40, seed=6), "old": adapter(40, seed=7)}
    requests = [make_request(i, num_inference_steps=20, adapter=("default", "old")[i // 8 % 2]) for i in range(24)]

    async def run():
        for name, payload in payloads.items():
            for receipt in await fleet.update_lora(payload, name):
                verify(payload, receipt)
        expected = await collect(fleet.router, requests)
        drawn = (await engine.health()).generated
        pid = await engine.backend.call(server.pid)
        task = asyncio.ensure_future(collect(fleet.router, requests))
        while (await engine.health()).generated == drawn:  # the first batches are through, the others are not
            await asyncio.sleep(0.005)
        start = asyncio.get_running_loop().time()
        os.kill(pid, signal.SIGKILL)
        outputs = await task
        return expected, outputs, asyncio.get_running_loop().time() - start, pid

    before = fleet.router.metrics()
    expected, outputs, seconds, pid = runner.run(run())
    assert all(difference(a, b) <= 1e-4 for a, b in zip(outputs, expected, strict=True))
    assert set(outputs["policy_version"].tolist()) == {40}
    assert runner.run(fleet.router.replicas[0].backend.call(server.pid)) != pid
    counts = {name.removeprefix("rollout/"): value - before[name] for name, value in fleet.router.metrics().items()}
    assert (counts["completed"], counts["deaths"], counts["restarts"], counts["failed"]) == (48, 1, 1, 0)
    assert 0 < counts["retried"] <= 16
    assert seconds < 240
    with pytest.raises(ReplicaDeadError):
        draw(engine, requests[:1])
