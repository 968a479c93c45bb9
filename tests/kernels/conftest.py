"""Makes the interpreter of Triton kernels a fixture of this folder."""

from triton_interpreter import interpreter, launches

__all__ = ["interpreter", "launches"]
