"""How entries are cut where elements that share an exponent lie in several of them.

A pass takes the whole blocks of an entry as they are kept. A block of which an entry has a part only is *loose*: it is
opened for the step, and kept at its end, when the largest of its elements is known.
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
        own: Which of the entry's elements.
        run: Which of the loose runs of the stored entry it lies in, and its elements there; None: whole blocks.
        within: Which elements of the stored entry, or of that run.
    """

    own: slice
    run: int | None
    within: slice


@dataclass(frozen=True, slots=True)
class Segments:
    """How the codes of a stored entry are divided into runs.

    Attributes:
        loose: The elements of each loose run: of all the blocks in it what this rank has.
        pieces: By the index of the entries that are made of it, what they consist of; empty where some are stored with
            gaps, so that all of it is opened.
    """

    loose: list[slice] = field(default_factory=list)
    pieces: dict[int, list[Segment]] = field(default_factory=dict)


def part_in_stored(entry: Entry) -> slice:
    """Which elements of the entry that keeps its states an entry has, if it is stored without gaps."""
    first = 0 if entry.stored is None else entry.shard.offset - entry.stored.shard.offset
    return slice(first, first + entry.shard.numel)


def segments_of(stored: Entry, entries: Sequence[Entry]) -> Segments:
    """Cut the entries that are made of a stored one.

    Args:
        stored: Keeps the states.
        entries: All of them.
    """
    found, part = Segments(), stored.shard
    if any(entry.shard.spread is not None for entry in entries):
        return found
    for entry in sorted(entries, key=lambda entry: entry.shard.offset):
        place = part_in_stored(entry)
        # Counted from the beginning of the parameter, where blocks do.
        first, last = part.start + place.start, part.start + place.stop
        begins = -(-first // BLOCK) * BLOCK
        ends = last if last == part.block_numel else last // BLOCK * BLOCK
        bounds = [first, min(begins, last), max(ends, min(begins, last)), last]
        pieces = found.pieces[entry.index] = []
        for kind, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if start == end:
                continue
            own, within = slice(start - first, end - first), slice(start - part.start, end - part.start)
            if kind == 1:
                pieces.append(Segment(own, None, within))
            else:
                run = _loose(found.loose, within, part.start, part.numel)
                shift = found.loose[run].start
                pieces.append(Segment(own, run, slice(within.start - shift, within.stop - shift)))
    return found


def _loose(runs: list[slice], within: slice, start: int, numel: int) -> int:
    """The run that elements lie in, which is made or grows where it must."""
    first = max((start + within.start) // BLOCK * BLOCK - start, 0)
    last = min(-(-(start + within.stop) // BLOCK) * BLOCK - start, numel)
    if runs and first < runs[-1].stop:
        runs[-1] = slice(runs[-1].start, max(last, runs[-1].stop))
    else:
        runs.append(slice(first, last))
    return len(runs) - 1
