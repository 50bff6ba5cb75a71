"""Ways for a message to travel: one interface, `send(message)` and `receive()`, with deadlines and a hash check.

Inside a Ray cluster none is needed: a message is an argument of an actor's method like any other.
"""

from .base import Deadline, Transport
from .broadcast import BroadcastTransport, join_group
from .link import Link
from .shared_memory import SharedMemoryTransport

__all__ = ["BroadcastTransport", "Deadline", "Link", "SharedMemoryTransport", "Transport", "join_group"]
