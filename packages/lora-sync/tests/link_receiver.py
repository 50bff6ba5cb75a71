"""The far end of a link, in a process of its own; run by test_lora_link.py as `python link_receiver.py KIND PLACE DEVICE`.

Prints the receipt of each of two streams of weights.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import torch
from lora_sync import load_weights
from lora_sync.transport import Link

kind, place, device = sys.argv[1:]
module = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 4)).to(device)
with Link(kind, place, 1).receiver(0, device) as transport:  # type: ignore[arg-type]
    for _ in range(2):
        print(json.dumps(dataclasses.asdict(load_weights(module, iter(transport.receive, None)))), flush=True)  # type: ignore[arg-type]
