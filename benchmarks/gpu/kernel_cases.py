"""Calls of every kernel with enough work to fill a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.items import Place
from rankwise.kernels.low_precision_runs import BLOCK, ROOT, SIGNED, LowPrecisionRuns, is_coded
from rankwise.kernels.passes import FIELDS, Pass, Rule, Scalars

__all__ = ["Case", "cases"]

Call = Callable[[], Any]
_RUNS = 16


class Case(NamedTuple):
    """A call of kernels.

    Attributes:
        make: Makes the tensors, and the call on them.
        slack: Share of the usual range's low end that will do.
        bytes: That it moves, where the launches do not say.
        bound: "memory" or what multiplies, where the counts do not say.
    """

    make: Callable[[], Call]
    slack: float = 1.0
    bytes: float | None = None
    bound: str | None = None


class _Chains(NamedTuple):
    """Rows of 4096 elements each."""

    start: int = 0
    chain: int = 4096


class _Maker:
    """Tensors of a place."""

    def __init__(self, place: Place) -> None:
        self.device = place.device
        self.elements = 1 << (14 if place.tiny else 27)

    def runs(self, offset: int, scale: float = 1e-3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """A field in pieces that begin this many elements behind a multiple of 16 bytes."""
        flat = torch.rand(self.elements + 4, device=self.device).mul_(scale).to(dtype)
        return list(flat[offset:][: self.elements].split(self.elements // _RUNS))

    def codes(self, dtype: torch.dtype = SIGNED) -> LowPrecisionRuns:
        """Codes of as many elements as its runs have, in 8 bits or bfloat16."""
        length = self.elements // _RUNS
        codes, exponents = (
            [torch.zeros(size, dtype=kind, device=self.device) for _ in range(_RUNS)]
            for size, kind in ((length, dtype), (length // BLOCK, torch.int8))
        )
        exponents = exponents if is_coded(dtype) else []
        return LowPrecisionRuns(codes, exponents, [length * run for run in range(_RUNS)], [1] * _RUNS)

    def ones(self) -> Tensor:
        """A factor for each run."""
        return torch.ones(_RUNS, device=self.device)

    def randn(self, *shape: int) -> Tensor:
        """Random numbers."""
        return torch.randn(*shape, device=self.device)


def cases(place: Place) -> Iterator[tuple[str, Case]]:
    """All, by name."""
    maker = _Maker(place)
    yield "copy by torch", Case(lambda: _copy(maker), bytes=8.0 * maker.elements, bound="memory")
    yield "fused AdamW by torch", Case(lambda: _fused_adamw(maker), bytes=28.0 * maker.elements, bound="memory")
    for offset in (0, 1):
        aligned = "" if offset == 0 else ", not aligned"
        # Accesses of 4 bytes in place of 16.
        slack = 1.0 if offset == 0 else 0.6
        yield f"norms{aligned}", Case(lambda offset=offset: _norms(maker, offset, False), slack)
        yield f"norms of corrected gradients{aligned}", Case(lambda offset=offset: _norms(maker, offset, True), slack)
        for rule in FIELDS:
            yield f"{rule}{aligned}", Case(lambda r=rule, o=offset: _update(maker, r, o, torch.float32), slack)
        for band in (0, 1, 2, 4):
            # Instructions grow with the band.
            issue = 1.0 if band < 4 else 0.8
            yield f"sonew band {band}{aligned}", Case(lambda b=band, o=offset: _sonew(maker, b, o), slack * issue)
        yield f"mkor's gradient passes{aligned}", Case(lambda offset=offset: _gradient_passes(maker, offset), slack)
    yield "adamw, reference bfloat16", Case(lambda: _update(maker, "adamw", 0, torch.bfloat16))
    for side in (64, 65) if place.tiny else (4096, 4097, 11008):
        slack = 0.8 if side % 16 == 0 else 0.4
        yield f"factors of side {side}", Case(lambda side=side: _factors(maker, side), slack)
    shape = (64, 96) if place.tiny else (4096, 11008)
    for rank in (8, 16) if place.tiny else (16, 64, 256, 512):
        yield f"low-rank step, rank {rank}", Case(lambda rank=rank: _low_rank_step(maker, shape, rank), 0.6)
        yield f"low-rank projection, rank {rank}", Case(lambda rank=rank: _projection(maker, shape, rank), 0.6)
        yield f"low-rank moments, rank {rank}", Case(lambda rank=rank: _moments(maker, shape, rank), 0.4)
    yield "rows scaled and halved", Case(lambda: _halves(maker))
    for rule in ("adamw", "lion", "momentum"):
        yield f"{rule}, states int8", Case(lambda rule=rule: _narrow_update(maker, rule))
    for band in (0, 1, 4):
        # Codes take instructions, and a small part of the bytes.
        yield f"sonew band {band}, states int8", Case(lambda band=band: _narrow_sonew(maker, band), 0.8)
    yield "quantize to 8 bits", Case(lambda: _encode(maker))
    yield "add what is in 8 bits", Case(lambda: _add_decoded(maker))


def _copy(maker: _Maker) -> Call:
    source = maker.randn(maker.elements)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _fused_adamw(maker: _Maker) -> Call:
    parameters = [torch.nn.Parameter(maker.randn(maker.elements // _RUNS)) for _ in range(_RUNS)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.AdamW(parameters, fused=True).step


def _norms(maker: _Maker, offset: int, corrected: bool) -> Call:
    from rankwise.kernels import triton

    grads, references = maker.runs(offset), maker.runs(offset) if corrected else None
    return lambda: triton.squared_norms(grads, references, 0.5)


def _update(maker: _Maker, rule: Rule, offset: int, reference: torch.dtype) -> Call:
    fields: dict[str, Any] = {name: maker.runs(offset) for name in FIELDS[rule]}
    if rule != "step":
        fields["reference"] = maker.runs(offset, dtype=reference)
    return _pass(maker, rule, fields)


def _narrow_update(maker: _Maker, rule: Rule) -> Call:
    kinds = {"exp_avg": SIGNED, "exp_avg_sq": ROOT, "reference": SIGNED}
    names = (*FIELDS[rule], "reference")
    return _pass(maker, rule, {name: maker.codes(kinds[name]) if name in kinds else maker.runs(0) for name in names})


def _pass(maker: _Maker, rule: Rule, fields: dict[str, Any]) -> Call:
    from rankwise.kernels import triton

    compared = "reference" in fields
    scalars = Scalars(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=5, k=0.5, advance=compared)
    factors = maker.ones() if compared else None
    return lambda: triton.run(Pass(rule, fields, scalars, factors))


def _sonew(maker: _Maker, band: int, offset: int) -> Call:
    return _directions(maker, [maker.runs(offset) for _ in range(4 + band)])


def _narrow_sonew(maker: _Maker, band: int) -> Call:
    states = [maker.codes(dtype) for dtype in (SIGNED, torch.bfloat16, *(SIGNED for _ in range(band)))]
    return _directions(maker, [maker.runs(0), *states[:2], maker.runs(0), *states[2:]])


def _directions(maker: _Maker, fields: list[Any]) -> Call:
    """SONew's pass over gradients, momenta, diagonals, memory for directions, and covariances."""
    from rankwise.sonew.cuda import sonew_directions

    settings: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8, "gamma": 1e-2, "graft": "adam", "graft_eps": 1e-8}
    chains = [_Chains()] * _RUNS
    return lambda: sonew_directions(chains, *fields[:3], fields[4:], [None] * _RUNS, step=5, out=fields[3], **settings)


def _gradient_passes(maker: _Maker, offset: int) -> Call:
    """On the way to the products, for the norm of what these give, and on the way back."""
    from rankwise.mkor.cuda.gradient_passes import GradientPasses
    from rankwise.mkor.product_groups import GradientForm, ProductGroups

    sources, out = maker.runs(offset), maker.runs(offset)
    columns = 64
    # With a factor on one side alone results do not lie over the operands.
    forms = [GradientForm(len(run) // columns, columns, (len(run),), (), False, True, False) for run in sources]
    arrangement = ProductGroups(forms)
    space = torch.rand(arrangement.numel, device=maker.device).mul_(1e-3).to(torch.bfloat16)
    results = arrangement.results.cut([space])

    def call() -> list[Tensor]:
        passes = GradientPasses(sources, arrangement, space, results, out)
        passes.gather(measured=True)
        passes.finish(passes.choose())
        return [space]

    return call


def _factors(maker: _Maker, side: int) -> Call:
    from rankwise.mkor.cuda.factor_updates import update_factors_

    inverses = [torch.eye(side, device=maker.device, dtype=torch.bfloat16) for _ in range(2)]
    vectors = maker.randn(2, side) / side
    return lambda: update_factors_(inverses, vectors, decay=0.95)


def _low_rank_step(maker: _Maker, shape: tuple[int, int], rank: int) -> Call:
    from rankwise.ldadam.cuda.low_rank_step import Factors, low_rank_step_

    short, long = shape
    part = [Factors(0, maker.randn(short, rank), maker.randn(rank, long), maker.randn(rank, long))]
    weight, error = maker.randn(short * long), maker.randn(short * long)
    settings: dict[str, Any] = {"cols": long, "right": False, "lr": 1e-3, "weight_decay": 0.0}
    return lambda: low_rank_step_([weight], part, [error], [error], **settings)


def _encode(maker: _Maker) -> Call:
    from rankwise.kernels.triton.launched_quantization import encode_

    values, kept = maker.runs(0), maker.codes()
    return lambda: encode_(values, kept)


def _add_decoded(maker: _Maker) -> Call:
    from rankwise.kernels.triton.launched_quantization import add_decoded

    values, kept, sums = maker.runs(0), maker.codes(), maker.runs(0)
    return lambda: add_decoded(values, kept, sums)


def _projection(maker: _Maker, shape: tuple[int, int], rank: int) -> Call:
    from rankwise.ldadam.cuda.grouped_products import grouped_product_, operand_of
    from rankwise.ldadam.cuda.halves import empty_halves

    short, long = shape
    halves, matrix = [empty_halves([(short, rank)], maker.device)[0].normal_()], maker.randn(short, long)
    out = torch.empty(1, rank, long, device=maker.device)
    left, right = operand_of(halves, (rank, 1)).turned, operand_of([matrix], (long, 1))
    return lambda: (halves, matrix, grouped_product_(out, left, right, short))


def _halves(maker: _Maker) -> Call:
    """The pass that scales the columns of LDAdam's power iteration and writes their halves."""
    from rankwise.ldadam.cuda.halves import in_halves

    widths = [(run, min(4096, run.numel())) for run in maker.runs(0)]
    stacks = [run.view(1, -1, width) for run, width in widths if run.numel() % width == 0]
    return lambda: in_halves(stacks, scaled=True)


def _moments(maker: _Maker, shape: tuple[int, int], rank: int) -> Call:
    from rankwise.ldadam.cuda.low_rank_moments import advance_moments_

    (first, second), projected = maker.randn(2, rank, shape[1]).abs(), maker.randn(1, rank, shape[1])
    rotation = torch.eye(rank, device=maker.device)[None].contiguous()
    settings: dict[str, Any] = {"step": 5, "betas": (0.9, 0.99), "eps": 1e-8, "error_feedback": True}
    return lambda: advance_moments_(projected, rotation, [first], [second], **settings)
