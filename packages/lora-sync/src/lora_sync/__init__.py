"""Move a LoRA from the trainer to the sampler, and prove that it arrived."""

from .adapters import LoRAAdapterMixin, active_adapter, copy_adapter, ema_update_adapter, use_adapter
from .bind import applied_version, apply_lora
from .errors import (
    AdapterError,
    BindError,
    CorruptPayloadError,
    ExportError,
    LoRASyncError,
    MissingExtraError,
    NameMapError,
    PayloadError,
    StaleVersionError,
    TransportError,
    TransportTimeoutError,
    TruncatedPayloadError,
    WrongBaseError,
)
from .export import export, load_any
from .extract import extract_lora, stream_lora
from .fingerprint import fingerprint
from .names import NameMap, get_map, guess_map
from .payload import LoRAPayload
from .receipt import LoRAReceipt, verify

__all__ = [
    "AdapterError",
    "BindError",
    "CorruptPayloadError",
    "ExportError",
    "LoRAAdapterMixin",
    "LoRAPayload",
    "LoRAReceipt",
    "LoRASyncError",
    "MissingExtraError",
    "NameMap",
    "NameMapError",
    "PayloadError",
    "StaleVersionError",
    "TransportError",
    "TransportTimeoutError",
    "TruncatedPayloadError",
    "WrongBaseError",
    "active_adapter",
    "applied_version",
    "apply_lora",
    "copy_adapter",
    "ema_update_adapter",
    "export",
    "extract_lora",
    "fingerprint",
    "get_map",
    "guess_map",
    "load_any",
    "stream_lora",
    "use_adapter",
    "verify",
]
