"""One rank's failure ends the others, with its error.

In a sharded run every rank waits for every other in each collective. When one raises, the rest would sit there until the
group's timeout and then report the timeout, which says nothing. The failing rank leaves its error in the group's store;
a rank whose collective then breaks reads it there and raises that instead.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from .errors import RankError

# All ranks make the same guarded calls in the same order, so a count names one call on all of them; an error that was
# caught and survived is not found again later.
_calls = itertools.count()


@contextmanager
def shared_failure(what: str) -> Iterator[None]:
    """Tell the other ranks of the default group when the body fails, and prefer their error over a broken collective.

    Raises the body's own error; in place of a collective's (a ``RuntimeError``), :class:`RankError` with the traceback
    of the rank that failed first.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield
        return
    key = f"fsdp_diffusers_engine/failed/{next(_calls)}"
    try:
        yield
    except Exception as error:
        rank = dist.get_rank()
        report = f"{rank}\n{what} failed on rank {rank}: {''.join(traceback.format_exception(error))}"
        first = report
        with suppress(Exception):  # the store dies with rank 0
            first = dist.distributed_c10d._get_default_store().compare_set(key, "", report).decode()
        number, _, text = first.partition("\n")
        if isinstance(error, RuntimeError) and number != str(rank) and text:
            raise RankError(text) from error
        raise
