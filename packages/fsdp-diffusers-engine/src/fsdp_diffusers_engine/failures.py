"""One rank's failure ends the others, with its error.

In a sharded run every rank waits for every other in each collective. When one raises, the rest would sit there until the
group's timeout and then report the timeout, which says nothing. The failing rank leaves its error in the group's store;
a rank whose collective then breaks reads it there and raises that instead.

gloo breaks by itself: its waits end when a peer's process does, or at the group's timeout. NCCL does not, its kernels spin
on the card. There a thread looks into the store while a call is under way, and when another rank has failed it aborts the
groups, which ends the kernels and with them the call. An error that all ranks raise (a batch that is wrong everywhere)
harms no group: they go on with the next call.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from .errors import RankError

POLL_S = 0.25
"""How often a rank looks whether another has failed."""
GRACE_S = 5.0
"""How long all ranks have to raise, when one has, before the groups are given up."""

# All ranks make the same guarded calls in the same order, so a count names one call on all of them; an error that was
# caught and survived is not found again later.
_calls = itertools.count()
# Calls that this rank came through: another may have failed in one of them, and this one waits for it in a later one.
_passed: deque[str] = deque(maxlen=8)


@contextmanager
def shared_failure(what: str) -> Iterator[None]:
    """Tell the other ranks of the default group when the body fails, and prefer their error over a broken collective.

    Raises the body's own error; in place of a collective's (a `RuntimeError`), or when the groups had to be aborted,
    `RankError` with the traceback of the rank that failed first.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield
        return
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    key = f"fsdp_diffusers_engine/failed/{next(_calls)}"
    watch = _Watch(store, [*_passed, key]) if _waits_forever() else None
    try:
        yield
    except Exception as error:
        other = None if watch is None else watch.leave()
        report = f"{rank}\n{what} failed on rank {rank}: {''.join(traceback.format_exception(error))}"
        first = other or report
        with suppress(Exception):  # the store dies with rank 0
            first = other or _first_report(store, _passed) or store.compare_set(key, "", report).decode()
        if watch is not None and other is None and not _all_raise(store, key, world):
            _abort_groups()  # the others' part of what this rank has under way will not come
        number, _, text = first.partition("\n")
        if text and number != str(rank) and (other is not None or isinstance(error, RuntimeError)):
            raise RankError(text) from error
        raise
    finally:
        if watch is not None:
            watch.leave()
    if watch is not None and (other := watch.leave()) is not None:
        raise RankError(other.partition("\n")[2])
    _passed.append(key)


class _Watch:
    """Looks, from a thread, whether another rank has left an error; then it ends this rank's collectives."""

    def __init__(self, store: Any, keys: Sequence[str]) -> None:
        self.report: str | None = None
        """The other rank's number and error, once the groups were aborted for it."""
        self._store, self._keys = _second_connection(store), list(keys)
        self._left, self._lock = threading.Event(), threading.Lock()
        threading.Thread(target=self._look, name="other ranks", daemon=True).start()

    def leave(self) -> str | None:
        """The call is over; returns `report`."""
        self._left.set()
        with self._lock:
            return self.report

    def _look(self) -> None:
        while not self._left.wait(POLL_S):
            try:
                found = _first_report(self._store, self._keys)
            except Exception as error:
                found = f"0\nrank 0, which keeps the group's store, is gone ({error})"
            if found is None:
                continue
            if self._left.wait(GRACE_S):  # it fails as well, or the other one did after all that it shares
                return
            with self._lock:
                if not self._left.is_set():
                    self.report = found
                    # On stderr too: NCCL's own watchdog may end this process before Python sees an error.
                    _, _, text = found.partition("\n")
                    print(f"this rank waited for one that failed. {text}", file=sys.stderr, flush=True)
                    _abort_groups()
            return


def _first_report(store: Any, keys: Sequence[str] | deque[str]) -> str | None:
    for key in keys:
        if store.check([key]):
            return bytes(store.get(key)).decode()
    return None


def _all_raise(store: Any, key: str, world: int) -> bool:
    """Whether every rank leaves this call with an error, which all then survive."""
    with suppress(Exception):
        store.add(f"{key}/ranks", 1)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            if store.add(f"{key}/ranks", 0) >= world:
                return True
            time.sleep(0.02)
    return False


def _waits_forever() -> bool:
    return "nccl" in dist.get_backend()


def _abort_groups() -> None:
    with suppress(Exception):
        dist.distributed_c10d._abort_process_group()


_connections: list[tuple[Any, Any]] = []


def _second_connection(store: Any) -> Any:
    """A handle on the store for another thread: the first is held by whoever waits in it (NCCL meets there)."""
    if not _connections or _connections[0][0] is not store:
        _connections[:] = [(store, store.clone())]
    return _connections[0][1]
