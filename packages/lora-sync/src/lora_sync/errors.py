"""What can go wrong between the adapter that trains and the adapter that samples, one name per fault.

Every class takes one message, so that instances survive pickling through Ray and torch.multiprocessing.
"""


class LoRASyncError(RuntimeError):
    """Base of everything this package raises on purpose."""


class PayloadError(LoRASyncError, ValueError):
    """A payload that cannot be built: no tensors, odd shapes, an unsupported LoRA variant."""


class TruncatedPayloadError(PayloadError):
    """The bytes end before the header says they should."""


class CorruptPayloadError(PayloadError):
    """The bytes are all there, and at least one is wrong: a hash or the header does not match."""


class StaleVersionError(LoRASyncError, ValueError):
    """An adapter older than the one already in place, or the same version with other content."""


class WrongBaseError(LoRASyncError, ValueError):
    """The adapter was trained on another base model than the one that should carry it."""


class BindError(LoRASyncError, ValueError):
    """Adapter and module do not fit: names or shapes differ, or the receipt shows that less was bound than sent."""


class AdapterError(LoRASyncError, KeyError):
    """An adapter name that the module does not have, or that cannot be used in this place."""

    def __str__(self) -> str:  # KeyError would print the repr, with quotes around a whole sentence
        return str(self.args[0]) if self.args else ""


class NameMapError(LoRASyncError, ValueError):
    """A module name, an architecture or a file layout for which there is no rule."""


class ExportError(LoRASyncError, ValueError):
    """A written file that does not read back as the adapter that was exported."""


class TransportError(LoRASyncError, ConnectionError):
    """A transport that broke: peer gone, channel closed, peer reported a failure."""


class TransportTimeoutError(TransportError, TimeoutError):
    """Nothing came, or nobody took it, before the deadline."""


class MissingExtraError(LoRASyncError, ImportError):
    """An optional dependency is absent; the message names the install command."""
