"""Codes of element states inside kernels, see :mod:`rankwise.kernels.quantization`, whose bits these functions have.

The row of a run holds, from where ``AT`` points to, for a narrow field: the address of its exponents, the place of
the run's first element in the parameter, and the key of the noise.
"""

from __future__ import annotations

import triton.language as tl

from rankwise.kernels.narrow_runs import BLOCK as _BLOCK
from rankwise.kernels.triton.language import jit
from rankwise.kernels.triton.segments import read, write

__all__ = ["EXTRAS", "encoded", "exponents_at", "exponents_of", "opened", "roots_of", "store"]

EXTRAS = 3
"""Integers of a narrow field in the row of a run."""

SHARED: tl.constexpr = tl.constexpr(_BLOCK)
BROKEN: tl.constexpr = tl.constexpr(127)
# Added and taken away, this leaves no digits behind the point: rounded to the nearest, halves to even.
WHOLE: tl.constexpr = tl.constexpr(12582912.0)


@jit
def _power(exponents: tl.tensor) -> tl.tensor:
    """Of two, from its bits."""
    return ((exponents + 127) << 23).to(tl.float32, bitcast=True)


@jit
def _mixed(word: tl.tensor) -> tl.tensor:
    word = (word ^ (word >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    word = (word ^ (word >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return word ^ (word >> 16)


@jit
def _noise(key: tl.tensor, count: tl.tensor, place: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """16 bits for each of the places from ``place`` on, which may pass a multiple of 2^32."""
    word = _mixed(count.to(tl.uint32) ^ _mixed(key.to(tl.uint32)))
    low = (place & 0xFFFFFFFF).to(tl.uint32)
    places = low + tl.arange(0, LANES).to(tl.uint32)
    here, above = _mixed((place >> 32).to(tl.uint32) ^ word), _mixed(((place >> 32) + 1).to(tl.uint32) ^ word)
    return (_mixed(places ^ tl.where(places < low, above, here)) >> 16).to(tl.int32)


@jit
def _rounded(value: tl.tensor, noise: tl.tensor, RANDOM: tl.constexpr) -> tl.tensor:
    if RANDOM:
        return tl.floor(value + noise.to(tl.float32) * 0.0000152587890625)
    else:
        return (value + WHOLE) - WHOLE


@jit
def _narrowed(value: tl.tensor, noise: tl.tensor, RANDOM: tl.constexpr) -> tl.tensor:
    """To bfloat16; what is not finite, or would not be, to the nearest."""
    if RANDOM:
        bits = value.to(tl.int32, bitcast=True)
        cut = (bits + noise) & -65536
        finite = ((bits & 0x7F800000) != 0x7F800000) & ((cut & 0x7F800000) != 0x7F800000)
        return tl.where(finite, cut.to(tl.float32, bitcast=True), value).to(tl.bfloat16)
    else:
        return value.to(tl.bfloat16)


@jit
def roots_of(value: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """What is divided by the scale."""
    if ELEMENT == tl.uint8:
        return tl.sqrt_rn(value)
    else:
        return value


@jit
def exponents_of(roots: tl.tensor, ELEMENT: tl.constexpr, LANES: tl.constexpr) -> tl.tensor:
    """Of the blocks of a tile, int32: the least that reach the largest."""
    magnitudes = (roots.to(tl.int32, bitcast=True) & 0x7FFFFFFF).reshape(LANES // SHARED, SHARED)
    # They are ordered as the numbers are, infinities and NaNs behind all others.
    bits = tl.max(magnitudes, axis=1)
    if ELEMENT == tl.uint8:
        found = (bits >> 23) - 138 + ((bits & 0x7FFFFF) > 0x7C0000).to(tl.int32)
        found = tl.minimum(tl.maximum(found, -63), 52)
    else:
        found = (bits >> 23) - 133 + ((bits & 0x7FFFFF) > 0x7E0000).to(tl.int32)
        found = tl.minimum(tl.maximum(found, -126), 121)
    return tl.where(bits >= 0x7F800000, BROKEN, found)


@jit
def _of_elements(exponents: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    return tl.broadcast_to(exponents[:, None], (LANES // SHARED, SHARED)).reshape(LANES)


@jit
def encoded(
    roots: tl.tensor,
    exponents: tl.tensor,
    noise: tl.tensor,
    ELEMENT: tl.constexpr,
    RANDOM: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:
    """Codes of a tile, int32."""
    broken = exponents == BROKEN
    scale = _of_elements(tl.where(broken, 0.0, _power(tl.where(broken, 0, -exponents))), LANES)
    # Of what is NaN nothing is kept.
    scaled = tl.where(scale == 0.0, 0.0, roots * scale)
    if ELEMENT == tl.uint8:
        # Each has an exponent of its own: digits from 32 to 63, or below where that is 0.
        shift = tl.minimum(tl.maximum((scaled.to(tl.int32, bitcast=True) >> 23) - 132, 0), 6)
        digits = _rounded(scaled * _power(-shift), noise, RANDOM).to(tl.int32)
        found = tl.minimum(tl.maximum(digits + 32 * shift, 1), 255)
        return tl.where(scaled > 0.0, found, 0)
    else:
        return tl.minimum(tl.maximum(_rounded(scaled, noise, RANDOM), -127.0), 127.0).to(tl.int32)


@jit
def exponents_at(row: tl.tensor, AT: tl.constexpr, block: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Where the exponents of a tile lie, whose first block is the run's block ``block``."""
    return tl.load(row + AT).to(tl.pointer_type(tl.int8)) + block + tl.arange(0, LANES // SHARED)


@jit
def opened(
    row: tl.tensor,
    FIELD: tl.constexpr,
    start: tl.tensor,
    block: tl.tensor,
    blocks: tl.tensor,
    inside: tl.tensor,
    LANES: tl.constexpr,
    FAST: tl.constexpr,
    ELEMENT: tl.constexpr,
    AT: tl.constexpr,
) -> tl.tensor:
    """A tile of a field in fp32.

    Where it is narrow, ``AT`` is not 0, ``block`` the run's block that it begins with, and ``blocks`` says which of its
    blocks the run has.
    """
    kept = read(row, FIELD, start, inside, LANES, FAST, ELEMENT)
    if AT == 0 or ELEMENT == tl.bfloat16:
        return kept.to(tl.float32)
    else:
        exponents = tl.load(exponents_at(row, AT, block, LANES), mask=blocks, other=0).to(tl.int32)
        broken = exponents == BROKEN
        scale = _of_elements(tl.where(broken, float("nan"), _power(tl.where(broken, 0, exponents))), LANES)
        if ELEMENT == tl.uint8:
            codes = kept.to(tl.int32)
            shift = tl.maximum((codes >> 5) - 1, 0)
            root = (codes - 32 * shift).to(tl.float32) * _power(shift) * scale
            return root * root
        else:
            return kept.to(tl.float32) * scale


@jit
def store(
    row: tl.tensor,
    FIELD: tl.constexpr,
    start: tl.tensor,
    block: tl.tensor,
    blocks: tl.tensor,
    value: tl.tensor,
    inside: tl.tensor,
    count: tl.tensor,
    given: tl.tensor,
    LANES: tl.constexpr,
    FAST: tl.constexpr,
    ELEMENT: tl.constexpr,
    AT: tl.constexpr,
    RANDOM: tl.constexpr,
    GIVEN: tl.constexpr = False,
) -> None:
    """Store a tile of a field, as :func:`opened` reads it, with exponents from where ``given`` points if GIVEN."""
    if AT == 0:
        write(row, FIELD, start, value, inside, LANES, FAST, ELEMENT)
    else:
        noise = 0
        if RANDOM:
            noise = _noise(tl.load(row + AT + 2), count, tl.load(row + AT + 1) + start, LANES)
        if ELEMENT == tl.bfloat16:
            write(row, FIELD, start, _narrowed(value, noise, RANDOM), inside, LANES, FAST, ELEMENT)
        else:
            roots = roots_of(value, ELEMENT)
            if GIVEN:
                exponents = tl.load(given, mask=blocks, other=0).to(tl.int32)
            else:
                exponents = exponents_of(roots, ELEMENT, LANES)
            codes = encoded(roots, exponents, noise, ELEMENT, RANDOM, LANES)
            write(row, FIELD, start, codes, inside, LANES, FAST, ELEMENT)
            tl.store(exponents_at(row, AT, block, LANES), exponents.to(tl.int8), mask=blocks)
