"""SONew's kernels read and write tiles with these functions, in fp32 or in codes.

A tile has ROWS rows of 32 threads, (ROWS, 32), with four neighbouring elements each, (ROWS, 32, 4). The first and the
last BESIDE threads of a row own no elements, but repeat those that lie beside it. Elements are counted from the
beginning of the tile; those from ``low`` on and before ``high`` are there. Tiles of states in codes begin with a block
of the parameter, so that ``low`` is above 0 in the first tile of a run that begins within one.

The row of a run in the table has the addresses of its fields; its length, its place in its chain, the length of the
chain (0: the run is in one chain), and the addresses of its neighbours on the left and on the right (0: none). Where
states are narrow, three integers follow: elements between the beginning of a block and the run, and the first and the
last of the run's elements whose blocks it has alone; and for each narrow state :data:`COLUMNS_OF_CODES` integers:
the address of exponents, the place of the run in the parameter, the key of noise, and the addresses of the new values
of the elements before and after those.
"""

from __future__ import annotations

import triton.language as tl

from rankwise.kernels.low_precision_runs import BLOCK
from rankwise.kernels.triton.codes import (
    decoded,
    encoded,
    exponents_at,
    least_exponents,
    narrowed,
    noise_of,
    roots_of,
    seeds_of,
)
from rankwise.kernels.triton.language import jit
from rankwise.kernels.triton.segments import place_of, wide

__all__ = [
    "COLUMNS_OF_CODES",
    "apart",
    "get",
    "lanes_of_rows",
    "of_thread",
    "place_of_tile",
    "put",
    "reach_of",
    "together",
]

COLUMNS_OF_CODES: tl.constexpr = tl.constexpr(5)
"""Integers of a narrow state in the row of a run."""

_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
# Positions in a chain are at most 2^30 in the kernel.
_NO_CHAIN: tl.constexpr = tl.constexpr(1024)


# fmt: off
@jit
def place_of_tile(
    row: tl.tensor, reached: tl.tensor, FIELDS: tl.constexpr, ROWS: tl.constexpr, BESIDE: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
) -> tl.tensor:
# fmt: on
    """Return where a tile begins in its run, its ``low`` and ``high``, and whether it is full and may be wide."""
    length, span = tl.load(row + FIELDS + 1), ROWS * 4 * (32 - 2 * BESIDE)
    start = reached
    if IN_BLOCKS:
        start -= tl.load(row + FIELDS + 6)
    low = tl.maximum(-start, 0).to(tl.int32)
    high = tl.minimum(length - start, span).to(tl.int32)
    fast = (high - low == span) & wide(row, FIELDS + 1)
    if IN_BLOCKS:
        # A run that begins within a block has its tiles at other multiples of what wide accesses need.
        fast &= (start & 15) == 0
        fast &= (start >= tl.load(row + FIELDS + 7)) & (start + span <= tl.load(row + FIELDS + 8))
    return start, low, high, fast


@jit
def _threads(ROWS: tl.constexpr, BESIDE: tl.constexpr) -> tl.tensor:
    """Return the place of each thread's first element, (ROWS, 32), and whether the thread owns elements."""
    rows, threads = tl.arange(0, ROWS)[:, None], tl.arange(0, 32)[None, :]
    owns = (threads >= BESIDE) & (threads < 32 - BESIDE)
    return (rows * (32 - 2 * BESIDE) + threads - BESIDE) * 4, tl.broadcast_to(owns, (ROWS, 32))


@jit
def lanes_of_rows(low: tl.tensor, high: tl.tensor, ROWS: tl.constexpr, BESIDE: tl.constexpr) -> tl.tensor:
    """Return the places of elements, (ROWS, 32, 4), and which of them the tile owns."""
    places, owns = _threads(ROWS, BESIDE)
    lanes = places[:, :, None] + tl.arange(0, 4)[None, None, :]
    return lanes, owns[:, :, None] & ((lanes >= low) & (lanes < high))


@jit
def apart(value: tl.tensor) -> tl.tensor:
    """Return the four elements of every thread, (ROWS, 32) each."""
    even, odd = tl.split(tl.reshape(value, (value.shape[0], 32, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@jit
def together(first: tl.tensor, second: tl.tensor, third: tl.tensor, fourth: tl.tensor) -> tl.tensor:
    """Undo :func:`apart`."""
    return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), (first.shape[0], 32, 4))


@jit
def _of_thread_by_gather(value: tl.tensor, BY: tl.constexpr) -> tl.tensor:
    threads = (tl.arange(0, 32) + (32 + BY)) % 32
    return tl.gather(value, tl.broadcast_to(threads[None, :], value.shape), 1)


@jit
def _remember(
    last: tl.tensor, before: tl.tensor, known: tl.tensor, last2: tl.tensor, before2: tl.tensor, known2: tl.tensor
) -> tl.tensor:
    """Join two stretches: return the last value and the one before it, which a stretch of one lane does not have."""
    return last2, tl.where(known2 != 0, before2, last), tl.maximum(known2, 1)


@jit
def _of_thread_by_scan(value: tl.tensor, BY: tl.constexpr) -> tl.tensor:
    seen = tl.full(value.shape, 0, tl.int32)
    if BY > 0:
        for _ in tl.static_range(BY):
            _, value, _ = tl.associative_scan((value, value, seen), 1, _remember, reverse=True)
    else:
        for _ in tl.static_range(-BY):
            _, value, _ = tl.associative_scan((value, value, seen), 1, _remember)
    return value


# This returns the value of a later thread; at the end of a row it is one that nobody uses. Triton 3.2 has no gather.
of_thread = _of_thread_by_gather if hasattr(tl, "gather") else _of_thread_by_scan


@jit
def reach_of(
    row: tl.tensor, FIELDS: tl.constexpr, start: tl.tensor, ROWS: tl.constexpr, BESIDE: tl.constexpr
) -> tl.tensor:
    """Return how many elements of its chain follow each element; very many where the parameter is one chain.

    Beyond the ends of such a parameter everything is zero, and so are the edges that lead there.
    """
    chain = tl.load(row + FIELDS + 3)
    length = tl.maximum(chain, 1)
    places, _ = _threads(ROWS, BESIDE)
    # Tiles may begin a block before their run, and rows eight elements before their tile.
    first = ((tl.load(row + FIELDS + 2) + start + 64 * length) % length).to(tl.int32)
    length = length.to(tl.int32)
    here = (first + places + 8 * length) % length
    second = tl.where(here + 1 == length, 0, here + 1)
    third = tl.where(second + 1 == length, 0, second + 1)
    fourth = tl.where(third + 1 == length, 0, third + 1)
    last = tl.where(chain == 0, _NO_CHAIN, length - 1)
    turn = tl.where(chain == 0, 0, 1)
    return last - turn * here, last - turn * second, last - turn * third, last - turn * fourth


# fmt: off
@jit
def get(
    row: tl.tensor, FIELD: tl.constexpr, borders: tl.tensor, reached: tl.tensor, start: tl.tensor, low: tl.tensor,
    high: tl.tensor, ELEMENT: tl.constexpr, AT: tl.constexpr, RANDOM: tl.constexpr, ROWS: tl.constexpr,
    BESIDE: tl.constexpr, FAST: tl.constexpr,
) -> tl.tensor:
# fmt: on
    """Return a tile of a field in fp32 with its neighbours, and numbers that nobody uses beyond them."""
    places, _ = _threads(ROWS, BESIDE)
    lanes = places[:, :, None] + tl.arange(0, 4)[None, None, :]
    pointer, SPAN = place_of(row, FIELD, start, FAST, ELEMENT) + lanes, ROWS * 4 * (32 - 2 * BESIDE)
    here, borders = (places > low - 4) & (places < high), borders + (2 * FIELD + 1) * 4 * BESIDE
    inside, side = (lanes >= low) & (lanes < high), tl.zeros(lanes.shape, tl.float32)
    if FAST:
        # All elements of a thread are on one side, which allows wide accesses.
        here = (places >= 0) & (places < SPAN)
        inside = here[:, :, None]
        if BESIDE > 0:
            at = lanes - SPAN * (places > 0).to(tl.int32)[:, :, None]
            # Of a mask that is negated, the compiler does not know that all elements of a thread have the same.
            side = tl.load(borders + at, mask=((places < 0) | (places >= SPAN))[:, :, None], other=0.0)
    elif BESIDE > 0:
        at = tl.where(lanes < low, lanes - low, lanes - high)
        side = tl.load(borders + at, mask=~inside & ((at >= -4 * BESIDE) & (at < 4 * BESIDE)), other=0.0)
    if AT == 0:
        return tl.load(pointer, mask=inside, other=side)
    value = tl.load(pointer, mask=inside, other=0)
    if ELEMENT != tl.bfloat16:
        exponents = exponents_at(row, AT, reached // _BLOCK) + places // _BLOCK
        value = decoded(value, tl.load(exponents, mask=here, other=0)[:, :, None], ELEMENT)
    return tl.where(inside, value.to(tl.float32), side)


# fmt: off
@jit
def put(
    row: tl.tensor, FIELD: tl.constexpr, value: tl.tensor, count: tl.tensor, reached: tl.tensor, start: tl.tensor,
    low: tl.tensor, high: tl.tensor, ELEMENT: tl.constexpr, AT: tl.constexpr, RANDOM: tl.constexpr,
    ROWS: tl.constexpr, BESIDE: tl.constexpr, FAST: tl.constexpr, FIELDS: tl.constexpr,
) -> None:
# fmt: on
    """Store what a tile owns of a field.

    In codes that is what lies in blocks that the run has alone. Other elements go to memory of their own in fp32,
    because their exponents are not known yet.
    """
    places, owns = _threads(ROWS, BESIDE)
    lanes, own = lanes_of_rows(low, high, ROWS, BESIDE)
    if FAST:
        own = owns[:, :, None]
    pointer = place_of(row, FIELD, start, FAST, ELEMENT) + lanes
    first, here, above = seeds_of(row, AT, count, start, RANDOM)
    noise = noise_of(first, here, above, lanes, RANDOM)
    if AT == 0:
        tl.store(pointer, value, mask=own)
    elif ELEMENT == tl.bfloat16:
        tl.store(pointer, narrowed(value, noise, RANDOM), mask=own)
    else:
        # One thread stores the exponent, the first of the block or of the run.
        begins = owns & (places % _BLOCK == 0)
        if not FAST:
            begins = owns & ((places % _BLOCK == 0) | (places <= low)) & ((places > low - 4) & (places < high))
            at, first, last = start + lanes, tl.load(row + FIELDS + 7), tl.load(row + FIELDS + 8)
            before, after = own & (at < first), own & ((at >= first) & (at >= last))
            tl.store(tl.load(row + AT + 3).to(tl.pointer_type(tl.float32)) + at, value, mask=before)
            tl.store(tl.load(row + AT + 4).to(tl.pointer_type(tl.float32)) + (at - last), value, mask=after)
            own &= (at >= first) & (at < last)
            begins &= (start + places > first - 4) & (start + places < last)
        roots = roots_of(value, ELEMENT)
        bits = tl.max(tl.where(own, roots.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), axis=2)
        chosen = _exponents(bits, ELEMENT, ROWS, BESIDE)
        tl.store(pointer, encoded(roots, chosen[:, :, None], noise, ELEMENT, RANDOM).to(ELEMENT), mask=own)
        exponents = exponents_at(row, AT, reached // _BLOCK) + places // _BLOCK
        tl.store(exponents, chosen.to(tl.int8), mask=begins)


@jit
def _exponents_by_gather(bits: tl.tensor, ELEMENT: tl.constexpr, ROWS: tl.constexpr, BESIDE: tl.constexpr) -> tl.tensor:
    """Return the exponent of each thread's block, (ROWS, 32), by the bits of the thread's largest magnitude."""
    THREADS: tl.constexpr = 32 - 2 * BESIDE
    SIZE: tl.constexpr = ROWS * 32
    bits, thread = tl.reshape(bits, (SIZE,)), tl.arange(0, SIZE)
    if BESIDE > 0:
        # Those that own elements come first.
        owning = thread // THREADS * 32 + thread % THREADS + BESIDE
        bits = tl.gather(bits, tl.where(thread < ROWS * THREADS, owning, 0), 0)
    exponents = least_exponents(tl.max(tl.reshape(bits, (SIZE // 16, 16)), axis=1), ELEMENT)
    block = tl.reshape(_blocks_of_threads(ROWS, BESIDE), (SIZE,))
    return tl.reshape(tl.gather(exponents, block, 0), (ROWS, 32))


@jit
def _exponents_by_comparison(
    bits: tl.tensor, ELEMENT: tl.constexpr, ROWS: tl.constexpr, BESIDE: tl.constexpr
) -> tl.tensor:
    SIZE: tl.constexpr = ROWS * 32
    block = tl.reshape(_blocks_of_threads(ROWS, BESIDE), (1, SIZE))
    is_of = block == tl.arange(0, SIZE // 16)[:, None]
    exponents = least_exponents(tl.max(tl.where(is_of, tl.reshape(bits, (1, SIZE)), 0), axis=1), ELEMENT)
    return tl.reshape(tl.sum(tl.where(is_of, exponents[:, None], 0), axis=0), (ROWS, 32))


@jit
def _blocks_of_threads(ROWS: tl.constexpr, BESIDE: tl.constexpr) -> tl.tensor:
    """Return the block of each thread, (ROWS, 32), which sixteen threads own."""
    places, _ = _threads(ROWS, BESIDE)
    return tl.minimum(tl.maximum(places, 0), ROWS * 4 * (32 - 2 * BESIDE) - 1) // _BLOCK


# Triton has `gather` from 3.3 on; comparisons do the work of a gather that goes from one row to another.
_exponents = _exponents_by_gather if hasattr(tl, "gather") else _exponents_by_comparison
