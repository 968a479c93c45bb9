"""This module describes a step along an orthogonalised momentum as data."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Matrices of one shape whose weights are stepped where they lie.

    Attributes:
        shape: Shape of each matrix.
        momenta: Momenta, of which the orthogonal factors are computed; they do not change. Each is the 1-D memory of a
            matrix, or of several one after another.
        weights: Weights in the order of the momenta, which decay and lose ``lr * factor`` times the orthogonal factors.
        eps: Number added to the norm.
        factor: Number that the orthogonal factors are multiplied by, beside the learning rate.
        lr: Learning rate, a float or a 0-d tensor.
        steps: Iterations.
        coefficients: Name of the iterations' polynomials.
        weight_decay: Decoupled decay rate.
        cautious: Whether elements that step away from zero do not decay.
        product: Type of the products; None: that of the call that does the step.
        squares: The squared norm of each momentum, None where it is not known; no sequence where none is.
    """

    shape: tuple[int, int]
    momenta: Sequence[Tensor]
    weights: Sequence[Tensor]
    eps: float
    factor: float
    lr: Scalar
    steps: int
    coefficients: str = "published"
    weight_decay: float = 0.0
    cautious: bool = False
    product: torch.dtype | None = None
    squares: Sequence[Square | None] | None = None

    def matrices(self) -> list[Momentum]:
        """Return the matrices one by one."""
        length = self.shape[0] * self.shape[1]
        found: list[Momentum] = []
        squares = self.squares or [None] * len(self.momenta)
        for momentum, weight, square in zip(self.momenta, self.weights, squares, strict=True):
            if momentum.numel() == length:
                found.append((momentum, weight, *(square or (None, 0))))
                continue
            pairs = zip(*(tensor.view(-1, length).unbind() for tensor in (momentum, weight)), strict=True)
            found += [(*pair, None, 0) for pair in pairs]
        return found
