"""One rank's failure ends the others, with its error.

In a sharded run every rank waits for every other in each collective. When one raises, the rest would sit there until the
group's timeout and then report the timeout, which says nothing. The failing rank leaves its error in the group's store;
a rank whose collective then breaks reads it there and raises that instead.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from .errors import RankError

_KEY = "fsdp_diffusers_engine/failed"


@contextmanager
def shared_failure(what: str) -> Iterator[None]:
    """Tell the other ranks of the default group when the body fails, and prefer their error over a broken collective.

    Raises :class:`RankError` naming the rank that failed first, or the body's own error on that rank.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield
        return
    try:
        yield
    except Exception as error:
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        text = f"{rank}\n{what} failed on rank {rank}: {''.join(traceback.format_exception(error))}"
        # The first writer wins: what comes later is a consequence.
        first = text
        with suppress(Exception):
            first = store.compare_set(_KEY, "", text).decode()
        number, _, report = first.partition("\n")
        if number != str(rank) and report:
            raise RankError(report) from error
        raise
