"""The scorer service and its client: the wire format against hostile bodies, and the service under load and kills."""

from __future__ import annotations

import base64
import gzip
import http.client
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from image_rewards import RewardConfigError, RewardInputError, RewardSample, RewardServiceError, load
from image_rewards.http import HttpReward
from image_rewards.server import is_loopback, serve
from image_rewards.wire import (
    JSON_TYPE,
    TENSOR_TYPE,
    decode_picture,
    decode_results,
    decode_samples,
    encode_png,
    encode_samples,
)

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

REWARDS = '''
import os, time
import numpy as np
from image_rewards import PerSampleReward, RewardResult

class Numbered(PerSampleReward):
    """score = the picture's first pixel; slow, and fails for every seventh number."""
    name = "numbered"
    def __init__(self, delay_s=0.0, batch=8):
        self.delay_s, self.batch_size = delay_s, batch
    def score_one(self, sample):
        number = int(sample.image.flat[0]) + 256 * int(sample.image.flat[1])
        time.sleep(self.delay_s)
        if sample.prompt == "hang":
            time.sleep(5)
        if number % 7 == 3:
            raise ValueError(f"back end failed on {number}")
        return RewardResult(float(number), {"number": float(number)})
'''


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Service:
    """A scorer in a process of its own, on loopback."""

    def __init__(self, folder, *options, port=None, token=""):
        (folder / "test_backends.py").write_text(textwrap.dedent(REWARDS))
        self.port = port or free_port()
        environment = {**os.environ, "PYTHONPATH": str(folder), "IMAGE_REWARDS_TOKEN": token}
        command = [sys.executable, "-m", "image_rewards", "serve", "--port", str(self.port), *options]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while self.request("GET", "/health")[0] != 200:
            assert time.monotonic() < end
            assert self.process.poll() is None
            time.sleep(0.1)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/score"

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        except OSError as error:
            return 0, str(error).encode()
        finally:
            connection.close()

    def metrics(self):
        lines = self.request("GET", "/metrics")[1].decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def memory_mb(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def stop(self, sig=signal.SIGTERM):
        self.process.send_signal(sig)
        self.process.wait(30)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.stop(signal.SIGKILL)


def numbered(n, size=4):
    out = []
    for i in range(n):
        image = np.zeros((3, size, size), np.uint8)
        image.flat[0], image.flat[1] = i % 256, i // 256
        out.append(RewardSample(image, uid=f"u{i}", index=i))
    return out


def check_numbered(results):
    """Every result is its own number or a typed failure; none is a silent zero."""
    for i, result in enumerate(results):
        if i % 7 == 3:
            assert result.error is not None
            assert f"ValueError: back end failed on {i}" in result.error
            assert "Traceback" not in result.error
            assert np.isnan(result.score)
        else:
            assert result.error is None, result
            assert result.score == float(i)


def test_service_says_what_the_reward_says(tmp_path, shape_samples):
    samples = shape_samples(20)
    alone = load("shapes").score(samples)
    with Service(tmp_path, "--reward", "shapes") as service:
        for encoding in ("json", "safetensors"):
            client = load("http", url=service.url, encoding=encoding, per_request=3)
            assert client.score(samples) == alone
            assert client.score(samples[::-1]) == alone[::-1]
        bad = client(RewardSample(samples[0].image, "a cat"))
        assert "RewardTargetError" in str(bad.error)
        hostile(service)
        status, body = service.request("GET", "/health")
        assert (status, json.loads(body)["status"]) == (200, "ok")
        assert client.score(samples) == alone


def hostile(service):
    """Bodies nobody should send: each gets a named refusal, and the service lives on."""
    picture = encode_png(np.random.default_rng(0).integers(0, 256, (3, 16, 16), dtype=np.uint8))

    def row(**fields):
        return json.dumps({"samples": [fields]})

    def b64(data):
        return base64.b64encode(data).decode()

    huge = np.zeros((3, 8192, 8192), np.uint8)
    bodies = [
        ("", 422, "not JSON"),
        ("{}", 422, "no list 'samples'"),
        ("[" * 100_000, 422, "not JSON"),
        ('{"samples": [NaN]}', 422, "NaN"),
        (row(prompt="x"), 422, "either 'image' or 'frames'"),
        (row(image=3), 422, "not base64"),
        (row(image="%%%"), 422, "not base64"),
        (row(image=b64(picture[:60])), 422, "truncated"),
        (row(image=b64(picture[:-20])), 422, "truncated"),
        (row(image=b64(picture[:-1])), 422, "truncated"),
        (row(image=b64(b"\x80\x04cos\nsystem\n.")), 422, "no readable PNG"),
        (row(image=b64(encode_png(huge, level=9))), 422, "limit"),
        (row(image=b64(picture), prompt=5), 422, "prompt=5"),
        (row(image=b64(picture), index=True), 422, "index=True"),
        (row(image=b64(picture), metadata="../../etc/passwd"), 422, "metadata"),
        (row(image=b64(picture), file="../../etc/passwd"), 422, "unknown field 'file'"),
        (row(frames=[]), 422, "frames must be a list"),
        (
            row(image=b64(picture), uid="../../etc/passwd", metadata={"path": "../../etc/passwd"}),
            200,
            "RewardTargetError",
        ),
    ]
    for body, status, words in bodies:
        got, answer = service.request("POST", "/score", body.encode(), {"Content-Type": JSON_TYPE})
        assert (got, words in answer.decode()) == (status, True), (body[:80], got, answer[:300])
    for kind in ("application/octet-stream", "application/x-pickle", ""):
        assert service.request("POST", "/score", b"x", {"Content-Type": kind})[0] == 422
    tensors = encode_samples(numbered(2), TENSOR_TYPE)
    for damaged in (
        tensors[:5],
        tensors[:-1],
        tensors + b"x",
        b"\xff" * 8 + tensors[8:],
        tensors.replace(b"U8", b"F8"),
    ):
        assert service.request("POST", "/score", damaged, {"Content-Type": TENSOR_TYPE})[0] == 422
    before = service.memory_mb()
    refused = service.request("POST", "/score", None, {"Content-Type": JSON_TYPE, "Content-Length": str(100 << 20)})
    assert refused[0] == 413
    assert b"over the limit" in refused[1]
    assert service.request("POST", "/score", iter([b"x"]), {"Transfer-Encoding": "chunked"})[0] in (411, 400)
    assert service.memory_mb() < before + 64


def test_token(tmp_path, monkeypatch):
    monkeypatch.setenv("THE_TOKEN", "s3cret")
    with Service(tmp_path, "--reward", "test_backends:Numbered", token="s3cret") as service:
        assert service.request("POST", "/score", b"{}")[0] == 401
        assert service.request("POST", "/score", b"{}", {"Authorization": "Bearer wrong"})[0] == 401
        assert service.request("GET", "/metrics")[0] == 401
        assert service.request("GET", "/health")[0] == 200
        denied = HttpReward(service.url)(numbered(1)[0])
        assert "401" in str(denied.error)
        assert not denied.retryable
        assert HttpReward(service.url, token_env="THE_TOKEN")(numbered(2)[1]).score == 1.0


def test_two_hundred_concurrent_requests_to_a_slow_and_failing_back_end(tmp_path):
    samples = numbered(600)
    options = ("--reward", "test_backends:Numbered", "--option", "delay_s=0.002", "--threads", "4")
    with Service(tmp_path, *options) as service:
        client = HttpReward(service.url, per_request=3, concurrency=200, deadline_s=60)
        check_numbered(client.score(samples))
        metrics = service.metrics()
        failed = sum(i % 7 == 3 for i in range(600))
        # A batch with a failure is taken apart, and each sample is still answered once.
        assert metrics['image_rewards_samples_total{outcome="scored"}'] == 600 - failed
        assert metrics['image_rewards_samples_total{outcome="failed"}'] == failed
        assert metrics["image_rewards_pending_samples"] == metrics["image_rewards_inflight_bytes"] == 0


def test_killed_half_way_and_restarted_loses_and_doubles_nothing(tmp_path):
    samples = numbered(400)
    options = ("--reward", "test_backends:Numbered", "--option", "delay_s=0.01", "--threads", "2")
    first = Service(tmp_path, *options)
    results = []

    def run():
        client = HttpReward(first.url, per_request=2, concurrency=200, deadline_s=90, max_retries=50, backoff_s=0.2)
        results.extend(client.score(samples))

    client = threading.Thread(target=run)
    client.start()
    time.sleep(0.7)
    assert first.metrics()["image_rewards_batches_total"] > 0
    first.stop(signal.SIGKILL)
    assert client.is_alive()
    with Service(tmp_path, *options, port=first.port) as second:
        client.join(90)
        assert second.metrics()['image_rewards_samples_total{outcome="scored"}'] < 400  # the rest was done before
    assert len(results) == 400
    check_numbered(results)


def test_a_full_queue_refuses_and_the_client_waits(tmp_path):
    options = ("--reward", "test_backends:Numbered", "--option", "delay_s=0.004", "--max-queue", "16")
    with Service(tmp_path, *options) as service:
        big = numbered(64, size=256)  # 12 MB in all
        client = HttpReward(service.url, per_request=4, concurrency=64, max_retries=200, backoff_s=0.05, deadline_s=60)
        check_numbered(client.score(big))
        assert service.metrics()['image_rewards_samples_total{outcome="rejected"}'] > 0
        assert service.metrics()['image_rewards_requests_total{status="503"}'] > 0
        hasty = HttpReward(service.url, per_request=4, concurrency=64, max_retries=0)
        refused = [r for r in hasty.score(big) if not r.ok and "503" in str(r.error)]
        assert refused
        assert all(np.isnan(r.score) and r.retryable for r in refused)
        print(f"peak memory {service.memory_mb():.0f} MB")
        assert service.memory_mb() < 300


def test_a_hanging_back_end_times_out_and_health_says_so(tmp_path):
    options = ("--reward", "test_backends:Numbered", "--timeout-s", "0.5")
    with Service(tmp_path, *options) as service:
        sample = RewardSample(numbered(2)[1].image, "hang")
        result = HttpReward(service.url, max_retries=0)(sample)
        assert "504" in str(result.error)
        time.sleep(0.3)
        assert service.request("GET", "/health")[0] == 503
        time.sleep(5)
        assert service.request("GET", "/health")[0] == 200
        assert HttpReward(service.url)(numbered(2)[1]).score == 1.0


def test_silent_clients_and_memory(tmp_path):
    """Bodies that never come are given up, and the bytes in flight have a bound."""
    with Service(tmp_path, "--reward", "test_backends:Numbered", "--timeout-s", "2") as service:
        head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON_TYPE}\r\nContent-Length: {60 << 20}\r\n\r\n".encode()
        silent = [socket.create_connection(("127.0.0.1", service.port), timeout=30) for _ in range(8)]
        for connection in silent:
            connection.sendall(head + b"{")
        time.sleep(0.5)
        assert service.metrics()["image_rewards_inflight_bytes"] == 8 * (60 << 20)
        ninth = HttpReward(service.url, max_retries=0)(numbered(2, size=4096)[1])  # 50 MB, past 512 MB with the eight
        assert "503" in str(ninth.error)
        assert ninth.retryable
        assert [connection.recv(16)[9:12] for connection in silent] == [b"408"] * 8
        for connection in silent:
            connection.close()
        assert service.metrics()["image_rewards_inflight_bytes"] == 0
        assert HttpReward(service.url)(numbered(2)[1]).score == 1.0
        print(f"peak memory {service.memory_mb():.0f} MB")
        assert service.memory_mb() < 300


def test_no_service_is_a_typed_failure():
    client = HttpReward(f"http://127.0.0.1:{free_port()}/score", max_retries=2, backoff_s=0.01)
    start = time.monotonic()
    result = client(numbered(1)[0])
    assert "RewardServiceError" in str(result.error)
    assert "3 attempts" in str(result.error)
    assert result.retryable
    assert np.isnan(result.score)
    patient = HttpReward(f"http://127.0.0.1:{free_port()}/score", max_retries=99, backoff_s=0.2, deadline_s=1.0)
    assert "the deadline of 1.0 s" in str(patient(numbered(1)[0]).error)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{}",
        b'{"results": []}',
        b'{"results": [{"score": null, "components": {}, "error": null}]}',
        b'{"results": [{"score": true, "components": {}, "error": null}]}',
        b'{"results": [{"score": "1", "components": {}, "error": null}]}',
        b'{"results": [{"score": NaN, "components": {}, "error": null}]}',
        b'{"results": [{"score": 1.0, "components": {"a": "x"}, "error": null}]}',
        b'{"results": [{"score": 1.0}]}',
        b'{"results": [1]}',
        b"[" * 100_000,
    ],
)
def test_answers_that_are_no_scores_are_refused(answer):
    with pytest.raises(RewardServiceError, match="1 scores"):
        decode_results(answer, 1, "the service")


def test_wire_keeps_every_field_and_pixel():
    rng = np.random.default_rng(0)
    samples = [
        RewardSample(rng.integers(0, 256, (3, 5, 9), dtype=np.uint8), "héllo", {"text": ["a", 1, None]}, "u", 3),
        RewardSample(rng.integers(0, 256, (4, 3, 6, 7), dtype=np.uint8)),
    ]
    for kind in (JSON_TYPE, TENSOR_TYPE):
        again = decode_samples(encode_samples(samples, kind), kind, 10)
        for a, b in zip(samples, again, strict=True):
            assert np.array_equal(a.image, b.image)
            assert (a.prompt, a.metadata, a.uid, a.index) == (b.prompt, b.metadata, b.uid, b.index)
    with pytest.raises(RewardInputError, match="2 samples are more"):
        decode_samples(encode_samples(samples), JSON_TYPE, 1)
    with pytest.raises(RewardInputError, match="cannot be sent as JSON"):
        encode_samples([RewardSample(samples[0].image, metadata={"x": float("nan")})])


def test_tensor_bodies_are_real_safetensors():
    library = pytest.importorskip("safetensors.numpy")
    samples = numbered(3)
    loaded = library.load(encode_samples(samples, TENSOR_TYPE))
    assert all(np.array_equal(loaded[str(i)], s.image) for i, s in enumerate(samples))


def test_pictures_of_other_kinds():
    import io

    from PIL import Image

    def png(mode, **options):
        buffer = io.BytesIO()
        Image.new(mode, (4, 4)).save(buffer, "PNG", **options)
        return buffer.getvalue()

    for mode in ("RGB", "L", "P", "1"):
        assert decode_picture(png(mode), "x").shape == (3, 4, 4)
    for data, words in ((png("RGBA"), "alpha"), (png("I;16"), "mode"), (png("P", transparency=0), "alpha")):
        with pytest.raises(RewardInputError, match=words):
            decode_picture(data, "x")
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "JPEG")
    with pytest.raises(RewardInputError, match="no readable PNG"):
        decode_picture(buffer.getvalue(), "x")


def test_settings_are_checked(monkeypatch):
    with pytest.raises(RewardConfigError, match="http://host:port"):
        HttpReward("127.0.0.1:8000")
    with pytest.raises(RewardConfigError, match="not set"):
        HttpReward("http://127.0.0.1:1/", token_env="NO_SUCH_VARIABLE")
    with pytest.raises(RewardConfigError, match="encoding='pickle'"):
        HttpReward("http://127.0.0.1:1/", encoding="pickle")
    with pytest.raises(RewardConfigError, match="no token"):
        serve(load("shapes"), host="0.0.0.0")
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")


def test_answers_are_bounded_and_retries_stop_at_wrong_requests():
    """A server that answers one request of each kind."""
    answers = [
        b"HTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\nbad",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (17 << 20),
        b"garbage\r\n\r\n",
    ]
    calls = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        listener.settimeout(30)  # a client that gives up early must not leave this thread waiting for the next one

        def run():
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    request = b""
                    while not request.endswith(b"\r\n\r\n{}"):  # closing with unread bytes would reset the answer away
                        request += connection.recv(65536)
                    calls.append(1)
                    try:
                        connection.sendall(answer)
                    except OSError:
                        continue

        done = threads.submit(run)
        reward = HttpReward(f"http://127.0.0.1:{listener.getsockname()[1]}/", max_retries=0)
        for kind, words in (
            (RewardInputError, "400: bad"),
            (RewardInputError, "more than"),
            (RewardServiceError, "could not"),
        ):
            with pytest.raises(kind, match=words):
                reward.post(b"{}", JSON_TYPE, bytes)
        done.result(10)
    assert len(calls) == 3


ROW = {"score": 0.5, "components": {}, "error": None, "retryable": False}


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers every request with `self.server.answer`: (status, headers, body)."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        status, headers, body = self.server.answer
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def scorer():
    """scorer(status, headers, body) -> the result of one sample that is scored by a server with that answer."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def ask(status, headers, body):
        server.answer = (status, headers, body)
        reward = HttpReward(f"http://127.0.0.1:{server.server_port}/score", max_retries=1, backoff_s=0.001)
        return reward(RewardSample(np.zeros((3, 4, 4), np.uint8)))

    yield ask
    server.shutdown()
    server.server_close()


def rows(**changes):
    return json.dumps({"results": [{**ROW, **changes}]}).encode()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, {}, rows(error="")), "it gave no cause"),
        ((200, {}, rows(error="", score=None)), "it gave no cause"),
        ((200, {}, rows(error=False)), "must be a text or null"),
        ((200, {}, rows(score=10**400)), "many digits"),
        ((200, {}, rows(score="0.5")), "a str ('0.5')"),
        ((200, {}, rows(score=[0.5])), "a list"),
        ((200, {}, rows(score=None)), "None"),
        ((200, {}, rows(score=True)), "score=True"),
        ((200, {}, rows().replace(b"0.5", b"1e999")), "inf"),
        ((200, {}, rows(components=[0.5])), "components=[0.5] an object"),
        ((200, {}, rows(components=[["a", 1]])), "an object"),
        ((200, {}, rows(components={"a": "x"})), "'a': a str"),
        ((200, {}, rows(components={"a": 10**400})), "'a': a whole number of many digits"),
        ((200, {}, rows(components={"a": [1]})), "'a': a list"),
        ((200, {}, rows()[:-5]), "no JSON"),
        ((200, {}, b'{"error": "out of memory"}'), 'but {"error": "out of memory"}'),
        ((200, {}, b'{"results": {"0": 1}}'), "no list of results"),
        ((200, {}, b'{"results": [{"score": 0.5}]}'), "each result must be an object with score, components and error"),
        ((200, {}, b"\xe9\xe8"), "not 1 scores"),
        ((200, {}, b"[]"), "not 1 scores"),
        ((200, {}, b'{"results": [3]}'), "not 1 scores"),
        ((200, {}, b"<html>"), "not 1 scores"),
        ((200, {"Content-Encoding": "br"}, b"abc"), "'br' is not read"),
        ((200, {"Content-Encoding": "gzip"}, b"abc"), "damaged"),
        ((200, {"Content-Encoding": "gzip"}, gzip.compress(rows())[:-9]), "cut off"),
        ((200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(17 << 20))), "more than"),
        ((302, {"Location": "http://elsewhere/score"}, b""), "a redirect to 'http://elsewhere/score'"),
        ((308, {"Location": "/other"}, b""), "a redirect to '/other'"),
        ((404, {}, b"caf\xe9"), "answered 404"),
    ],
)  # fmt: skip
def test_whatever_a_scorer_answers_is_a_failure_with_its_cause(scorer, answer, words):
    result = scorer(*answer)
    assert np.isnan(result.score)
    assert words in str(result.error)


@pytest.mark.parametrize(
    "pack",
    [
        lambda b: ({}, b),
        lambda b: ({"Content-Encoding": "identity"}, b),
        lambda b: ({"Content-Encoding": "gzip"}, gzip.compress(b)),
        lambda b: ({"Content-Encoding": "X-GZIP"}, gzip.compress(b)),
        lambda b: ({}, gzip.compress(b)),
        lambda b: ({"Content-Encoding": "deflate"}, zlib.compress(b)),
        lambda b: ({"Content-Encoding": "deflate"}, zlib.compress(b)[2:-4]),
        lambda b: ({}, b"\xef\xbb\xbf" + b),
    ],
)
def test_packed_answers_are_read(scorer, pack):
    result = scorer(200, *pack(rows(components={"a": 1, "gone": None})))
    assert (result.score, result.components) == (0.5, {"a": 1.0})


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:abc/score", "http://[::1/score", "http://127.0.0.1:99999/", "http://127.0.0.1:0/", "127.0.0.1:8100",
        "ftp://x/y", "http://", "http:///score", "", "http://a b/score", "http://x/sc\nore", "http://x/é", "http://u:p@x/score",
        "http://x/score#here",
    ],
)  # fmt: skip
def test_urls_that_cannot_be_asked(url):
    with pytest.raises(RewardConfigError, match="url="):
        HttpReward(url)


def test_packed_requests_are_read():
    from fastapi.testclient import TestClient
    from image_rewards.batching import Limits
    from image_rewards.server import create_app

    body = encode_samples([RewardSample(np.zeros((3, 4, 4), np.uint8))], JSON_TYPE)
    with TestClient(create_app(load("jpeg_compressibility"), limits=Limits(body_bytes=1 << 20))) as client:
        for status, encoding, packed in (
            (200, "identity", body),
            (200, "gzip", gzip.compress(body)),
            (200, "deflate", zlib.compress(body)),
            (400, "gzip", body),
            (400, "gzip", gzip.compress(body)[:-9]),
            (400, "gzip", gzip.compress(bytes(2 << 20))),
            (415, "br", body),
        ):
            headers = {"Content-Type": JSON_TYPE, "Content-Encoding": encoding}
            answer = client.post("/score", content=packed, headers=headers)
            assert answer.status_code == status, answer.text
            assert status == 200 or answer.json()["error"]


def test_serve_says_where_it_listens(tmp_path):
    command = [sys.executable, "-m", "image_rewards", "serve", "--reward", "jpeg_compressibility", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        line = process.stderr.readline()
        process.terminate()
    assert re.fullmatch(r"jpeg_compressibility is served on http://127\.0\.0\.1:[1-9]\d*/score\n", line)
