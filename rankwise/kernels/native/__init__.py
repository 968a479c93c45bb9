"""C++ kernels for CPUs, compiled when first used: element-wise passes, codes, Newton-Schulz with matrix tiles.

Papers' rooms have sources of their own, which :mod:`.building` compiles, too.
"""

from rankwise.kernels.native.compiled_passes import is_available, run, squared_norms

__all__ = ["is_available", "run", "squared_norms"]
