"""Kernels encode and decode element states with these functions, to the bits of :mod:`rankwise.kernels.quantization`.

From column ``AT`` on, the row of a run has three integers of a narrow field: the address of its exponents, the place of
the run's first element in the parameter, and the key of the noise.
"""

from __future__ import annotations

import triton.language as tl

from rankwise.kernels.low_precision_runs import BLOCK as _BLOCK
from rankwise.kernels.triton.language import jit
from rankwise.kernels.triton.segments import read, write

__all__ = [
    "EXTRAS",
    "blocks_inside",
    "decoded",
    "encoded",
    "exponents_at",
    "exponents_of",
    "least_exponents",
    "narrowed",
    "noise_of",
    "opened",
    "put_exponents",
    "roots_of",
    "seeds_of",
    "store",
]

EXTRAS = 3
"""Integers of a narrow field in the row of a run."""

SHARED: tl.constexpr = tl.constexpr(_BLOCK)
BROKEN: tl.constexpr = tl.constexpr(127)
# Adding this and taking it away again rounds to a whole number, halves to even.
WHOLE: tl.constexpr = tl.constexpr(12582912.0)


@jit
def _power(exponents: tl.tensor) -> tl.tensor:
    """Return powers of two, made from their bits."""
    return ((exponents + 127) << 23).to(tl.float32, bitcast=True)


@jit
def _mixed(word: tl.tensor) -> tl.tensor:
    word = (word ^ (word >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    word = (word ^ (word >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return word ^ (word >> 16)


@jit
def seeds_of(row: tl.tensor, AT: tl.constexpr, count: tl.tensor, start: tl.tensor, RANDOM: tl.constexpr) -> tl.tensor:
    """Return the place of an element in the parameter without its upper 32 bits, and the seeds from there on.

    The first seed is that of the places before the next multiple of 2^32, the second one of those beyond it.
    """
    if RANDOM:
        place = tl.load(row + AT + 1) + start
        word = _mixed(count.to(tl.uint32) ^ _mixed(tl.load(row + AT + 2).to(tl.uint32)))
        upper = place >> 32
        seeds = _mixed(upper.to(tl.uint32) ^ word), _mixed((upper + 1).to(tl.uint32) ^ word)
        return (place & 0xFFFFFFFF).to(tl.uint32), seeds[0], seeds[1]
    else:
        return 0, 0, 0


@jit
def noise_of(low: tl.tensor, here: tl.tensor, above: tl.tensor, lanes: tl.tensor, RANDOM: tl.constexpr) -> tl.tensor:
    """Return 16 bits of noise for each element of a tile, by what :func:`seeds_of` gave; 0 if not RANDOM."""
    if RANDOM:
        places = low + lanes.to(tl.uint32)
        return (_mixed(places ^ tl.where(places < low, above, here)) >> 16).to(tl.int32)
    else:
        return 0


@jit
def _rounded(value: tl.tensor, noise: tl.tensor, RANDOM: tl.constexpr) -> tl.tensor:
    if RANDOM:
        return tl.floor(value + noise.to(tl.float32) * 0.0000152587890625)
    else:
        return (value + WHOLE) - WHOLE


@jit
def narrowed(value: tl.tensor, noise: tl.tensor, RANDOM: tl.constexpr) -> tl.tensor:
    """Round to bfloat16, and to the nearest wherever a value is not finite or would not stay so."""
    if RANDOM:
        bits = value.to(tl.int32, bitcast=True)
        cut = (bits + noise) & -65536
        finite = ((bits & 0x7F800000) != 0x7F800000) & ((cut & 0x7F800000) != 0x7F800000)
        return tl.where(finite, cut.to(tl.float32, bitcast=True), value).to(tl.bfloat16)
    else:
        return value.to(tl.bfloat16)


@jit
def roots_of(value: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """Return what the scale divides: values, or roots of second moments."""
    if ELEMENT == tl.uint8:
        return tl.sqrt_rn(value)
    else:
        return value


@jit
def blocks_of(lanes: tl.tensor) -> tl.tensor:
    """Return the block in which each thread's lanes lie, (threads,), of a tile (threads, lanes of a thread)."""
    return tl.arange(0, lanes.shape[0]) // (SHARED // lanes.shape[1])


@jit
def blocks_inside(start: tl.tensor, length: tl.tensor, lanes: tl.tensor) -> tl.tensor:
    """Whether a run has each thread's block, in a tile that begins at ``start``."""
    return start + blocks_of(lanes) * SHARED < length


@jit
def exponents_of(roots: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """Return the exponent of each thread's block, int32 (threads,): the least that reaches its largest magnitude."""
    THREADS: tl.constexpr = SHARED // roots.shape[1]
    BLOCKS: tl.constexpr = roots.shape[0] // THREADS
    # The bits of magnitudes are ordered as the magnitudes are, with infinities and NaNs above all numbers.
    bits = tl.max(roots.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    exponents = least_exponents(tl.max(bits.reshape(BLOCKS, THREADS), axis=1), ELEMENT)
    return tl.broadcast_to(exponents[:, None], (BLOCKS, THREADS)).reshape(roots.shape[0])


@jit
def least_exponents(bits: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """Return the least exponents that reach magnitudes, which are given by their bits."""
    if ELEMENT == tl.uint8:
        exponents = (bits >> 23) - 138 + ((bits & 0x7FFFFF) > 0x7C0000).to(tl.int32)
        exponents = tl.minimum(tl.maximum(exponents, -63), 52)
    else:
        exponents = (bits >> 23) - 133 + ((bits & 0x7FFFFF) > 0x7E0000).to(tl.int32)
        exponents = tl.minimum(tl.maximum(exponents, -126), 121)
    return tl.where(bits >= 0x7F800000, BROKEN, exponents)


@jit
def encoded(
    roots: tl.tensor, exponents: tl.tensor, noise: tl.tensor, ELEMENT: tl.constexpr, RANDOM: tl.constexpr
) -> tl.tensor:
    """Return codes in the lower 8 bits of int32; exponents have the shape of the tile, or one that broadcasts to it."""
    broken = exponents == BROKEN
    scale = tl.where(broken, 0.0, _power(tl.where(broken, 0, -exponents)))
    # The codes of a broken block, and of NaN, are 0.
    scaled = tl.where(scale == 0.0, 0.0, roots * scale)
    if ELEMENT == tl.uint8:
        # A code has an exponent of its own and digits from 32 to 63, or fewer where that exponent is 0.
        shift = tl.minimum(tl.maximum((scaled.to(tl.int32, bitcast=True) >> 23) - 132, 0), 6)
        digits = _rounded(scaled * _power(-shift), noise, RANDOM).to(tl.int32)
        codes = tl.minimum(tl.maximum(digits + 32 * shift, 1), 255)
        return tl.where(scaled > 0.0, codes, 0)
    else:
        if RANDOM:
            return tl.minimum(tl.maximum(_rounded(scaled, noise, RANDOM), -127.0), 127.0).to(tl.int32)
        else:
            # The sum has the whole number in its last bits.
            return (tl.minimum(tl.maximum(scaled, -127.0), 127.0) + WHOLE).to(tl.int32, bitcast=True)


@jit
def put_exponents(place: tl.tensor, exponents: tl.tensor, blocks: tl.tensor, lanes: tl.tensor) -> None:
    """Store the exponents of the blocks that the run has, from an address on."""
    first = tl.arange(0, lanes.shape[0]) % (SHARED // lanes.shape[1]) == 0
    tl.store(place + blocks_of(lanes), exponents.to(tl.int8), mask=blocks & first)


@jit
def exponents_at(row: tl.tensor, AT: tl.constexpr, block: tl.tensor) -> tl.tensor:
    """Return the address of the exponents from a block of the run on; it has no meaning where AT is 0."""
    return tl.load(row + AT).to(tl.pointer_type(tl.int8)) + block


@jit
def opened(
    place: tl.tensor,
    exponents: tl.tensor,
    blocks: tl.tensor,
    lanes: tl.tensor,
    inside: tl.tensor,
    FAST: tl.constexpr,
    ELEMENT: tl.constexpr,
    AT: tl.constexpr,
) -> tl.tensor:
    """Return a tile of a field in fp32.

    If the field is narrow, ``AT`` is not 0, ``exponents`` is the address of its blocks' exponents, and ``blocks`` says
    which blocks the run has, as :func:`blocks_inside` does.
    """
    kept = read(place, lanes, inside, FAST)
    if AT == 0 or ELEMENT == tl.bfloat16:
        return kept.to(tl.float32)
    elif FAST:
        return decoded(kept, tl.load(exponents + blocks_of(lanes))[:, None], ELEMENT)
    else:
        return decoded(kept, tl.load(exponents + blocks_of(lanes), mask=blocks, other=0)[:, None], ELEMENT)


@jit
def decoded(kept: tl.tensor, exponents: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """Return what codes stand for, with exponents of their shape, or of one that broadcasts to it."""
    stored = exponents.to(tl.int32)
    broken = stored == BROKEN
    scale = tl.where(broken, float("nan"), _power(tl.where(broken, 0, stored)))
    if ELEMENT == tl.uint8:
        # A code is the upper bits of a float's exponent and digits, but for those that have the exponent 0.
        codes = kept.to(tl.int32)
        root = ((codes << 18) + 0x41800000).to(tl.float32, bitcast=True)
        root = tl.where(codes < 32, 2.0 * root - 32.0, root) * scale
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
    FAST: tl.constexpr,
    ELEMENT: tl.constexpr,
    AT: tl.constexpr,
    RANDOM: tl.constexpr,
    GIVEN: tl.constexpr = False,
    given: tl.tensor = 0,
) -> None:
    """Store a tile of a field for :func:`opened` to read, with the exponents at ``given`` if GIVEN."""
    if AT == 0:
        write(place, value, lanes, inside, FAST)
    elif ELEMENT == tl.bfloat16:
        write(place, narrowed(value, noise, RANDOM), lanes, inside, FAST)
    else:
        roots = roots_of(value, ELEMENT)
        if GIVEN:
            chosen = tl.load(given + blocks_of(lanes), mask=blocks, other=0).to(tl.int32)
        else:
            chosen = exponents_of(roots, ELEMENT)
        write(place, encoded(roots, chosen[:, None], noise, ELEMENT, RANDOM), lanes, inside, FAST)
        put_exponents(exponents, chosen, blocks, lanes)
