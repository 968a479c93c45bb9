"""Matrices that are stepped where they lie, many at once: what is to be done, and what has become of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["InPlace", "LowRankStep", "StepsInPlace"]


@dataclass
class LowRankStep:
    """A matrix to be stepped where it lies, from its second step on.

    Attributes:
        shape: Shape of the parameter.
        right: What :func:`rankwise.ldadam.formulas.projects_right` says for it.
        gradient: 1-D; None: ``source`` has it already.
        source: The error buffer, 1-D, changed in place; without error feedback the gradient, left as it is.
        weight: 1-D, changed in place.
        state: ``basis``, ``exp_avg`` and ``exp_avg_sq``, changed in place.
        step: Steps applied including this one.
        group: Hyper-parameters.
        error: The error buffer where ``source``, then its sum with the gradient, is another tensor; else None.
    """

    shape: tuple[int, int]
    right: bool
    gradient: Tensor | None
    source: Tensor
    weight: Tensor
    state: Mapping[str, Tensor]
    step: int
    group: Mapping[str, Any]
    error: Tensor | None = None


class InPlace(NamedTuple):
    """What has become of matrices.

    Attributes:
        rotation: Shares of the old subspaces that the new ones have left, summed.
        kept: How many of them keep their basis.
    """

    rotation: Tensor | float
    kept: Tensor | float


class StepsInPlace(NamedTuple):
    """A form that steps many matrices at once.

    Attributes:
        takes: Whether it takes a matrix of a rank made of these tensors; and, where it is not the source, this error.
        step: Steps them.
    """

    takes: Callable[..., bool]
    step: Callable[[Sequence[LowRankStep]], InPlace]
