"""STAND-IN: an older name of a module."""

from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

__all__ = ["Float8Tensor"]
