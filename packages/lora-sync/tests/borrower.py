"""A borrower in a process of its own; run by test_lora_one_copy.py as `python borrower.py FILE`, a pickle of loans.

Prints the sum of each lent tensor, and adds one to the first element of the first.
"""

import pickle
import sys
from pathlib import Path

loans = pickle.loads(Path(sys.argv[1]).read_bytes())
tensors = {name: loan.open() for name, loan in loans.items()}
for name, tensor in sorted(tensors.items()):
    print(name, tuple(tensor.shape), float(tensor.double().sum()), flush=True)
next(iter(tensors.values())).view(-1)[0] += 1
