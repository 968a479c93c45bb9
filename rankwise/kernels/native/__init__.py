"""What is compiled for CPUs, when it is first used: element-wise passes, Newton-Schulz with matrix tiles, products.

Papers' rooms build sources of their own with the same means (:mod:`.building`).
"""

from rankwise.kernels.native.compiled_passes import is_available, run, squared_norms

__all__ = ["is_available", "run", "squared_norms"]
