"""Which elements of a parameter a rank has, from the placements of a ``DTensor``: pure Python, no communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rankwise.intervals import Interval
from rankwise.layout.layout_source import Slice

__all__ = ["PlacementError", "Runs", "copy_ranks", "held_runs", "slices_of"]

Runs = list[Interval]
"""Positions along one dimension, ascending and apart."""


class PlacementError(ValueError):
    """A placement does not tell where elements lie, or is not known."""


def held_runs(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[Runs]:
    """Runs of each dimension of a parameter that a rank has.

    Args:
        shape: Shape of the parameter.
        mesh_shape: Ranks along each dimension of the mesh.
        coordinate: This rank's coordinate in the mesh.
        placements: By dimension of the mesh: ``Shard``, ``_StridedShard`` (split before the dimensions left of it) or
            ``Replicate``, applied from left to right as torch does.

    Raises:
        PlacementError: A placement is another one, ``Partial`` for example.
    """
    held: list[Runs] = [[Interval(0, size)] if size else [] for size in shape]
    for ways, place, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement.is_replicate():
            continue
        kind = type(placement).__name__
        if kind not in ("Shard", "_StridedShard"):
            raise PlacementError(f"{placement} is not known: it must be Shard or Replicate")
        dim = placement.dim % len(shape)
        split = int(placement.split_factor) if kind == "_StridedShard" else 1
        pieces = [_chunk(held[dim], split, number) for number in range(split)]
        held[dim] = _joined(run for piece in pieces for run in _chunk(piece, ways, place))
    return held


def _chunk(runs: Runs, count: int, number: int) -> Runs:
    """One of the chunks of ``torch.chunk``: all have one length but the last ones, which may be shorter or empty."""
    total = sum(run.length for run in runs)
    size = -(-total // count)
    return _taken(runs, number * size, min((number + 1) * size, total))


def _taken(runs: Runs, first: int, last: int) -> Runs:
    """The elements number ``first`` to ``last`` of some runs."""
    taken, before = [], 0
    for run in runs:
        part = run.common(run.start + first - before, run.start + last - before)
        if part.length:
            taken.append(part)
        before += run.length
    return taken


def _joined(runs: Iterator[Interval]) -> Runs:
    joined: Runs = []
    for start, end in runs:
        if joined and joined[-1].end == start:
            start = joined.pop().start
        joined.append(Interval(start, end))
    return joined


def slices_of(name: str, shape: Sequence[int], held: Sequence[Runs], copy: int) -> tuple[Slice, ...]:
    """Convert a rank's part of a parameter, from :func:`held_runs`, to runs of the flattened parameter.

    Raises:
        PlacementError: The columns of this rank do not lie side by side.
    """
    sizes, runs, width, columns = list(shape), list(held), 1, None
    if len(sizes) > 1 and runs[-1] and runs[-1] != [(0, sizes[-1])]:
        if len(runs[-1]) > 1:
            raise PlacementError("columns that do not lie side by side cannot be followed")
        columns = runs[-1][0]
        width = columns.length
        sizes, runs = sizes[:-1], runs[:-1]
    slices, offset = [], 0
    for run in _flat_runs(sizes, runs) if all(held) else []:
        slices.append(Slice(name, run.start * width, run.end * width, offset, columns, copy))
        offset += run.length * width
    return tuple(slices)


def _flat_runs(sizes: Sequence[int], held: Sequence[Runs]) -> Runs:
    """Runs of the flattened dimensions, in row-major order."""
    flat = [Interval(0, 1)]
    block = 1
    for size, runs in zip(reversed(sizes), reversed(held), strict=True):
        if flat == [(0, block)]:
            flat = [Interval(start * block, end * block) for start, end in runs]
        else:
            rows = (row for start, end in runs for row in range(start, end))
            flat = [run.shifted(row * block) for row in rows for run in flat]
        block *= size
    return flat


def copy_ranks(ranks: Any, coordinate: Sequence[int], placements: Sequence[Any]) -> list[int]:
    """Ranks that have the same copy of a parameter as the rank at a coordinate, each a part of it."""
    chosen = tuple(
        place if placement.is_replicate() else slice(None)
        for place, placement in zip(coordinate, placements, strict=True)
    )
    sharing: list[int] = ranks[chosen].flatten().tolist()
    return sorted(sharing)
