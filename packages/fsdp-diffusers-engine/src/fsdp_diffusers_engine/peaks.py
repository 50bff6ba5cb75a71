"""What GPUs can do at most, from their makers' data sheets. Imports without torch."""

from __future__ import annotations

PEAK_BF16 = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.2,
}
"""Dense bf16 matrix products in 1e12 operations a second, by a part of the GPU's name."""


def tabled_peak(name: str) -> float | None:
    """The peak of a GPU, in 1e12 operations a second; the longest matching name of the table wins. None for an unknown one."""
    known = [key for key in PEAK_BF16 if key in name]
    return PEAK_BF16[max(known, key=len)] if known else None
