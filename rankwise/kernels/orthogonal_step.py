"""This module describes a step along an orthogonalised momentum as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rankwise.updates.adamw import Scalar

__all__ = ["Momentum", "OrthogonalStep", "Square"]

Square = tuple[Tensor, int]
"""A vector of squared norms in fp64, and the place of one in it."""

Momentum = tuple[Tensor, Tensor, Tensor | None, int]
"""Momentum and weight of a matrix, 1-D, and the square of the momentum's norm; no vector where it is not known."""


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
        square: The squared norm of the momentum, where it is known.
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
    square: Square | None = None

    def matrices(self) -> list[Momentum]:
        """Return the matrices one by one."""
        length = self.shape[0] * self.shape[1]
        if self.momentum.numel() == self.weight.numel() == length:
            return [(self.momentum, self.weight, *(self.square or (None, 0)))]
        momenta, weights = (tensor.view(-1, length).unbind() for tensor in (self.momentum, self.weight))
        return [(momentum, weight, None, 0) for momentum, weight in zip(momenta, weights, strict=True)]
