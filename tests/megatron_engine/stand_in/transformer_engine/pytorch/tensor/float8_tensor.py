"""STAND-IN: see the package."""

from transformer_engine.pytorch.tensor import QuantizedTensor


class Float8Tensor(QuantizedTensor):
    """A tensor in 8 bits with one scale."""
