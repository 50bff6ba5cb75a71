"""The same step twice gives the same bits: what a GPU needs for that."""

from __future__ import annotations

import os

import torch


def make_deterministic() -> None:
    """Let PyTorch choose reproducible kernels, in this process and from now on.

    By default some of them, attention's backward among them, add up in whatever order their blocks finish; in bf16 a
    gradient then moves in its fourth digit between two runs. cuBLAS reads its setting when it starts, so this should come
    before the first product on a GPU. An operation without a reproducible kernel raises.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # saves a write
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
