r"""Two small integer tables on the device let one launch work on many runs of memory.

- The *table of runs* has one row per run: the addresses of its fields (weights, gradients, states ...), its length, and
  whatever integers a kernel needs besides.
- The *table of tiles* has one row per program: the run, and the first element of the tile in the run.

Tables are found again by their integers, so that a step whose tensors have not moved uploads nothing. An upload goes
through pinned memory without waiting for the device; the device makes the long table of tiles itself from the few
bounds of the runs. A run of length 0 has no tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain, repeat
from typing import NamedTuple, Protocol

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels import graphs
from rankwise.kernels.run_views import RunPlan, RunViews
from rankwise.kernels.triton.language import ceil_div, jit, launch
from rankwise.kernels.triton.tables import KEPT_TABLES, Row, Table, table_here

__all__ = [
    "Extras",
    "PlannedColumns",
    "Runs",
    "Tiles",
    "addresses",
    "lanes_of",
    "moved",
    "place_of",
    "planned_table",
    "read",
    "run_sums",
    "tiles_of",
    "wide",
    "write",
]

_KEPT_TILINGS = 256
_SUM_BLOCK = 1024


class Tiles:
    """The table of tiles, and the first program of each run.

    Args:
        lengths: Lengths of the runs.
        tile: Elements per program.
        device: Device of the tables.

    Attributes:
        count: Number of programs.
    """

    def __init__(self, lengths: Row, tile: int, device: torch.device) -> None:
        tiles = [ceil_div(length, tile) for length in lengths]
        self.count = sum(tiles)
        self._bounds = Table(tuple(accumulate(tiles, initial=0)), device)
        self._rows = Table(_rows_of(self._bounds.here(), self.count, tile), device)

    @property
    def rows(self) -> Tensor:
        """(programs, 2) int64, flattened: the run, and the first element in it."""
        return self._rows.here()

    @property
    def bounds(self) -> Tensor:
        """(runs + 1) int64."""
        return self._bounds.here()


def _rows_of(bounds: Tensor, count: int, tile: int) -> Tensor:
    """Make the table of tiles on the device: for a large model the host would need a second and half a GiB."""
    places = torch.arange(count, dtype=torch.int64, device=bounds.device)
    runs = torch.searchsorted(bounds[1:], places, right=True)
    return torch.stack([runs, places.sub_(bounds[runs]).mul_(tile)], dim=1).view(-1)


@lru_cache(maxsize=_KEPT_TILINGS)
def tiles_of(lengths: Row, tile: int, device: torch.device) -> Tiles:
    """Return tiles of ``tile`` elements for runs of these lengths, kept from an earlier call if there was one."""
    return Tiles(lengths, tile, device)


def addresses(
    tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> list[int]:
    """Return the addresses of contiguous tensors.

    Raises:
        ValueError: A tensor has another type, is not contiguous, or is not on the device, by default the first one's.
    """
    if tensors and {tensor.device for tensor in tensors} != {device or tensors[0].device}:
        names = sorted({str(tensor.device) for tensor in tensors})
        raise ValueError(
            f"a kernel takes tensors of one device, {device or tensors[0].device}, but got some of {', '.join(names)}; "
            "keep weights, gradients and states on one device"
        )
    if not ({tensor.dtype for tensor in tensors} <= {dtype} and all(map(Tensor.is_contiguous, tensors))):
        tensor = next(unfit for unfit in tensors if unfit.dtype != dtype or not unfit.is_contiguous())
        raise ValueError(
            f"the Triton kernels take contiguous {dtype} tensors here, got {tensor.dtype} with strides "
            f"{tensor.stride()}; use the plain functions for others"
        )
    return list(map(Tensor.data_ptr, tensors))


def lengths_of(tensors: Sequence[Tensor]) -> Row:
    """Return the number of elements of each tensor."""
    planned = tensors.as_planned if isinstance(tensors, RunViews) else None
    return tuple(map(Tensor.numel, tensors)) if planned is None else planned[1].lengths


_Columns = tuple[tuple[RunPlan, Row, int], ...]


class PlannedColumns(Protocol):
    """What computes further integers of planned runs; there is one object for one set of runs."""

    def columns(self, base: int, itemsize: int) -> Sequence[Sequence[int]]:
        """Return lists with an integer per run, for a memory that begins at ``base``; elements have so many bytes."""


class Extras(NamedTuple):
    """Further integers of runs, which follow from where some memory begins.

    Attributes:
        plan: Computes the integers.
        base: Address at which the memory begins.
        itemsize: Bytes of an element in the memory.
    """

    plan: PlannedColumns
    base: int = 0
    itemsize: int = 0

    @property
    def columns(self) -> Sequence[Sequence[int]]:
        """Lists with an integer per run."""
        return self.plan.columns(self.base, self.itemsize)


def _bases_of(
    fields: Sequence[Sequence[Tensor]], types: Sequence[torch.dtype], device: torch.device
) -> _Columns | None:
    """Return each field's plan, addresses of flat tensors and bytes of an element; None if a field has no plan."""
    columns = []
    for field, dtype in zip(fields, types, strict=True):
        planned = field.as_planned if isinstance(field, RunViews) else None
        if planned is None or planned[1].has_gaps:
            return None
        flats, plan = planned
        columns.append((plan, tuple(addresses(flats, dtype, device)), dtype.itemsize))
    return tuple(columns)


@lru_cache(maxsize=KEPT_TABLES)
def planned_table(columns: _Columns, extras: Extras | None, device: torch.device) -> Table:
    """Make the table of planned runs; it is found again by the few addresses of the flat tensors."""
    places = (plan.addresses(bases, size) for plan, bases, size in columns)
    further = () if extras is None else extras.columns
    return Table(tuple(chain.from_iterable(zip(*places, columns[0][0].lengths, *further, strict=True))), device)


class Runs:
    """The tables of one launch.

    Args:
        fields: Lists of contiguous 1-D tensors, one list per field and one tensor per run.
        tile: Elements per program.
        extras: Lists of further integers, one per run; or the plan that computes them.
        types: Types of the fields; None: all are fp32.
        reach: Elements over which each run's tiles go, where they begin before the run; None: its length.

    Attributes:
        table: (runs, fields + 1 + extras) int64: addresses, length, extras.
        tiles: (programs, 2) int64, flattened.
        bounds: (runs + 1) int64: first program of each run.
        count: Number of programs.
        runs: Number of runs.
        device: Device of all fields.

    Raises:
        ValueError: The lists differ in length, or the tensors of a run do; or a tensor is not as ``fields`` asks.
    """

    def __init__(
        self,
        fields: Sequence[Sequence[Tensor]],
        tile: int,
        extras: Sequence[Sequence[int]] | Extras = (),
        types: Sequence[torch.dtype] | None = None,
        reach: Row | None = None,
    ) -> None:
        lengths = lengths_of(fields[0])
        for field in fields[1:]:
            if lengths_of(field) != lengths:
                raise ValueError("every field of a launch needs one tensor per run, as long as those of the others")
        self.runs = len(lengths)
        self.device = fields[0][0].device if lengths else torch.device("cpu")
        dtypes = types or [torch.float32] * len(fields)
        further = extras if isinstance(extras, Extras) else None
        planned = _bases_of(fields, dtypes, self.device) if further or not extras else None
        if planned is None or graphs.is_capturing(self.device):
            columns = extras.columns if isinstance(extras, Extras) else extras
            rows = zip(*map(addresses, fields, dtypes, repeat(self.device)), lengths, *columns, strict=True)
            self.table = table_here(tuple(chain.from_iterable(rows)), self.device)
        else:
            self.table = planned_table(planned, further, self.device).here()
        tiles = tiles_of(lengths if reach is None else reach, tile, self.device)
        self.tiles, self.bounds, self.count = tiles.rows, tiles.bounds, tiles.count

    def partial_sums(self, quantities: int) -> Tensor:
        """Return (programs, quantities) fp64 for :func:`run_sums`, of which each program writes its own row."""
        return torch.empty(self.count, quantities, dtype=torch.float64, device=self.device)


def run_sums(runs: Runs, partials: Tensor) -> Tensor:
    """Add up the programs' partial sums in a fixed order, without atomics.

    Args:
        runs: Runs of the launch that wrote the sums.
        partials: (programs, quantities) fp64.

    Returns:
        (quantities, runs) fp64; 0 for a run of length 0.
    """
    quantities = partials.shape[1]
    sums = torch.empty(quantities, runs.runs, dtype=torch.float64, device=partials.device)
    grid = (runs.runs, quantities)
    launch(_sum_kernel, grid, runs.device, partials, runs.bounds, sums, QUANTITIES=quantities, BLOCK=_SUM_BLOCK)
    return sums


@jit
def _sum_kernel(
    partials: tl.tensor, bounds: tl.tensor, sums: tl.tensor, QUANTITIES: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    run = tl.program_id(0)
    quantity = tl.program_id(1)
    first = tl.load(bounds + run)
    last = tl.load(bounds + run + 1)
    lanes = tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0.0, tl.float64)
    for start in range(first, last, BLOCK):
        at = start + lanes
        total += tl.load(partials + at * QUANTITIES + quantity, mask=at < last, other=0.0)
    tl.store(sums + quantity * tl.num_programs(0) + run, tl.sum(total, axis=0))


@jit
def lanes_of(LANES: tl.constexpr) -> tl.tensor:
    """Return the places of a tile, (LANES / 4, 4): a thread takes four neighbours, 16 bytes in fp32, of every field.

    In one dimension it would take 16 bytes of the narrowest field, and its accesses to wider fields would be scattered.
    With eight neighbours of each field, what is narrow and what is wide moves between threads.
    """
    return tl.arange(0, LANES // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]


@jit
def place_of(
    row: tl.tensor, FIELD: tl.constexpr, start: tl.tensor, FAST: tl.constexpr, ELEMENT: tl.constexpr = tl.float32
) -> tl.tensor:
    """Return where a tile of a field begins. FAST promises a full tile at a multiple of 16 bytes, for wide accesses."""
    return moved(tl.load(row + FIELD).to(tl.pointer_type(ELEMENT)), start, FAST)


@jit
def moved(place: tl.tensor, by: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Return the address ``by`` elements further, which are a multiple of 16 bytes if FAST."""
    if FAST:
        return tl.multiple_of(place + by, 16)
    else:
        return place + by


@jit
def read(place: tl.tensor, lanes: tl.tensor, inside: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Return a tile of a field."""
    if FAST:
        return tl.load(place + lanes)
    else:
        return tl.load(place + lanes, mask=inside, other=0.0)


@jit
def write(place: tl.tensor, value: tl.tensor, lanes: tl.tensor, inside: tl.tensor, FAST: tl.constexpr) -> None:
    """Store a tile of a field, rounded to its type."""
    value = value.to(place.dtype.element_ty)
    if FAST:
        tl.store(place + lanes, value)
    else:
        tl.store(place + lanes, value, mask=inside)


@jit
def wide(row: tl.tensor, FIELDS: tl.constexpr) -> tl.tensor:
    """Whether all fields of a run begin at a multiple of 16 bytes."""
    address = tl.load(row)
    for field in tl.static_range(1, FIELDS):
        address |= tl.load(row + field)
    return (address & 15) == 0
