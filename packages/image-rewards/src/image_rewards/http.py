"""`http`: scores from a scorer service (`python -m image_rewards serve`), so that rewards can live on another
machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from image_rewards.base import Reward, RewardResult, RewardSample
from image_rewards.errors import RewardConfigError, RewardError
from image_rewards.post import Endpoint, post
from image_rewards.wire import JSON_TYPE, TENSOR_TYPE, decode_results, encode_samples


class HttpReward(Reward):
    """Asks `url` (e.g. http://127.0.0.1:8100/score) and returns what it says, failures included.

    encoding      "safetensors" (raw pixels: fast, large) or "json" (PNG: small)
    per_request   most samples in one request
    concurrency   requests at a time
    The rest are fields of `post.Endpoint`.
    """

    name = "http"
    video = True  # the service decides

    def __init__(
        self,
        url: str,
        token_env: str = "",
        encoding: str = "safetensors",
        per_request: int = 8,
        concurrency: int = 4,
        timeout_s: float = 60.0,
        deadline_s: float = 300.0,
        max_retries: int = 4,
        backoff_s: float = 0.25,
    ) -> None:
        types = {"safetensors": TENSOR_TYPE, "json": JSON_TYPE}
        if encoding not in types:
            raise RewardConfigError(f"encoding={encoding!r} is unknown. Choose 'safetensors' or 'json'.")
        if per_request < 1 or concurrency < 1:
            raise RewardConfigError(f"per_request={per_request!r} and concurrency={concurrency!r} must be at least 1.")
        self._endpoint = Endpoint(url, token_env, timeout_s, deadline_s, max_retries, backoff_s)
        self._type, self._per_request, self.concurrency = types[encoding], per_request, concurrency
        self.batch_size = per_request * concurrency

    def check_target(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Targets are the service's to check: it answers with a failed result."""

    def score_valid(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        chunks = [samples[i : i + self._per_request] for i in range(0, len(samples), self._per_request)]
        if len(chunks) == 1:
            return self._ask(chunks[0])
        with ThreadPoolExecutor(min(self.concurrency, len(chunks)), "http-reward") as threads:
            return [result for chunk in threads.map(self._ask, chunks) for result in chunk]

    def _ask(self, chunk: Sequence[RewardSample]) -> list[RewardResult]:
        try:
            body = encode_samples(chunk, self._type)
            read = lambda answer: decode_results(answer, len(chunk), self._endpoint.url)  # noqa: E731
            return post(self._endpoint, body, self._type, read)
        except RewardError as error:
            return [RewardResult.failed(error) for _ in chunk]
