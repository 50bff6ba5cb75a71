"""Ways for a payload to travel: one interface, ``send(payload)`` and ``receive()``, with deadlines and a hash check."""

from .base import Deadline, Transport
from .broadcast import BroadcastTransport, join_group
from .files import FileTransport
from .inprocess import InProcessTransport
from .ray_store import RayTransport
from .shared_memory import SharedMemoryTransport

__all__ = [
    "BroadcastTransport",
    "Deadline",
    "FileTransport",
    "InProcessTransport",
    "RayTransport",
    "SharedMemoryTransport",
    "Transport",
    "join_group",
]
