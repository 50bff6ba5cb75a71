"""Move a LoRA from the trainer to the sampler, and prove that it arrived."""

from .adapters import LoRAAdapterMixin, use_adapter
from .bind import applied_version, apply_lora
from .checksum import content_sum
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
from .export import export
from .extract import extract_lora, stream_lora
from .fingerprint import fingerprint
from .load import load_any
from .maps import get_map, guess_map
from .names import NameMap
from .payload import LoRAPayload, Promise
from .receipt import LoRAReceipt, verify
from .vllm import to_vllm
from .weights import (
    WeightBucket,
    WeightLoader,
    WeightReceipt,
    WeightStream,
    base_weights,
    buckets,
    load_named,
    load_weights,
    stream_weights,
    verify_weights,
    weights_complete,
)

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
    "Promise",
    "StaleVersionError",
    "TransportError",
    "TransportTimeoutError",
    "TruncatedPayloadError",
    "WeightBucket",
    "WeightLoader",
    "WeightReceipt",
    "WeightStream",
    "WrongBaseError",
    "applied_version",
    "apply_lora",
    "base_weights",
    "buckets",
    "content_sum",
    "export",
    "extract_lora",
    "fingerprint",
    "get_map",
    "guess_map",
    "load_any",
    "load_named",
    "load_weights",
    "stream_lora",
    "stream_weights",
    "to_vllm",
    "use_adapter",
    "verify",
    "verify_weights",
    "weights_complete",
]
