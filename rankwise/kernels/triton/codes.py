"""Codes of element states inside kernels, see :mod:`rankwise.kernels.quantization`, whose bits these functions have.

The row of a run holds, from where ``AT`` points to, for a narrow field: the address of its exponents, the place of
the run's first element in the parameter, and the key of the noise.
"""

from __future__ import annotations

import triton.language as tl

from rankwise.kernels.low_precision_runs import BLOCK as _BLOCK
from rankwise.kernels.triton.language import jit
from rankwise.kernels.triton.segments import WIDTH, read, write

__all__ = [
    "EXTRAS",
    "blocks_inside",
    "exponents_at",
    "exponents_of",
    "noise_of",
    "opened",
    "put_exponents",
    "roots_of",
    "store",
]

EXTRAS = 3
"""Integers of a narrow field in the row of a run."""

SHARED: tl.constexpr = tl.constexpr(_BLOCK)
# Threads that a block lies in.
THREADS: tl.constexpr = tl.constexpr(SHARED // WIDTH)
BROKEN: tl.constexpr = tl.constexpr(127)
# Added and taken away, this leaves no digits behind the point: rounded to the nearest, halves to even.
WHOLE: tl.constexpr = tl.constexpr(12582912.0)


@jit
def _power(exponents: tl.tensor) -> tl.tensor:
    """Powers of two, from their bits."""
    return ((exponents + 127) << 23).to(tl.float32, bitcast=True)


@jit
def _mixed(word: tl.tensor) -> tl.tensor:
    word = (word ^ (word >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    word = (word ^ (word >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return word ^ (word >> 16)


@jit
def noise_of(
    row: tl.tensor, AT: tl.constexpr, count: tl.tensor, start: tl.tensor, lanes: tl.tensor, RANDOM: tl.constexpr
) -> tl.tensor:
    """16 bits for each element of a tile, wherever the run's first element lies in the parameter; 0 if not RANDOM."""
    if RANDOM:
        return _noise(tl.load(row + AT + 2), count, tl.load(row + AT + 1) + start, lanes)
    else:
        return 0


@jit
def _noise(key: tl.tensor, count: tl.tensor, place: tl.tensor, lanes: tl.tensor) -> tl.tensor:
    """Noise of the places from ``place`` on, which may pass a multiple of 2^32."""
    word = _mixed(count.to(tl.uint32) ^ _mixed(key.to(tl.uint32)))
    low = (place & 0xFFFFFFFF).to(tl.uint32)
    places = low + lanes.to(tl.uint32)
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
def blocks_of(LANES: tl.constexpr) -> tl.tensor:
    """The block of each thread's lanes, (LANES / 4,)."""
    return tl.arange(0, LANES // WIDTH) // THREADS


@jit
def blocks_inside(start: tl.tensor, length: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Whether a run has them, of a tile that begins at a place."""
    return start + blocks_of(LANES) * SHARED < length


@jit
def exponents_of(roots: tl.tensor, ELEMENT: tl.constexpr, LANES: tl.constexpr) -> tl.tensor:
    """Exponent of each thread's block, int32 (LANES / 4,): the least that reaches its largest magnitude."""
    # Magnitudes are ordered as the numbers are, infinities and NaNs behind all others.
    bits = tl.max(roots.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    bits = tl.max(bits.reshape(LANES // SHARED, THREADS), axis=1)
    if ELEMENT == tl.uint8:
        found = (bits >> 23) - 138 + ((bits & 0x7FFFFF) > 0x7C0000).to(tl.int32)
        found = tl.minimum(tl.maximum(found, -63), 52)
    else:
        found = (bits >> 23) - 133 + ((bits & 0x7FFFFF) > 0x7E0000).to(tl.int32)
        found = tl.minimum(tl.maximum(found, -126), 121)
    found = tl.where(bits >= 0x7F800000, BROKEN, found)
    return tl.broadcast_to(found[:, None], (LANES // SHARED, THREADS)).reshape(LANES // WIDTH)


@jit
def _encoded(
    roots: tl.tensor, exponents: tl.tensor, noise: tl.tensor, ELEMENT: tl.constexpr, RANDOM: tl.constexpr
) -> tl.tensor:
    """Codes of a tile, int32."""
    broken = exponents == BROKEN
    scale = tl.where(broken, 0.0, _power(tl.where(broken, 0, -exponents)))[:, None]
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
def put_exponents(place: tl.tensor, exponents: tl.tensor, blocks: tl.tensor, LANES: tl.constexpr) -> None:
    """Store those of a tile's blocks that the run has, from an address on."""
    first = tl.arange(0, LANES // WIDTH) % THREADS == 0
    tl.store(place + blocks_of(LANES), exponents.to(tl.int8), mask=blocks & first)


@jit
def exponents_at(row: tl.tensor, AT: tl.constexpr, block: tl.tensor) -> tl.tensor:
    """Where those from a block of the run on lie; anywhere where AT is 0."""
    return tl.load(row + AT).to(tl.pointer_type(tl.int8)) + block


@jit
def opened(
    place: tl.tensor,
    exponents: tl.tensor,
    blocks: tl.tensor,
    lanes: tl.tensor,
    inside: tl.tensor,
    LANES: tl.constexpr,
    FAST: tl.constexpr,
    ELEMENT: tl.constexpr,
    AT: tl.constexpr,
) -> tl.tensor:
    """A tile of a field in fp32.

    Where it is narrow, ``AT`` is not 0, ``exponents`` where those of its blocks lie, and ``blocks`` says which of them
    the run has, see :func:`blocks_inside`.
    """
    kept = read(place, lanes, inside, FAST)
    if AT == 0 or ELEMENT == tl.bfloat16:
        return kept.to(tl.float32)
    else:
        known = tl.load(exponents + blocks_of(LANES), mask=blocks, other=0).to(tl.int32)
        broken = known == BROKEN
        scale = tl.where(broken, float("nan"), _power(tl.where(broken, 0, known)))[:, None]
        if ELEMENT == tl.uint8:
            codes = kept.to(tl.int32)
            shift = tl.maximum((codes >> 5) - 1, 0)
            root = (codes - 32 * shift).to(tl.float32) * _power(shift) * scale
            return root * root
        else:
            return kept.to(tl.float32) * scale


@jit
def store(
    place: tl.tensor,
    exponents: tl.tensor,
    blocks: tl.tensor,
    value: tl.tensor,
    lanes: tl.tensor,
    inside: tl.tensor,
    noise: tl.tensor,
    LANES: tl.constexpr,
    FAST: tl.constexpr,
    ELEMENT: tl.constexpr,
    AT: tl.constexpr,
    RANDOM: tl.constexpr,
    GIVEN: tl.constexpr = False,
    given: tl.tensor = 0,
) -> None:
    """Store a tile of a field, as :func:`opened` reads it, with exponents from ``given`` on if GIVEN."""
    if AT == 0:
        write(place, value, lanes, inside, FAST)
    elif ELEMENT == tl.bfloat16:
        write(place, _narrowed(value, noise, RANDOM), lanes, inside, FAST)
    else:
        roots = roots_of(value, ELEMENT)
        if GIVEN:
            found = tl.load(given + blocks_of(LANES), mask=blocks, other=0).to(tl.int32)
        else:
            found = exponents_of(roots, ELEMENT, LANES)
        write(place, _encoded(roots, found, noise, ELEMENT, RANDOM), lanes, inside, FAST)
        put_exponents(exponents, found, blocks, LANES)
