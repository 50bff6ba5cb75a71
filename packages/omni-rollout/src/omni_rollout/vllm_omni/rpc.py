"""Reading the answers of `collective_rpc`, which never raises: a failure is a dictionary among the results."""

from __future__ import annotations

from typing import Any

from ..errors import ReplicaError


def checked(method: str, answer: Any) -> Any:
    """The value that rank 0 returned. Raises `ReplicaError` for anything that looks like a failure."""
    value = answer
    while isinstance(value, list):  # [[value]]: one list for stages, one for ranks
        if not value:
            raise ReplicaError(f"RPC {method!r} got no answer: {answer!r}.")
        value = value[0]
    if isinstance(value, dict) and (value.get("supported") is False or value.get("todo") or value.get("error")):
        raise ReplicaError(f"RPC {method!r} failed in the engine: {value.get('error') or value!r}.")
    return value
