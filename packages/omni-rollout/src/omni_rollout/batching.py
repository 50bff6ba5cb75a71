"""Which requests may share a transformer batch, and in which order batches run.

Grouping is stable: groups in the order of their first request, requests in the order they came, chunks of at most the
batch size. So the same requests in the same order always make the same batches, which makes a run bitwise repeatable.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .errors import RolloutConfigError
from .types import GenerationRequest


def plan_batches(requests: Sequence[GenerationRequest], max_batch_size: int) -> list[list[int]]:
    """Positions of the requests in each batch. Raises `RolloutConfigError` for a request id that occurs twice."""
    seen: set[str] = set()
    groups: dict[Hashable, list[int]] = {}
    for position, request in enumerate(requests):
        if request.request_id in seen:
            raise RolloutConfigError(f"request_id={request.request_id!r} occurs twice in one call: ids must be unique.")
        seen.add(request.request_id)
        wanted = request.return_trajectory, request.return_means, request.shown
        key = request.settings.batch_key, request.adapter, wanted
        groups.setdefault(key, []).append(position)
    return [
        group[start : start + max_batch_size]
        for group in groups.values()
        for start in range(0, len(group), max_batch_size)
    ]
