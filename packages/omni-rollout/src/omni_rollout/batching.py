"""Which requests may share a transformer batch, and in which order batches run.

Grouping is stable: groups in the order of their first request, requests in the order they came, chunks of at most the
batch size. So the same requests in the same order always make the same batches, which makes a run bitwise repeatable.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .errors import RolloutConfigError
from .types import GenerationRequest


def compatibility_key(request: GenerationRequest) -> tuple[Hashable, ...]:
    """Requests with equal keys can be denoised together.

    Windows may differ, their lengths may not; under a multistep solver, whose history they break, and before a thinned
    tail, which begins where they end, they must be equal. Shared noise changes where rows start, not how they run.
    """
    bound = request.solver != "euler" or request.tail_ratio < 1
    return (
        request.height,
        request.width,
        request.num_frames,
        request.num_inference_steps,
        request.true_cfg_scale,
        request.guidance_scale,
        request.max_sequence_length,
        request.kind,
        request.noise_level,
        request.window if bound else len(request.window),
        request.solver,
        request.tail_ratio,
        request.adapter,
        request.start_step,
        request.return_trajectory,
        request.return_means,
    )


def plan_batches(requests: Sequence[GenerationRequest], max_batch_size: int) -> list[list[int]]:
    """Positions of the requests in each batch. Raises `RolloutConfigError` for a request id that occurs twice."""
    seen: set[str] = set()
    groups: dict[tuple[Hashable, ...], list[int]] = {}
    for position, request in enumerate(requests):
        if request.request_id in seen:
            raise RolloutConfigError(f"request_id={request.request_id!r} occurs twice in one call: ids must be unique.")
        seen.add(request.request_id)
        groups.setdefault(compatibility_key(request), []).append(position)
    return [
        group[start : start + max_batch_size]
        for group in groups.values()
        for start in range(0, len(group), max_batch_size)
    ]
