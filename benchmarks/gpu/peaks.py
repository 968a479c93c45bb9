"""What devices can do at most, as their makers state it: the ends of every scale here."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PEAKS", "Peaks", "peaks_of"]


class Peaks(NamedTuple):
    """Peak rates of one device.

    Attributes:
        bandwidth: Bytes a second to and from its memory.
        bfloat16: FLOP a second of dense products.
        tf32: The same of float32 that tensor cores round; where there are none, :attr:`float32`.
        float32: The same on the ordinary units.
        source: Where the figures are from.
    """

    bandwidth: float
    bfloat16: float
    tf32: float
    float32: float
    source: str

    def rate(self, kind: str) -> float:
        """FLOP a second of products of a kind: "bfloat16", "float32", or "bf16x3", three products of halves."""
        return {"bfloat16": self.bfloat16, "float32": self.float32, "bf16x3": self.bfloat16 / 3}[kind]


_A100 = "NVIDIA A100 datasheet, 2021-06"
_H100 = "NVIDIA H100 datasheet, dense: half of the figures with sparsity"
_H200 = "NVIDIA H200 datasheet, dense: half of the figures with sparsity"
_MI300 = "AMD Instinct MI300X data sheet, 2023-12"

PEAKS: dict[str, Peaks] = {
    "H200 NVL": Peaks(4.8e12, 836e12, 418e12, 60e12, _H200),
    "H200": Peaks(4.8e12, 989e12, 494e12, 67e12, _H200),
    "H100 PCIe": Peaks(2.0e12, 756e12, 378e12, 51e12, _H100),
    "H100 NVL": Peaks(3.9e12, 835e12, 417e12, 60e12, _H100),
    "H100 80GB HBM3": Peaks(3.35e12, 989e12, 494e12, 67e12, _H100),
    "A100-SXM4-80GB": Peaks(2.039e12, 312e12, 156e12, 19.5e12, _A100),
    "A100 80GB PCIe": Peaks(1.935e12, 312e12, 156e12, 19.5e12, _A100),
    "A100": Peaks(1.555e12, 312e12, 156e12, 19.5e12, _A100),
    "MI300X": Peaks(5.3e12, 1307e12, 653e12, 163e12, _MI300),
}
"""By what the device's name contains; the first that fits."""


def peaks_of(device: str) -> Peaks | None:
    """Peaks of a device by its name; None where it is not known, and nothing is predicted."""
    return next((peaks for name, peaks in PEAKS.items() if name in device), None)
