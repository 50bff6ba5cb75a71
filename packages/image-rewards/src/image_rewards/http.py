"""`http`: scores from a scorer service (`python -m image_rewards serve`), so that rewards can live on another
machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .base import RewardResult, RewardSample
from .errors import RewardError, check_counts, require
from .service import ServiceReward
from .wire import JSON_TYPE, TENSOR_TYPE, decode_results, encode_samples

_TYPES = {"safetensors": TENSOR_TYPE, "json": JSON_TYPE}


@dataclass(eq=False, kw_only=True)
class HttpReward(ServiceReward):
    """Asks `url` (e.g. http://127.0.0.1:8100/score) and returns what it says, failures included.

    Args:
        encoding: "safetensors" (raw pixels: fast, large) or "json" (PNG: small)
        per_request: most samples in one request
        concurrency: requests at a time

    The rest are fields of `ServiceReward`.
    """

    name = "http"
    video = True  # the service decides

    encoding: str = "safetensors"
    per_request: int = 8
    concurrency: int = 4

    def __post_init__(self) -> None:
        require(self.encoding in _TYPES, f"encoding={self.encoding!r} is unknown. Choose 'safetensors' or 'json'.")
        check_counts(per_request=self.per_request, concurrency=self.concurrency)
        super().__post_init__()
        self.batch_size = self.per_request * self.concurrency

    def check_target(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Targets are the service's to check: it answers with a failed result."""

    def score_valid(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        chunks = [samples[i : i + self.per_request] for i in range(0, len(samples), self.per_request)]
        with ThreadPoolExecutor(min(self.concurrency, len(chunks)), "http-reward") as threads:
            return [result for chunk in threads.map(self._ask, chunks) for result in chunk]

    def _ask(self, chunk: Sequence[RewardSample]) -> list[RewardResult]:
        kind = _TYPES[self.encoding]
        try:
            body = encode_samples(chunk, kind)
            return self.post(body, kind, lambda answer: decode_results(answer, len(chunk), self.url))
        except RewardError as error:
            return [RewardResult.failed(error) for _ in chunk]
