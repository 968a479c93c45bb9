"""The states that the owner of a matrix keeps: a rule declares them once, and whoever needs them reads that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.kernels.low_precision_runs import is_coded
from rankwise.states.packed_states import PackedLayout, StateRun

__all__ = ["MatrixForm", "State", "StatePart", "StoredState", "scalar"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class State:
    """A state that the owner of a matrix keeps.

    Attributes:
        name: Its key in the dictionary that the rule gets.
        shape: Its shape, given rows, columns and the param group with all other options; None from it: this matrix has
            no such state. Left out: one value for every element, which the option ``state_dtype`` may keep in fewer
            bits.
        fill: Overwrites a tensor of zeros with the first values; left out: zeros.
        dtype: Its type; None: that of the computation, or what :meth:`OptimizerSpec.type_of_matrix_state` says.
        axes: For each dimension of the state, the axis of the matrix along which it lies, if any, given rows and
            columns; left out: slices of a matrix have all of it.
        counted: Whether the host computes with it. It lies in host memory then, unless the optimizer is capturable.
        by_block: Whether each block of a fused weight has one, ``name[block]``, where blocks have no owners.
        with_bias: Its dimensions that are longer by one where the bias rides along as one more column of the matrix.
        lendable: Whether another rank than the owner may keep it between steps.
    """

    name: str
    shape: Callable[[int, int, Mapping[str, Any]], Shape | None] | None = None
    fill: Callable[[Tensor], Any] | None = None
    dtype: torch.dtype | None = None
    axes: Callable[[int, int], tuple[int | None, ...]] | None = None
    counted: bool = False
    by_block: bool = False
    with_bias: tuple[int, ...] = ()
    lendable: bool = False

    def shape_of(self, matrix: MatrixForm, rows: int, group: Mapping[str, Any]) -> Shape | None:
        """Shape of the state of a matrix, or of a block of it that has this number of rows."""
        if self.shape is None:
            return rows, matrix.columns
        shape = self.shape(rows, matrix.columns, group)
        if shape is None or not matrix.bias:
            return shape
        return tuple(size + (axis in self.with_bias) for axis, size in enumerate(shape))


def scalar(rows: int, columns: int, group: Mapping[str, Any]) -> tuple[()]:
    """The shape of a state that is one number, whatever the matrix."""
    return ()


class MatrixForm(NamedTuple):
    """A matrix as its rule sees it.

    Attributes:
        rows: Its rows.
        columns: Its columns.
        bias: Whether a bias rides along as one more column.
        blocks: Rows of the blocks that have states of their own, by name.
    """

    rows: int
    columns: int
    bias: bool = False
    blocks: Mapping[str, int] = {}


@dataclass(frozen=True)
class StoredState:
    """How a state of one matrix, or of a slice of one, is kept.

    Attributes:
        state: Its declaration.
        shape: Shape of what the rule gets.
        dtype: Its type; None: that of the computation.
        axes: For each dimension, the axis of the matrix along which it lies; empty if it lies along none.
        on_host: Whether it lies in host memory whatever the device.
    """

    state: State
    shape: Shape
    dtype: torch.dtype | None
    axes: tuple[int | None, ...] = ()
    on_host: bool = False

    def of_slice(self, axis: int, count: int) -> StoredState:
        """What each of ``count`` slices along an axis of the matrix keeps of it."""
        cut = self.axis(axis)
        shape = tuple(size // count if place == cut else size for place, size in enumerate(self.shape))
        return replace(self, shape=shape)

    def axis(self, axis: int) -> int | None:
        """Dimension along which slices of the matrix along ``axis`` have parts; None where each has all of it."""
        return self.axes.index(axis) if axis in self.axes else None

    @property
    def packing(self) -> PackedLayout | None:
        """Where codes and exponents lie; None where there are none."""
        numel = prod(self.shape)
        if self.dtype is None or not is_coded(self.dtype):
            return None
        return PackedLayout(self.dtype, numel, [StateRun(0, numel, 0, self.dtype)])

    @property
    def stored_shape(self) -> Shape:
        """Shape of what is kept."""
        return self.shape if self.packing is None else (self.packing.numel,)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of what is kept, where steps compute in ``dtype``."""
        return prod(self.stored_shape) * (self.dtype or dtype).itemsize

    def fresh(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make the state before the first step.

        Args:
            dtype: Type of the computation.
            device: Device of the computation.
        """
        device, fill = torch.device("cpu") if self.on_host else device, self.state.fill
        if self.packing is not None and (fill is None or device.type == "meta"):
            return self.packing.fresh(device)
        wide = dtype if self.dtype is None or self.packing is not None else self.dtype
        whole = torch.zeros(self.shape, dtype=wide, device=device)
        if fill is not None:
            fill(whole)
        return whole if self.packing is None else self.packing.packed(whole.view(-1))

    def opened(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """Give what the rule gets: the state itself, or a copy if it is narrow."""
        return kept.to(dtype) if self.packing is None else self.packing.opened(kept, self.shape, dtype)


class StatePart(NamedTuple):
    """The part that a matrix, or a slice of one, has of a state.

    Attributes:
        whole: Key of the matrix.
        number: Number of the slice.
        slices: Number of slices of the matrix.
        axis: Dimension along which slices have parts of the state; None where each has all of it.
    """

    whole: str
    number: int = 0
    slices: int = 1
    axis: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """View the part in the whole state."""
        return whole if self.axis is None else whole.chunk(self.slices, dim=self.axis)[self.number]

    def whole_shape(self, shape: Shape) -> Shape:
        """Shape of the whole state, given that of the part."""
        return tuple(size * self.slices if axis == self.axis else size for axis, size in enumerate(shape))
