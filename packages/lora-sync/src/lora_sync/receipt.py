"""What a receiver answers, and the check that makes a sync count."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import BindError, CorruptPayloadError, StaleVersionError
from .payload import LoRAPayload, Promise


@dataclass(frozen=True)
class LoRAReceipt:
    """One receiver's account of one sync. Plain numbers and strings: it travels as JSON.

    Args:
        version: of what is in place now.
        hash: of the tensors and alphas that the receiver holds after binding; None where it holds the adapter in another form
            (another dtype, cut or fused).
        modules_bound, tensors_bound: counted while binding.
        tensors_ignored: sent, and used nowhere.
        elements_equal: where there is no hash: how many elements it holds that equal those that came in.
    """

    version: int
    hash: str | None
    modules_bound: int
    tensors_bound: int
    tensors_ignored: int = 0
    elements_equal: int | None = None


def verify(sent: LoRAPayload | Promise, receipt: LoRAReceipt, *, previous_version: int | None = None) -> LoRAReceipt:
    """Return the receipt, or raise a `LoRASyncError` that says which promise is broken.

    It holds when everything sent was bound, the version is the payload's and newer than `previous_version`, and the receiver's
    hash is the payload's, or it found as many equal elements as the payload has. A receipt without either is refused.
    """
    promise = sent.promise if isinstance(sent, LoRAPayload) else sent
    if previous_version is not None and promise.version <= previous_version:
        raise StaleVersionError(
            f"version {promise.version} was sent after {previous_version}; every sync needs a larger version, or "
            "receivers may serve a cached adapter."
        )
    if receipt.version != promise.version:
        raise StaleVersionError(
            f"version {promise.version} was sent and the receiver holds {receipt.version}; it serves a stale adapter."
        )
    wanted = promise.modules, promise.tensors
    bound = receipt.modules_bound, receipt.tensors_bound
    if bound != wanted or receipt.tensors_ignored:
        raise BindError(
            f"sent {wanted[0]} modules / {wanted[1]} tensors, bound {bound[0]} / {bound[1]}, ignored "
            f"{receipt.tensors_ignored}. Compare the receiver's module names with `lora_sync.names`."
        )
    if receipt.hash is None and receipt.elements_equal is None:
        raise CorruptPayloadError(
            f"version {promise.version}: the receipt has neither a hash nor a count of equal elements, so it proves nothing; "
            "bind with prove=True."
        )
    if receipt.hash is not None and receipt.hash != promise.hash:
        raise CorruptPayloadError(
            f"version {promise.version}: {promise.hash} was sent, the receiver holds {receipt.hash}; sync again."
        )
    if receipt.elements_equal is not None and receipt.elements_equal != promise.numel:
        raise CorruptPayloadError(
            f"version {promise.version}: {promise.numel} elements were sent, {receipt.elements_equal} of them are in the "
            "receiver as they came; sync again."
        )
    return receipt
