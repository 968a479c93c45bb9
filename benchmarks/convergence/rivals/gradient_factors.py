"""Kronecker factors of the gradient itself, moved by MKOR's rank-1 updates: what MKOR could be without statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rankwise.mkor.formulas import precondition

__all__ = ["GradientFactors"]


class GradientFactors:
    """Preconditions gradients of matrices by factor inverses that follow random combinations of their rows and columns.

    With a gradient ``D`` (o, i) and signs ``e``, ``D e`` has the second moment ``D D^T``, and ``D^T e`` that of
    ``D^T D``: Shampoo's factors (Gupta et al., arXiv 1802.09568), here of a power of -1 as MKOR's. Nothing is captured
    and nothing is sent.

    Args:
        matrices: Parameters with two dimensions.
        vectors: Combinations a side and update.
        interval: Steps from one update to the next.
        decay: Factor momentum.
        gain: Mean square of an update's vectors together, an element: the weight of statistics beside the identity.
        seed: Seed of the signs.

    The defaults are those of recorded runs, which do not name them: another value must be given, not made the default.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        vectors: int = 1,
        interval: int = 1,
        decay: float = 0.995,
        gain: float = 0.1,
        seed: int = 0,
    ) -> None:
        self._matrices = list(matrices)
        self._vectors, self._interval, self._decay, self._gain = vectors, interval, decay, gain
        self._signs = torch.Generator().manual_seed(seed)
        self._steps = 0
        self.inverses = [[torch.eye(side) for side in matrix.shape] for matrix in self._matrices]
        self._sizes = [[torch.zeros(()) for _ in matrix.shape] for matrix in self._matrices]

    @torch.no_grad()
    def precondition(self) -> None:
        """Replace the gradients, each by one of the same norm."""
        due = self._steps % self._interval == 0
        self._steps += 1
        for matrix, inverses, sizes in zip(self._matrices, self.inverses, self._sizes, strict=True):
            if matrix.grad is None:
                continue
            if due:
                for side, gradient in enumerate((matrix.grad, matrix.grad.T)):
                    self._move(inverses, sizes, side, gradient)
            matrix.grad = precondition(matrix.grad, *inverses)

    def _move(self, inverses: list[Tensor], sizes: list[Tensor], side: int, gradient: Tensor) -> None:
        signs = torch.randint(0, 2, (gradient.shape[1], self._vectors), generator=self._signs).float() * 2.0 - 1.0
        found = (gradient @ signs).T
        size = found.square().sum()
        # The gradient's own scale is no measure: its size relative to a running mean is.
        sizes[side] = size if sizes[side] == 0 else 0.9 * sizes[side] + 0.1 * size
        found = found * (self._gain * len(gradient) / sizes[side].clamp_min(1e-30)).sqrt()
        inverse = torch.lerp(torch.eye(len(gradient)), inverses[side], self._decay)
        for vector in found:
            direction = inverse @ vector
            inverse = inverse.addr(direction, direction / (1.0 + direction @ vector), alpha=-1.0)
        inverses[side] = inverse
