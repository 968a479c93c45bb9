r"""One pass over many runs computes SONew's statistics, directions and norms, for bands 0 to 8.

Bytes per element (fp32): ``(3 + band) 4`` read and as many written, that is 24 for the diagonal, 32 for the tridiagonal
and 56 for the band-4 method; the step takes 12 more (:mod:`rankwise.kernels.triton`).

Tiles are updated in place while their neighbours still need the old values next to them. A first small launch
therefore copies the elements on either side of every tile (1 to 2 % of the bytes), so that no program reads what
another one writes.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from rankwise.kernels.triton.language import ceil_div, jit, launch
from rankwise.kernels.triton.segments import Runs, addresses, run_sums, wide  # noqa: F401  the kernels' source calls wide
from rankwise.kernels.triton.steps import number_of, step_scale  # noqa: F401  as above
from rankwise.sonew.chain_runs import ChainRun
from rankwise.sonew.cuda_source import kernel_source, padding, shape_of
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


def sonew_directions(
    runs: Sequence[ChainRun],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    covariances: Sequence[Sequence[Tensor]],
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
        exp_avgs: Momenta, updated in place.
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
        ValueError: A tensor is not a contiguous fp32 run, the lists do not fit together, or an option is unknown.
    """
    band = len(covariances)
    _check(runs, band, graft, gamma)
    if not grads:
        return torch.empty(2, 0, dtype=torch.float64, device="cpu")
    fields = [grads, exp_avgs, exp_avg_sqs, *covariances, out]
    (block, warps), pad = shape_of(band), padding(band)
    tables = Runs(fields, block - 2 * pad, _places(runs, margins))
    borders = _borders(tables, band, pad)
    correction1, correction2 = bias_corrections(betas, step)
    official = graft == "adam_official"
    partials = tables.partial_sums(2)
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
        STEPS_ON_DEVICE=isinstance(step, Tensor),
        SQUARES_ON_DEVICE=isinstance(step, Tensor) and not official,
        GRAFT={"adam": 1, "adam_official": 1, "sgd": 2, "momentum": 3, "none": 0}[graft],
        BLOCK=block,
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


def _borders(tables: Runs, band: int, pad: int) -> Tensor:
    """Copy what lies before and after every tile, (tiles, fields, 2 pad), before anything changes."""
    fields = 3 + band
    total = tables.count * fields * 2 * pad
    if total == 0:
        return tables.table
    borders = torch.empty(total, dtype=torch.float32, device=tables.device)
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
        PAD=pad,
        SPAN=shape_of(band)[0] - 2 * pad,
        BLOCK=_BORDER_BLOCK,
    )
    return borders


@jit
def _border_kernel(
    table: tl.tensor,
    tiles: tl.tensor,
    borders: tl.tensor,
    total: tl.tensor,
    FIELDS: tl.constexpr,
    BAND: tl.constexpr,
    PAD: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < total
    place = entry % (2 * PAD)
    field = entry // (2 * PAD) % FIELDS
    tile = entry // (2 * PAD * FIELDS)
    row = table + tl.load(tiles + 2 * tile, mask=inside, other=0) * (FIELDS + 6)
    start = tl.load(tiles + 2 * tile + 1, mask=inside, other=0)
    length = tl.load(row + FIELDS + 1, mask=inside, other=0)
    at = place - PAD + tl.where(place < PAD, start, tl.minimum(start + SPAN, length))
    run = tl.load(row + field, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    value = tl.load(run + at, mask=inside & (at >= 0) & (at < length), other=0.0)
    left = tl.load(row + FIELDS + 4, mask=inside, other=0)
    right = tl.load(row + FIELDS + 5, mask=inside, other=0)
    before = (left != 0) & (at < 0) & (at >= -BAND)
    after = (right != 0) & (at >= length) & (at < length + BAND)
    value += tl.load(left.to(tl.pointer_type(tl.float32)) + field * BAND + BAND + at, mask=before, other=0.0)
    value += tl.load(right.to(tl.pointer_type(tl.float32)) + field * BAND + at - length, mask=after, other=0.0)
    tl.store(borders + entry, value, mask=inside)


@jit
def get(
    row: tl.tensor,
    FIELD: tl.constexpr,
    start: tl.tensor,
    lanes: tl.tensor,
    own: tl.tensor,
    PAD: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Return a tile of a field, with 0 in lanes outside it."""
    pointer = tl.load(row + FIELD).to(tl.pointer_type(tl.float32)) + start
    if FAST:
        pointer = tl.multiple_of(pointer, 16)
    return tl.load(pointer + (lanes - PAD), mask=own, other=0.0)


@jit
def put(
    row: tl.tensor,
    FIELD: tl.constexpr,
    start: tl.tensor,
    value: tl.tensor,
    lanes: tl.tensor,
    own: tl.tensor,
    PAD: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """Store a tile of a field."""
    pointer = tl.load(row + FIELD).to(tl.pointer_type(tl.float32)) + start
    if FAST:
        pointer = tl.multiple_of(pointer, 16)
    tl.store(pointer + (lanes - PAD), value, mask=own)


@jit
def reach_of(
    row: tl.tensor, FIELDS: tl.constexpr, start: tl.tensor, lanes: tl.tensor, PAD: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return how many elements of its chain follow each lane's element; BLOCK where the parameter is one chain.

    Beyond the ends of such a parameter everything is zero, and so are the edges that lead there.
    """
    chain = tl.load(row + FIELDS + 3)
    length = tl.maximum(chain, 1)
    first = ((tl.load(row + FIELDS + 2) + start) % length).to(tl.int32)
    length = length.to(tl.int32)
    position = (first + lanes - PAD + PAD * length) % length
    return tl.where(chain == 0, BLOCK, length - 1 - position)


@jit
def _shifted_by_gather(value: tl.tensor, BY: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    lanes = tl.arange(0, BLOCK) + BY
    return tl.gather(value, tl.minimum(tl.maximum(lanes, 0), BLOCK - 1), 0)


@jit
def _remember(
    last: tl.tensor, before: tl.tensor, known: tl.tensor, last2: tl.tensor, before2: tl.tensor, known2: tl.tensor
) -> tl.tensor:
    """Join two stretches: return the last value and the one before it, which a stretch of one lane does not have."""
    return last2, tl.where(known2 != 0, before2, last), tl.maximum(known2, 1)


@jit
def _shifted_by_scan(value: tl.tensor, BY: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    seen = tl.full((BLOCK,), 0, tl.int32)
    if BY > 0:
        for _ in tl.static_range(BY):
            _, value, _ = tl.associative_scan((value, value, seen), 0, _remember, reverse=True)
    else:
        for _ in tl.static_range(-BY):
            _, value, _ = tl.associative_scan((value, value, seen), 0, _remember)
    return value


# This returns the value BY lanes later; beyond the tile it is one that nobody uses. Triton 3.2 has no gather.
shifted = _shifted_by_gather if hasattr(tl, "gather") else _shifted_by_scan


def _define_kernels() -> None:
    """Make the kernels of every band from their source, which stays readable because Triton reads it again."""
    for band in range(MAX_BAND + 1):
        source = kernel_source(band)
        file = f"<rankwise SONew kernel, band {band}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        exec(compile(source, file, "exec", dont_inherit=True), globals())


_define_kernels()
