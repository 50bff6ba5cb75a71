"""`vlm` against a stand-in for an OpenAI-compatible server: what it is asked, and every way it can answer badly."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from image_rewards import RewardConfigError, RewardSample, RewardTargetError, load
from PIL import Image

PICTURE = np.random.default_rng(0).integers(0, 256, (3, 12, 16), dtype=np.uint8)


class Judge:
    """answer(request) -> content string, or (status, body). Records requests and how many ran at a time."""

    def __init__(self, answer, delay_s=0.0):
        judge = self
        self.requests, self.running, self.most = [], 0, 0
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    judge.requests.append({"path": self.path, "token": self.headers.get("Authorization"), **body})
                    judge.running += 1
                    judge.most = max(judge.most, judge.running)
                    given = answer(len(judge.requests), body)
                time.sleep(delay_s)
                if isinstance(given, str):
                    choice = {"finish_reason": "stop", "message": {"role": "assistant", "content": given}}
                    given = 200, json.dumps({"choices": [choice]}).encode()
                with lock:
                    judge.running -= 1
                self.send_response(given[0])
                self.send_header("Content-Length", str(len(given[1])))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # the client gave up
                    self.wfile.write(given[1])

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def test_grade_sends_picture_prompt_and_schema(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "abc")
    with Judge(lambda *_: '{"reason": "fine", "grade": 7}') as judge:
        result = load("vlm", url=judge.url, model="m", token_env="JUDGE_TOKEN")(RewardSample(PICTURE, 'a "red" {cat}'))
    assert (result.score, result.components) == (0.7, {"grade": 7.0})
    request = judge.requests[0]
    assert (request["path"], request["token"], request["model"]) == ("/v1/chat/completions", "Bearer abc", "m")
    assert request["temperature"] == 0
    image, text = request["messages"][1]["content"]
    sent = np.asarray(Image.open(io.BytesIO(base64.b64decode(image["image_url"]["url"].split(",")[1]))))
    assert np.array_equal(sent.transpose(2, 0, 1), PICTURE)
    assert json.dumps('a "red" {cat}') in text["text"]
    schema = request["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["reason", "grade"]


def test_own_question():
    with Judge(lambda *_: '{"reason": "", "grade": 10}') as judge:
        reward = load("vlm", url=judge.url, model="m", question="Is {prompt} pretty?")
        assert reward(RewardSample(PICTURE, "a cat")).score == 1.0
    assert 'Is "a cat" pretty?' in judge.requests[0]["messages"][1]["content"][1]["text"]


def test_questions():
    sample = RewardSample(PICTURE, "a cat", {"questions": ["Is there a cat?", "Is it red?"]})
    with Judge(lambda *_: '{"answers": [true, false]}') as judge:
        result = load("vlm", url=judge.url, model="m", task="questions")(sample)
    assert result.score == 0.5
    assert result.components == {"question_1": 1.0, "question_2": 0.0}
    assert "2. Is it red?" in judge.requests[0]["messages"][1]["content"][1]["text"]


def test_ocr_is_compared_here():
    with Judge(lambda *_: '{"texts": ["OPEN  24h", "now"]}') as judge:
        result = load("vlm", url=judge.url, model="m", task="ocr")(RewardSample(PICTURE, metadata={"text": "open 24H"}))
    assert result.components["exact"] == 1.0
    assert result.components["extra"] == pytest.approx(3 / 10)


@pytest.mark.parametrize(
    "answer",
    [
        "I think it is a 7.",
        "{",
        "[]",
        '{"score": 7}',
        '{"grade": 11}',
        '{"grade": -1}',
        '{"grade": 7.5}',
        '{"grade": true}',
        '{"grade": null}',
        '{"grade": "7"}',
        (200, b"{}"),
        (200, b'{"choices": []}'),
        (200, b'{"choices": [{"finish_reason": "length", "message": {"content": "{\\"grade\\": 7}"}}]}'),
        (200, b'{"choices": [{"finish_reason": "stop", "message": {"content": null}}]}'),
        (500, b"oops"),
        (503, b"busy"),
    ],
)
def test_answers_that_are_no_grade_fail_after_bounded_retries(answer):
    with Judge(lambda *_: answer) as judge:
        result = load("vlm", url=judge.url, model="m", max_retries=2, backoff_s=0.01)(RewardSample(PICTURE, "a cat"))
    assert result.error is not None
    assert "3 attempts" in result.error
    assert result.retryable
    assert np.isnan(result.score)
    assert len(judge.requests) == 3


def test_a_judge_that_recovers_gives_its_score_once():
    with Judge(lambda n, _: (503, b"busy") if n < 3 else '{"grade": 4}') as judge:
        assert load("vlm", url=judge.url, model="m", backoff_s=0.01)(RewardSample(PICTURE, "a cat")).score == 0.4


def test_wrong_requests_are_not_repeated():
    with Judge(lambda *_: (404, b"no such model")) as judge:
        result = load("vlm", url=judge.url, model="m", backoff_s=0.01)(RewardSample(PICTURE, "a cat"))
    assert "no such model" in str(result.error)
    assert len(judge.requests) == 1


def test_deadline():
    with Judge(lambda *_: '{"grade": 4}', delay_s=3.0) as judge:
        start = time.monotonic()
        reward = load("vlm", url=judge.url, model="m", timeout_s=0.3, deadline_s=0.8, backoff_s=0.01, max_retries=99)
        result = reward(RewardSample(PICTURE, "a cat"))
        assert time.monotonic() - start < 2
    assert "RewardTimeoutError" in str(result.error)
    assert "deadline" in str(result.error)


def test_concurrency_is_limited_and_results_keep_their_order():
    def answer(_, body):
        number = json.loads(body["messages"][1]["content"][1]["text"].split("prompt: ")[1].split("\n")[0])
        return json.dumps({"grade": int(number) % 11})

    with Judge(answer, delay_s=0.02) as judge:
        reward = load("vlm", url=judge.url, model="m", concurrency=5)
        results = reward.score([RewardSample(PICTURE, str(i)) for i in range(40)])
    assert [r.score for r in results] == [i % 11 / 10 for i in range(40)]
    assert 1 < judge.most <= 5


def test_targets_and_settings():
    make = lambda **options: load("vlm", url="http://127.0.0.1:1/v1", model="m", **options)  # noqa: E731
    with pytest.raises(RewardTargetError, match="no prompt"):
        make().check_target("", {})
    with pytest.raises(RewardTargetError, match="questions="):
        make(task="questions").check_target("x", {"questions": []})
    with pytest.raises(RewardTargetError, match="no part in quotes"):
        make(task="ocr").check_target("x", {})
    with pytest.raises(RewardConfigError, match="task='judge'"):
        make(task="judge")
    with pytest.raises(RewardConfigError, match="goes with task='grade'"):
        make(task="ocr", question="?")
