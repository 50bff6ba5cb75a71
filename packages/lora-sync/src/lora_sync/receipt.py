"""What a receiver answers, and the check that makes a sync count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .errors import BindError, CorruptPayloadError, LoRASyncError, StaleVersionError
from .payload import LoRAPayload


@dataclass(frozen=True)
class LoRAReceipt:
    """One receiver's account of one sync. Plain numbers and strings: it travels as JSON.

    Args:
        version, hash: of what is in place now; the hash is of the bound tensors, not a copy of the promise.
        modules_bound, tensors_bound: counted while binding.
        tensors_ignored: sent, and used nowhere.
        probe_delta: largest absolute change of a probe forward between before and after, or None without a probe.
    """

    version: int
    hash: str
    modules_bound: int
    tensors_bound: int
    tensors_ignored: int = 0
    probe_delta: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoRAReceipt:
        """Inverse of `to_dict`; raises ``LoRASyncError`` for missing or unknown keys."""
        try:
            return cls(**data)
        except TypeError as error:
            raise LoRASyncError(f"not a receipt: {dict(data)!r} ({error}).") from error


def verify(
    payload: LoRAPayload,
    receipt: LoRAReceipt,
    *,
    previous_version: int | None = None,
    probe_floor: float | None = None,
) -> LoRAReceipt:
    """Return the receipt, or raise a ``LoRASyncError`` that says which promise is broken.

    Holds when everything sent was bound, hash and version are the payload's, the version is newer than
    ``previous_version``, and, with ``probe_floor``, a probe forward changed by more than it (0.0: changed at all).
    """
    if previous_version is not None and payload.version <= previous_version:
        raise StaleVersionError(
            f"version {payload.version} was sent after {previous_version}; every sync needs a larger version, or "
            "receivers may serve a cached adapter."
        )
    if receipt.version != payload.version:
        raise StaleVersionError(
            f"version {payload.version} was sent and the receiver holds {receipt.version}; it serves a stale adapter."
        )
    sent = len(payload.modules), len(payload.tensors)
    bound = receipt.modules_bound, receipt.tensors_bound
    if bound != sent or receipt.tensors_ignored:
        raise BindError(
            f"sent {sent[0]} modules / {sent[1]} tensors, bound {bound[0]} / {bound[1]}, ignored "
            f"{receipt.tensors_ignored}. Compare the receiver's module names with `lora_sync.names`."
        )
    if receipt.hash != payload.hash:
        raise CorruptPayloadError(
            f"version {payload.version}: {payload.hash} was sent, the receiver holds {receipt.hash}; sync again."
        )
    if probe_floor is not None and not (receipt.probe_delta is not None and receipt.probe_delta > probe_floor):
        raise BindError(
            f"the probe forward changed by {receipt.probe_delta!r}, which is not above {probe_floor!r}: the adapter is "
            "in place and does nothing there. Check that it is the active adapter (a fresh LoRA has B = 0)."
        )
    return receipt
