r"""One pass over many runs computes SONew's statistics, directions and norms, for bands 0 to 8.

Bytes per element (fp32): ``(3 + band) 4`` read and as many written, that is 24 for the diagonal, 32 for the tridiagonal
and 56 for the band-4 method; the step takes 12 more (:mod:`rankwise.kernels.triton`). Narrow statistics are opened and
stored in registers: only their codes go through memory.

Tiles are updated in place while their neighbours still need the old values next to them. A first small launch
therefore copies the elements on either side of every tile (1 % of the bytes), so that no program reads what another one
writes.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.low_precision_runs import BLOCK, LowPrecisionRuns, is_coded
from rankwise.kernels.passes import Field
from rankwise.kernels.triton.codes import decoded
from rankwise.kernels.triton.language import CODES, ceil_div, count_of, jit, launch
from rankwise.kernels.triton.segments import Runs, addresses, run_sums
from rankwise.kernels.triton.steps import number_of, step_scale  # noqa: F401  the kernels' source calls number_of
from rankwise.sonew.chain_runs import ChainRun
from rankwise.sonew.cuda_source import ELEMENTS, beside, kernel_source, shape_of, span_of
from rankwise.sonew.cuda_tiles import (  # noqa: F401  as above
    COLUMNS_OF_CODES,
    apart,
    get,
    lanes_of_rows,
    of_thread,
    place_of_tile,
    put,
    reach_of,
    together,
)
from rankwise.updates.adamw import Step, bias_corrections

__all__ = ["GRAFTS", "MAX_BAND", "sonew_directions"]

GRAFTS = ("adam", "adam_official", "sgd", "momentum", "none")
"""Grafts whose direction needs no norm beforehand, as "rmsprop" does."""

MAX_BAND = 8
# The published torch code's constant, as in rankwise.sonew.formulas.
_OFFICIAL_GRAFT_EPS = 1e-8
# Positions in a chain are 32-bit numbers.
_LONGEST_CHAIN = 2**27
_BORDER_BLOCK = 1024
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)


def sonew_directions(
    runs: Sequence[ChainRun],
    grads: Sequence[Tensor],
    exp_avgs: Field,
    exp_avg_sqs: Field,
    covariances: Sequence[Field],
    margins: Sequence[tuple[Tensor, Tensor] | None],
    *,
    betas: tuple[float, float],
    eps: float,
    gamma: float,
    step: Step,
    graft: str,
    graft_eps: float,
    out: Sequence[Tensor],
) -> Tensor:
    r"""Advance the statistics, and write the direction of the bias-corrected averages.

    Args:
        runs: Place of every run in its chains.
        grads: Gradients, (length,) each, which are overwritten only if they are ``out``.
        exp_avgs: Momenta, updated in place; they and the other statistics may be narrow, all of covariances alike.
        exp_avg_sqs: Diagonals, updated in place.
        covariances: One list of runs per band distance, updated in place.
        margins: None for a run whose ends are ends of chains; for others the neighbours before the step, left and
            right, (3 + band, band) each: gradient, momentum, diagonal, covariances; zero beyond the parameter.
        betas: Decay rates of momentum and statistics.
        eps: Absolute damping of the bias-corrected diagonal.
        gamma: Relative conditional variance at or below which an edge is dropped.
        step: Number of this step, from 1; or (n,), a number for each run.
        graft: One of :data:`GRAFTS`.
        graft_eps: Number added to the root of the "adam" graft.
        out: Tensors for the directions, which may be the gradients.

    Returns:
        Squared norms of directions and of graft directions, (2, n) fp64; those of "none" are 0.

    Raises:
        ValueError: A tensor is not a contiguous run of its type, the lists do not fit together, or an option is
            unknown.
    """
    band = len(covariances)
    _check(runs, band, graft, gamma)
    if not grads:
        return torch.empty(2, 0, dtype=torch.float64, device="cpu")
    rows, warps = shape_of(band)
    states = (exp_avgs, exp_avg_sqs, *covariances)
    tables, constants = _tables(grads, states, out, _places(runs, margins), span_of(rows, beside(band)))
    borders = _borders(tables, band, rows, constants)
    correction1, correction2 = bias_corrections(betas, step)
    official = graft == "adam_official"
    partials = tables.partial_sums(2)
    steps = [field.step for field in states if isinstance(field, LowPrecisionRuns) and field.step is not None]
    count = count_of(steps[0] if steps else None, tables.runs, tables.device)
    launch(
        globals()[f"sonew_{band}_kernel"],
        (tables.count,),
        tables.device,
        tables.table,
        tables.tiles,
        borders,
        partials,
        float(betas[0]),
        1.0 - betas[0],
        float(betas[1]),
        1.0 - betas[1],
        # Averages damped by eps c2 have the direction of corrected averages damped by eps, up to the factor c1 / c2.
        step_scale(eps * correction2, tables),
        float(gamma),
        step_scale(correction2 / correction1, tables),
        step_scale(1.0 / correction1, tables),
        1.0 if official else step_scale(1.0 / correction2, tables),
        _OFFICIAL_GRAFT_EPS if official else float(graft_eps),
        count,
        STEPS_ON_DEVICE=isinstance(step, Tensor),
        SQUARES_ON_DEVICE=isinstance(step, Tensor) and not official,
        GRAFT={"adam": 1, "adam_official": 1, "sgd": 2, "momentum": 3, "none": 0}[graft],
        ROWS=rows,
        COUNTS=isinstance(count, Tensor),
        **constants,
        **_randomness(states),
        num_warps=warps,
    )
    return run_sums(tables, partials)


def _check(runs: Sequence[ChainRun], band: int, graft: str, gamma: float) -> None:
    if band > MAX_BAND:
        raise ValueError(f"{band} covariances are more than the {MAX_BAND} of the kernel; use the plain functions")
    if graft not in GRAFTS:
        raise ValueError(f"graft={graft!r} must be one of {', '.join(GRAFTS)}; use the plain functions for others")
    if not 0.0 <= gamma < 1.0:
        raise ValueError(f"gamma={gamma} must be in [0, 1); use 1e-2, 0.0 for the published behaviour")
    longest = max((run.chain or 0 for run in runs), default=0)
    if longest > _LONGEST_CHAIN:
        raise ValueError(f"chains of {longest} elements are too long for the kernel; use the plain functions")


def _places(runs: Sequence[ChainRun], margins: Sequence[tuple[Tensor, Tensor] | None]) -> list[list[int]]:
    """Return each run's position in its chain, the chain's length (0: one chain), and margins' addresses (0: none)."""
    phases = [run.start % run.chain if run.chain else 0 for run in runs]
    chains = [run.chain or 0 for run in runs]
    sides = [[0 if margin is None else addresses([margin[side]])[0] for margin in margins] for side in (0, 1)]
    return [phases, chains, *sides]


_KINDS = ("MOMENTUM", "DIAGONAL", "EDGE")
"""The kernels' names of the kinds of statistics; all covariances are of one kind."""


def _tables(
    grads: Sequence[Tensor], states: Sequence[Field], out: Sequence[Tensor], places: list[list[int]], span: int
) -> tuple[Runs, dict[str, Any]]:
    """Return the tables of a launch, and the constants that describe the statistics to the kernels."""
    columns: list[Sequence[int]] = [*places]
    narrow = [field for field in states if isinstance(field, LowPrecisionRuns)]
    blocks = next((field for field in narrow if is_coded(field.dtype)), None)
    lengths = [grad.numel() for grad in grads]
    befores = [0] * len(grads) if blocks is None else [first % BLOCK for first in blocks.firsts]
    if narrow:
        heads, tails = zip(*(_loose(blocks, run) for run in range(len(grads))), strict=True)
        ends = [length - tail for length, tail in zip(lengths, tails, strict=True)]
        columns += [befores, heads, ends]
    constants: dict[str, Any] = dict.fromkeys((f"{kind}_AT" for kind in _KINDS), 0)
    for place, field in enumerate(states):
        kind = _KINDS[min(place, 2)]
        if not isinstance(field, LowPrecisionRuns):
            constants[kind] = tl.float32
            continue
        field.check(grads)
        _check_blocks(field, blocks)
        constants[kind] = CODES[field.dtype]
        if place < 3:
            constants[f"{kind}_AT"] = len(states) + 3 + len(columns)
        columns += _columns_of(field)
    constants.setdefault("EDGE", tl.float32)
    fields = [grads, *(field.codes if isinstance(field, LowPrecisionRuns) else field for field in states), out]
    types = [field.dtype if isinstance(field, LowPrecisionRuns) else torch.float32 for field in states]
    constants |= {"COLUMNS": len(fields) + 1 + len(columns), "IN_BLOCKS": blocks is not None}
    reach = [length + before if length else 0 for length, before in zip(lengths, befores, strict=True)]
    return Runs(fields, span, columns, [torch.float32, *types, torch.float32], tuple(reach)), constants


def _loose(runs: LowPrecisionRuns | None, place: int) -> tuple[int, int]:
    """Return how many elements at the beginning and at the end of a run go to memory of their own."""
    head, tail = runs.loose[place] if runs is not None and runs.loose else (None, None)
    return 0 if head is None else head.numel(), 0 if tail is None else tail.numel()


def _check_blocks(field: LowPrecisionRuns, blocks: LowPrecisionRuns | None) -> None:
    if blocks is None or not is_coded(field.dtype):
        return
    same = [_loose(field, run) == _loose(blocks, run) for run in range(len(field))]
    if list(field.firsts) != list(blocks.firsts) or not all(same):
        raise ValueError("statistics in codes must have their blocks in common; pass runs of one parameter each")


def _columns_of(field: LowPrecisionRuns) -> Iterator[Sequence[int]]:
    """Return the integers of a narrow state that :mod:`rankwise.sonew.cuda_tiles` names."""
    yield addresses(field.exponents, torch.int8) if is_coded(field.dtype) else [0] * len(field)
    yield field.firsts
    yield field.keys
    for side in (0, 1):
        ends = [pair[side] for pair in field.loose] if field.loose else [None] * len(field)
        yield [0 if end is None else addresses([end])[0] for end in ends]


def _randomness(states: Sequence[Field]) -> dict[str, bool]:
    random = [isinstance(field, LowPrecisionRuns) and field.step is not None for field in states]
    return {f"{kind}_RANDOM": random[place] if place < len(random) else False for place, kind in enumerate(_KINDS)}


def _borders(tables: Runs, band: int, rows: int, constants: dict[str, Any]) -> Tensor:
    """Copy what lies before and after every tile, (tiles, fields, 2, width) in fp32, before anything changes."""
    fields, width = 3 + band, ELEMENTS * beside(band)
    if band == 0 or tables.count == 0:
        return tables.table
    borders = torch.empty(tables.count * fields * 2 * width, dtype=torch.float32, device=tables.device)
    total = tables.count * 2 * width
    launch(
        _border_kernel,
        (ceil_div(total, _BORDER_BLOCK),),
        tables.device,
        tables.table,
        tables.tiles,
        borders,
        total,
        FIELDS=fields,
        BAND=band,
        WIDTH=width,
        SPAN=span_of(rows, beside(band)),
        **constants,
        BLOCK=_BORDER_BLOCK,
    )
    return borders


# fmt: off
@jit
def _border_kernel(
    table: tl.tensor, tiles: tl.tensor, borders: tl.tensor, total: tl.tensor, FIELDS: tl.constexpr,
    BAND: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr, IN_BLOCKS: tl.constexpr,
    MOMENTUM: tl.constexpr, MOMENTUM_AT: tl.constexpr, DIAGONAL: tl.constexpr, DIAGONAL_AT: tl.constexpr,
    EDGE: tl.constexpr, EDGE_AT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
# fmt: on
    """Copy what lies beside each tile, (tiles, fields, 2, WIDTH); of what is in codes no more is opened."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, tile, place = entry < total, entry // (2 * WIDTH), entry % (2 * WIDTH)
    row = table + tl.load(tiles + 2 * tile, mask=inside, other=0) * COLUMNS
    reached = tl.load(tiles + 2 * tile + 1, mask=inside, other=0)
    length = tl.load(row + FIELDS + 1, mask=inside, other=0)
    before = tl.zeros_like(entry)
    if IN_BLOCKS:
        before = tl.load(row + FIELDS + 6, mask=inside, other=0)
    start, end = tl.maximum(reached - before, 0), tl.minimum(reached - before + SPAN, length)
    at = place - WIDTH + tl.where(place < WIDTH, start, end)
    own = inside & ((at >= 0) & (at < length))
    left, right = tl.load(row + FIELDS + 4, mask=inside, other=0), tl.load(row + FIELDS + 5, mask=inside, other=0)
    is_left = (left != 0) & ((at < 0) & (at >= -BAND))
    is_right = (right != 0) & ((at >= length) & (at < length + BAND))
    left = left.to(tl.pointer_type(tl.float32)) + BAND + at
    right = right.to(tl.pointer_type(tl.float32)) + at - length
    for field in tl.static_range(FIELDS):
        if field == 0:
            value = _element(row, 0, at, before, own, tl.float32, 0)
        elif field == 1:
            value = _element(row, 1, at, before, own, MOMENTUM, MOMENTUM_AT)
        elif field == 2:
            value = _element(row, 2, at, before, own, DIAGONAL, DIAGONAL_AT)
        else:
            value = _element(
                row, field, at, before, own, EDGE, EDGE_AT + (field - 3) * (EDGE_AT > 0) * COLUMNS_OF_CODES
            )
        value += tl.load(left + field * BAND, mask=is_left, other=0.0)
        value += tl.load(right + field * BAND, mask=is_right, other=0.0)
        tl.store(borders + (tile * FIELDS + field) * 2 * WIDTH + place, value, mask=inside)


# fmt: off
@jit
def _element(
    row: tl.tensor, FIELD: tl.constexpr, at: tl.tensor, before: tl.tensor, own: tl.tensor, ELEMENT: tl.constexpr,
    AT: tl.constexpr,
) -> tl.tensor:
# fmt: on
    """Return single elements of runs in fp32; 0 for those that are not the run's."""
    run = tl.load(row + FIELD, mask=own, other=0).to(tl.pointer_type(ELEMENT))
    value = tl.load(run + at, mask=own, other=0)
    if (AT > 0) & (ELEMENT != tl.bfloat16):
        exponents = tl.load(row + AT, mask=own, other=0).to(tl.pointer_type(tl.int8))
        value = decoded(value, tl.load(exponents + (before + at) // _BLOCK, mask=own, other=0), ELEMENT)
    return value.to(tl.float32)


def _define_kernels() -> None:
    """Make the kernels of every band from their source, which stays readable because Triton reads it again."""
    for band in range(MAX_BAND + 1):
        source = kernel_source(band)
        file = f"<rankwise SONew kernel, band {band}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec", dont_inherit=True), globals())


_define_kernels()
