r"""MKOR passes over the gradients of many matrices before and after they are multiplied by their factors.

Bytes per element (fp32 gradients, products in bfloat16): 4 read and 2 written on the way to the products, the
gradient's norm included; 2 read for the norm of the result. Then a step reads the result in the type of the products,
2 bytes, and multiplies it by its matrix's ratio of norms; to have it in fp32, 2 are read and 4 written. Two small
launches choose the ratios, and put the gradient where a result is not usable.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.language import ELEMENTS, jit, launch
from rankwise.kernels.triton.segments import Extras, Runs, lanes_of, place_of, read, wide, write
from rankwise.kernels.triton.tables import table_here
from rankwise.mkor.product_groups import ProductGroups

__all__ = ["GradientPasses"]

TILE = 2048
_SUM_BLOCK = 1024


class GradientPasses:
    """The passes over some runs of gradients, in the order of their use.

    Args:
        sources: Contiguous fp32 runs, at least one.
        arrangement: Places of the runs' operands and results.
        space: Memory that is arranged so.
        results: Views of the results in this memory, 1-D, in the type of the products.
        out: fp32 tensors for the results; None: they stay where they are.

    Raises:
        ValueError: A run is no contiguous fp32 run.
    """

    def __init__(
        self,
        sources: Sequence[Tensor],
        arrangement: ProductGroups,
        space: Tensor,
        results: Sequence[Tensor],
        out: Sequence[Tensor] | None,
    ) -> None:
        product = results[0].dtype
        fields, types = [sources, results], [torch.float32, product]
        if out is not None:
            fields, types = [*fields, out], [*types, torch.float32]
        extras = Extras(arrangement, space.data_ptr(), space.itemsize)
        self._runs = Runs(fields, TILE, extras, types)
        # Tables have addresses only, so that these tensors must live until the last pass.
        self._alive = fields
        self._first_runs = (0, *accumulate(arrangement.runs_of))
        self._partials = self._runs.partial_sums(2)
        self._has_gaps = arrangement.has_gaps
        self._out = out is not None
        self._constants: dict[str, Any] = {"ELEMENT": ELEMENTS[product], "FIELDS": len(fields)}

    def gather(self, measured: bool) -> None:
        """Round the gradients into the operands.

        Args:
            measured: Whether :meth:`choose` will be called.
        """
        self._launch(_gather_kernel, self._partials, GAPS=self._has_gaps, MEASURED=measured)

    def choose(self) -> Tensor:
        """Compare the results with the gradients.

        Returns:
            (2, runs) fp32, the ratio of the norms of each run's matrix, 1 where it is not usable, and whether it is.
        """
        runs = self._runs
        self._launch(_squares_kernel, self._partials)
        choices = torch.empty(2, runs.runs, dtype=torch.float32, device=runs.device)
        table = table_here(self._first_runs, runs.device)
        given = table, runs.bounds, self._partials, choices, runs.runs
        launch(_choose_kernel, (len(self._first_runs) - 1,), runs.device, *given, BLOCK=_SUM_BLOCK)
        return choices

    def finish(self, choices: Tensor | None) -> None:
        """Put gradients where results are not usable, and, if ``out`` was given, write all results there."""
        given = self._partials if choices is None else choices  # without choices the kernel does not read this
        self._launch(_finish_kernel, given, self._runs.runs, OUT=self._out, SCALED=choices is not None)

    def _launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        runs = self._runs
        given = runs.table, runs.tiles, *arguments
        launch(kernel, (runs.count,), runs.device, *given, **self._constants, **constants, BLOCK=TILE, num_warps=4)


@jit
def _gather_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    partials: tl.tensor,
    ELEMENT: tl.constexpr,
    FIELDS: tl.constexpr,
    GAPS: tl.constexpr,
    MEASURED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a tile of a gradient to its operand, and sum its squares."""
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tiles + 2 * program) * (FIELDS + 5)
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + FIELDS)
    partial = partials + 2 * program
    if (start + BLOCK <= length) & wide(row, FIELDS) & ((tl.load(row + FIELDS + 1) & 15) == 0):
        _gather_tile(row, start, length, partial, ELEMENT, FIELDS, GAPS, MEASURED, BLOCK, True)
    else:
        _gather_tile(row, start, length, partial, ELEMENT, FIELDS, GAPS, MEASURED, BLOCK, False)


@jit
def _gather_tile(
    row: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    partial: tl.tensor,
    ELEMENT: tl.constexpr,
    FIELDS: tl.constexpr,
    GAPS: tl.constexpr,
    MEASURED: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    lanes = lanes_of(BLOCK)
    at = start + lanes
    inside = at < length
    value = read(place_of(row, 0, start, FAST), lanes, inside, FAST)
    if MEASURED:
        digits = value.to(tl.float64)
        tl.store(partial, tl.sum(tl.sum(digits * digits, axis=1), axis=0))
    if GAPS:
        operand = tl.load(row + FIELDS + 1).to(tl.pointer_type(ELEMENT))
        columns = tl.load(row + FIELDS + 3)
        place = tl.load(row + FIELDS + 2) + at
        place = place // columns * tl.load(row + FIELDS + 4) + place % columns
        tl.store(operand + place, value.to(ELEMENT), mask=inside)
    else:
        write(place_of(row, FIELDS + 1, start, FAST, ELEMENT), value, lanes, inside, FAST)


@jit
def _squares_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    partials: tl.tensor,
    ELEMENT: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum the squares of a tile of a result."""
    program = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tiles + 2 * program) * (FIELDS + 5)
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + FIELDS)
    partial = partials + 2 * program + 1
    if (start + BLOCK <= length) & wide(row, FIELDS):
        _squares_tile(row, start, length, partial, ELEMENT, BLOCK, True)
    else:
        _squares_tile(row, start, length, partial, ELEMENT, BLOCK, False)


@jit
def _squares_tile(
    row: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    partial: tl.tensor,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    lanes = lanes_of(BLOCK)
    value = read(place_of(row, 1, start, FAST, ELEMENT), lanes, start + lanes < length, FAST).to(tl.float64)
    tl.store(partial, tl.sum(tl.sum(value * value, axis=1), axis=0))


@jit
def _choose_kernel(
    first_runs: tl.tensor,
    bounds: tl.tensor,
    partials: tl.tensor,
    choices: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the ratio of a matrix's norms for each of its runs, and whether it is usable."""
    first_run = tl.load(first_runs + tl.program_id(0))
    last_run = tl.load(first_runs + tl.program_id(0) + 1)
    first = tl.load(bounds + first_run)
    last = tl.load(bounds + last_run)
    lanes = tl.arange(0, BLOCK)
    before = tl.full((BLOCK,), 0.0, tl.float64)
    after = tl.full((BLOCK,), 0.0, tl.float64)
    for start in range(first, last, BLOCK):
        at = start + lanes
        before += tl.load(partials + 2 * at, mask=at < last, other=0.0)
        after += tl.load(partials + 2 * at + 1, mask=at < last, other=0.0)
    wanted = tl.sqrt(tl.sum(before, axis=0))
    norm = tl.sqrt(tl.sum(after, axis=0))
    usable = (norm > 0.0) & (norm < float("inf"))
    ratio = tl.where(usable, wanted / tl.where(usable, norm, 1.0), 1.0).to(tl.float32)
    for run in range(first_run, last_run):
        tl.store(choices + run, ratio)
        tl.store(choices + count + run, tl.where(usable, 1.0, 0.0))


@jit
def _finish_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    choices: tl.tensor,
    count: tl.tensor,
    ELEMENT: tl.constexpr,
    FIELDS: tl.constexpr,
    OUT: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a tile of a gradient over a result that is not usable; if OUT, write it or the result elsewhere."""
    program = tl.program_id(0).to(tl.int64)
    run = tl.load(tiles + 2 * program)
    row = table + run * (FIELDS + 5)
    start = tl.load(tiles + 2 * program + 1)
    length = tl.load(row + FIELDS)
    ratio = 1.0
    usable = 1.0
    if SCALED:
        ratio = tl.load(choices + run)
        usable = tl.load(choices + count + run)
    acts = True
    if not OUT:
        acts = usable == 0.0
    if acts:
        if (start + BLOCK <= length) & wide(row, FIELDS):
            _finish_tile(row, start, length, ratio, usable, ELEMENT, OUT, BLOCK, True)
        else:
            _finish_tile(row, start, length, ratio, usable, ELEMENT, OUT, BLOCK, False)


@jit
def _finish_tile(
    row: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    ratio: tl.tensor,
    usable: tl.tensor,
    ELEMENT: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    lanes = lanes_of(BLOCK)
    inside = start + lanes < length
    if usable == 0.0:
        value = read(place_of(row, 0, start, FAST), lanes, inside, FAST)
    else:
        value = read(place_of(row, 1, start, FAST, ELEMENT), lanes, inside, FAST).to(tl.float32) * ratio
    if OUT:
        write(place_of(row, 2, start, FAST), value, lanes, inside, FAST)
    else:
        write(place_of(row, 1, start, FAST, ELEMENT), value, lanes, inside, FAST)
