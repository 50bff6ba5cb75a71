"""A `DiffusersBackend` with its own weights, in a Ray actor."""

from __future__ import annotations

import os
from typing import Any

import torch

from .diffusers_backend import DiffusersBackend, load_parts


class HostedDiffusersBackend(DiffusersBackend):
    """Work goes through one thread, in order; `health` and `abort` answer while it runs (see `Remote.aside`).

    Args:
        path: diffusers pipeline folder.
        dtype: name of the transformer's dtype.
        cuda_visible_devices: the GPU it may use, beside a trainer; None leaves the environment as it is.
        architecture: of its spec, as for `spec_of`.
        options: for `DiffusersBackend`.
    """

    def __init__(
        self,
        path: str,
        dtype: str = "float32",
        *,
        cuda_visible_devices: str | None = None,
        architecture: str | None = None,
        **options: Any,
    ) -> None:
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices  # before CUDA is first used in this process
        device = options.get("device", "cpu")
        super().__init__(
            *load_parts(path, getattr(torch, dtype), device, architecture), shares_weights=False, **options
        )

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()
