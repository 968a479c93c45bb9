"""This module describes a step along an orthogonalised momentum as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rankwise.updates.adamw import Scalar

__all__ = ["OrthogonalStep"]


@dataclass
class OrthogonalStep:
    """Matrices of one shape, one after another in memory, whose weights are stepped where they lie.

    Attributes:
        shape: Shape of each matrix.
        momentum: Momenta, 1-D, of which the orthogonal factors are computed; they do not change.
        weight: Weights, 1-D, which decay and lose ``lr * factor`` times the orthogonal factors.
        eps: Number added to the norm.
        factor: Number that the orthogonal factors are multiplied by, beside the learning rate.
        lr: Learning rate, a float or a 0-d tensor.
        steps: Iterations.
        coefficients: Name of the iterations' polynomials.
        weight_decay: Decoupled decay rate.
        cautious: Whether elements that step away from zero do not decay.
        product: Type of the products; None: that of the call that does the step.
    """

    shape: tuple[int, int]
    momentum: Tensor
    weight: Tensor
    eps: float
    factor: float
    lr: Scalar
    steps: int
    coefficients: str = "published"
    weight_decay: float = 0.0
    cautious: bool = False
    product: torch.dtype | None = None

    def matrices(self) -> list[tuple[Tensor, Tensor]]:
        """Return momentum and weight of each matrix, 1-D."""
        length = self.shape[0] * self.shape[1]
        if self.momentum.numel() == self.weight.numel() == length:
            return [(self.momentum, self.weight)]
        parts = (tensor.view(-1, length).unbind() for tensor in (self.momentum, self.weight))
        return list(zip(*parts, strict=True))
