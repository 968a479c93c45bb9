"""Cuts entries where elements that share an exponent lie in several of them.

A pass takes the whole blocks of an entry as they are stored. A block of which an entry has only a part is *loose*: it
is opened for the step, and stored at its end, when the largest of its elements is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rankwise.kernels.low_precision_runs import BLOCK
from rankwise.states.entries import Entry

__all__ = ["Segment", "Segments", "part_in_stored", "segments_of"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of an entry.

    Attributes:
        own: Range of the entry's elements.
        run: Index of the loose run of the stored entry that has the part; None: the part has whole blocks.
        within: Range of the elements in that run, or in the stored entry.
    """

    own: slice
    run: int | None
    within: slice


@dataclass(frozen=True, slots=True)
class Segments:
    """How the codes of a stored entry are divided into runs.

    Attributes:
        loose: Elements of each loose run: all that this rank has of its blocks.
        pieces: Segments of each entry that is a piece of the stored one, by its index; empty where an entry has gaps,
            because the whole state is opened then.
    """

    loose: list[slice] = field(default_factory=list)
    pieces: dict[int, list[Segment]] = field(default_factory=dict)


def part_in_stored(entry: Entry) -> slice:
    """Elements that an entry has of the one that keeps its states, if it is stored without gaps."""
    first = entry.shard.offset - entry.stored.shard.offset
    return slice(first, first + entry.shard.numel)


def segments_of(stored: Entry, entries: Sequence[Entry]) -> Segments:
    """Cut the entries, which are all pieces of a stored one."""
    segments, part = Segments(), stored.shard
    if any(entry.shard.spread is not None for entry in entries):
        return segments
    for entry in sorted(entries, key=lambda entry: entry.shard.offset):
        place = part_in_stored(entry)
        # Blocks are counted from the beginning of the parameter.
        first, last = part.start + place.start, part.start + place.stop
        begins = -(-first // BLOCK) * BLOCK
        ends = last if last == part.block_numel else last // BLOCK * BLOCK
        bounds = [first, min(begins, last), max(ends, min(begins, last)), last]
        pieces = segments.pieces[entry.index] = []
        for kind, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if start == end:
                continue
            own, within = slice(start - first, end - first), slice(start - part.start, end - part.start)
            if kind == 1:
                pieces.append(Segment(own, None, within))
            else:
                run = _loose(segments.loose, within, part.start, part.numel)
                shift = segments.loose[run].start
                pieces.append(Segment(own, run, slice(within.start - shift, within.stop - shift)))
    return segments


def _loose(runs: list[slice], within: slice, start: int, numel: int) -> int:
    """Index of the loose run that has the elements; a run is added or extended where needed."""
    first = max((start + within.start) // BLOCK * BLOCK - start, 0)
    last = min(-(-(start + within.stop) // BLOCK) * BLOCK - start, numel)
    if runs and first < runs[-1].stop:
        runs[-1] = slice(runs[-1].start, max(last, runs[-1].stop))
    else:
        runs.append(slice(first, last))
    return len(runs) - 1
