"""One launch encodes or decodes many runs on the device, to the bits of :mod:`rankwise.kernels.quantization`.

Bytes per value, without the exponents: encoding reads 4 and writes 1 (bfloat16: 2), decoding does the reverse, and
adding reads 5 (6) and writes 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels import quantization
from rankwise.kernels.low_precision_runs import BLOCK, LowPrecisionRuns, blocks_of, is_coded
from rankwise.kernels.triton.codes import (
    blocks_inside,
    exponents_at,
    noise_of,
    opened,
    put_exponents,
    roots_of,
    seeds_of,
    store,
)
from rankwise.kernels.triton.codes import exponents_of as _exponents_of
from rankwise.kernels.triton.language import CODES, count_of, jit, launch
from rankwise.kernels.triton.segments import addresses, lanes_of, place_of, read, tiles_of, wide, write
from rankwise.kernels.triton.tables import table_here

__all__ = ["add_decoded", "decode_", "encode_", "exponents_of"]

_TILE = 32 * BLOCK
_WARPS = 4

# A row has addresses of values, codes and sums; length, exponents, first place, key, and where its exponents begin.
_LENGTH, _AT, _FIRST, _BASE, _COLUMNS = (tl.constexpr(column) for column in (3, 4, 5, 7, 8))


def decode_(values: Sequence[Tensor], kept: LowPrecisionRuns) -> None:
    """Overwrite contiguous fp32 runs with what codes stand for."""
    _launch(_decode_kernel, values, kept, values, ADD=False)


def add_decoded(values: Sequence[Tensor], kept: LowPrecisionRuns, sums: Sequence[Tensor]) -> None:
    """Add what codes stand for to contiguous fp32 runs."""
    if [total.numel() for total in sums] != [value.numel() for value in values]:
        raise ValueError("the sums need one run per run of values, of its length")
    _launch(_decode_kernel, values, kept, sums, ADD=True)


def exponents_of(values: Sequence[Tensor], kept: LowPrecisionRuns) -> Tensor:
    """Return the exponents that codes of contiguous fp32 runs would have by their values alone."""
    if not values:
        return quantization.exponents_of(values, kept)
    exponents = torch.empty(sum(_blocks(kept)), dtype=torch.int8, device=values[0].device)
    _launch(_exponents_kernel, values, kept, values, exponents)
    return exponents


def encode_(values: Sequence[Tensor], kept: LowPrecisionRuns, exponents: Tensor | None = None) -> None:
    """Overwrite codes and their exponents with what is kept of contiguous fp32 runs."""
    if not values:
        return
    device = values[0].device
    if exponents is not None and exponents.shape != (sum(_blocks(kept)),):
        raise ValueError(f"exponents has the shape {tuple(exponents.shape)}, but must have ({sum(_blocks(kept))},)")
    given = values[0] if exponents is None else exponents.to(device=device, dtype=torch.int8).contiguous()
    count = count_of(kept.step, len(kept), device)
    random = {"RANDOM": kept.step is not None, "COUNTS": isinstance(count, Tensor)}
    _launch(_encode_kernel, values, kept, values, given, count, GIVEN=exponents is not None, **random)


def _blocks(kept: LowPrecisionRuns) -> list[int]:
    return [blocks_of(first, codes.numel()) for first, codes in zip(kept.firsts, kept.codes, strict=True)]


def _launch(
    kernel: object,
    values: Sequence[Tensor],
    kept: LowPrecisionRuns,
    sums: Sequence[Tensor],
    *more: object,
    **constants: object,
) -> None:
    kept.check(values)
    if not values:
        return
    device, lengths = values[0].device, [value.numel() for value in values]
    exponents = addresses(kept.exponents, torch.int8) if is_coded(kept.dtype) else [0] * len(values)
    fields = addresses(values), addresses(kept.codes, kept.dtype), addresses(sums)
    rows = zip(*fields, lengths, exponents, kept.firsts, kept.keys, accumulate(_blocks(kept), initial=0), strict=False)
    # Tiles consist of whole blocks, and so begin before a run that begins within a block.
    reach = (length + first % BLOCK if length else 0 for length, first in zip(lengths, kept.firsts, strict=True))
    tiles = tiles_of(tuple(reach), _TILE, device)
    table = table_here(tuple(chain.from_iterable(rows)), device)
    options = {"ELEMENT": CODES[kept.dtype], "LANES": _TILE, "BLOCK": BLOCK, **constants}
    launch(kernel, (tiles.count,), device, table, tiles.rows, *more, num_warps=_WARPS, **options)


@jit
def _place(table: tl.tensor, tiles: tl.tensor, LANES: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Return a program's run, its row, the tile's beginning in the run, its first block, and whether it may be wide."""
    tile = tl.program_id(0).to(tl.int64)
    run = tl.load(tiles + 2 * tile)
    row, reached = table + run * _COLUMNS, tl.load(tiles + 2 * tile + 1)
    before = tl.load(row + _FIRST) % BLOCK
    fast = (before == 0) & (reached + LANES <= tl.load(row + _LENGTH)) & wide(row, 3)
    return run, row, reached - before, reached // BLOCK, fast


@jit
def _inside(row: tl.tensor, start: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Return the lanes of a tile, and which lanes and which blocks the run has."""
    lanes, length = lanes_of(LANES), tl.load(row + _LENGTH)
    places = start + lanes
    return lanes, (places >= 0) & (places < length), blocks_inside(start, length, lanes)


@jit
def _decode(
    row: tl.tensor,
    start: tl.tensor,
    block: tl.tensor,
    ADD: tl.constexpr,
    ELEMENT: tl.constexpr,
    LANES: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    lanes, inside, blocks = _inside(row, start, LANES)
    codes, exponents = place_of(row, 1, start, FAST, ELEMENT), exponents_at(row, _AT, block)
    value = opened(codes, exponents, blocks, lanes, inside, FAST, ELEMENT, _AT)
    if ADD:
        value = read(place_of(row, 0, start, FAST), lanes, inside, FAST) + value
    write(place_of(row, 2, start, FAST), value, lanes, inside, FAST)


@jit
def _decode_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    ADD: tl.constexpr,
    ELEMENT: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    run, row, start, block, fast = _place(table, tiles, LANES, BLOCK)
    if fast:
        _decode(row, start, block, ADD, ELEMENT, LANES, True)
    else:
        _decode(row, start, block, ADD, ELEMENT, LANES, False)


@jit
def _exponents_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    found: tl.tensor,
    ELEMENT: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    run, row, start, block, fast = _place(table, tiles, LANES, BLOCK)
    lanes, inside, blocks = _inside(row, start, LANES)
    roots = roots_of(read(place_of(row, 0, start, False), lanes, inside, False), ELEMENT)
    at = found + tl.load(row + _BASE) + block
    put_exponents(at, _exponents_of(roots, ELEMENT), blocks, lanes)


@jit
def _encode(
    row: tl.tensor,
    start: tl.tensor,
    block: tl.tensor,
    given: tl.tensor,
    count: tl.tensor,
    GIVEN: tl.constexpr,
    RANDOM: tl.constexpr,
    ELEMENT: tl.constexpr,
    LANES: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    lanes, inside, blocks = _inside(row, start, LANES)
    codes, exponents = place_of(row, 1, start, FAST, ELEMENT), exponents_at(row, _AT, block)
    low, here, above = seeds_of(row, _AT, count, start, RANDOM)
    noise = noise_of(low, here, above, lanes, RANDOM)
    value = read(place_of(row, 0, start, FAST), lanes, inside, FAST)
    # fmt: off
    store(codes, exponents, blocks, value, lanes, inside, noise, FAST, ELEMENT, _AT, RANDOM, GIVEN, given)
    # fmt: on


@jit
def _encode_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    given: tl.tensor,
    count: tl.tensor,
    GIVEN: tl.constexpr,
    RANDOM: tl.constexpr,
    COUNTS: tl.constexpr,
    ELEMENT: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    run, row, start, block, fast = _place(table, tiles, LANES, BLOCK)
    if COUNTS:
        count = tl.load(count + run)
    at = given + tl.load(row + _BASE) + block
    if fast:
        _encode(row, start, block, at, count, GIVEN, RANDOM, ELEMENT, LANES, True)
    else:
        _encode(row, start, block, at, count, GIVEN, RANDOM, ELEMENT, LANES, False)
