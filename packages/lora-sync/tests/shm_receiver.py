"""A receiver in a process of its own; run by test_lora_transport.py as `python shm_receiver.py NAME`.

Prints one line per message that arrived, and dies without a word in the middle of the third.
"""

from __future__ import annotations

import os
import sys

from lora_sync.transport import SharedMemoryTransport

channel = SharedMemoryTransport(sys.argv[1], "receiver")
for _ in range(2):
    message = channel.receive(timeout=60)
    print(message.version, message.hash, flush=True)

count = 0
hear = channel._hear


def dying(*args):
    global count
    count += 1
    if count == 6:
        os._exit(0)
    return hear(*args)


channel._hear = dying
channel.receive(timeout=60)
