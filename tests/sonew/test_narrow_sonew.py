"""SONew's pass over narrow statistics has the bits of opening them, of a pass in float32, and of storing them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from narrow_cases import assert_same, runs_of  # noqa: E402
from simulated import Case, Framework, run_of, world_group  # noqa: E402

from rankwise import SONew  # noqa: E402
from rankwise.kernels import triton  # noqa: E402
from rankwise.kernels.dispatch import using  # noqa: E402
from rankwise.kernels.low_precision_runs import (  # noqa: E402
    BFLOAT16,
    BLOCK,
    ROOT,
    SIGNED,
    LowPrecisionRuns,
    blocks_of,
    is_coded,
)
from rankwise.kernels.quantization import decode_, encode_  # noqa: E402
from rankwise.sonew.chain_runs import ChainRun, Margins  # noqa: E402
from rankwise.states import optimizer_spec  # noqa: E402

# Around blocks of 64 and the 960 elements of a tile; cut within blocks at one end, at both, and within a single one.
LENGTHS = (1, 63, 64, 65, 0, 959, 960, 961, 1025, 2053, 7, 90, 30)
FIRSTS = (0, 0, 64, 128, 5, 1920, 64, 37, 0, 63, 60, 70, 192)
NUMBERS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-3, "gamma": 1e-2, "graft": "adam", "graft_eps": 1e-4}
KINDS = {
    "as int8 keeps them": (SIGNED, BFLOAT16, SIGNED),
    "all in codes": (SIGNED, ROOT, SIGNED),
    "bfloat16": (BFLOAT16, BFLOAT16, BFLOAT16),
    "some": (None, ROOT, BFLOAT16),
}


@pytest.fixture(params=["triton", pytest.param("native", marks=pytest.mark.compiled)])
def directions(request: pytest.FixtureRequest) -> Iterator[Callable[..., Tensor]]:
    """Each form of the pass."""
    if request.param == "triton":
        request.getfixturevalue("interpreter")
        from rankwise.sonew.cuda import sonew_directions as form
    else:
        from rankwise.sonew import native

        request.getfixturevalue("monkeypatch").setattr(native, "_TILE", 5 * BLOCK)
        form = native.sonew_directions
    yield form


def statistics(band: int, kinds: tuple[Any, Any, Any], step: Any) -> list[Any]:
    """Gradients and what some steps left of statistics, narrow where a type is given."""
    generator = torch.Generator().manual_seed(band)
    fields: list[Any] = []
    for place in range(3 + band):
        sizes = [10.0 ** (-3 * torch.rand(numel, generator=generator)) for numel in LENGTHS]
        values = [torch.randn(numel, generator=generator) * size for numel, size in zip(LENGTHS, sizes, strict=True)]
        values = [value.abs() + 1e-3 if place == 2 else value for value in values]
        values[5].zero_()
        if place == 0:
            values[9][1000], values[3][7] = torch.inf, torch.nan
        kind = kinds[min(place - 1, 2)] if place else None
        if kind is None:
            fields.append(values)
            continue
        blocks = [blocks_of(first, numel) for first, numel in zip(FIRSTS, LENGTHS, strict=True)]
        exponents = [torch.zeros(count, dtype=torch.int8) for count in blocks] if is_coded(kind) else []
        codes = [torch.zeros(numel, dtype=kind) for numel in LENGTHS]
        fields.append(LowPrecisionRuns(codes, exponents, FIRSTS, [place + run for run in range(len(LENGTHS))], step))
        encode_(values, fields[-1])
    return fields


def opened(field: Any) -> list[Tensor]:
    if not isinstance(field, LowPrecisionRuns):
        return [value.clone() for value in field]
    values = [torch.empty(codes.numel()) for codes in field.codes]
    decode_(values, field)
    return values


def stepped(form: Callable[..., Tensor], fields: list[Any], band: int, step: Any) -> tuple[list[Tensor], Tensor]:
    runs = [ChainRun(first, 100 if run % 2 else None) for run, first in enumerate(FIRSTS)]
    generator = torch.Generator().manual_seed(99)
    sides = [torch.randn(2, 3 + band, band, generator=generator).mul_(1e-2) for _ in runs]
    for side in sides:
        side[:, 2] = side[:, 2].abs()
    margins = [Margins(*side) if run % 3 else None for run, side in enumerate(sides)]
    out = [torch.full_like(grad, torch.nan) for grad in fields[0]]
    number = step.to(torch.float32) if isinstance(step, Tensor) else 3
    return out, form(runs, *fields[:3], fields[3:], margins, step=number, out=out, **NUMBERS)


def ends(first: int, numel: int) -> tuple[int, int]:
    """Elements of blocks that others have a part of, at both ends; no run is the end of its parameter."""
    head = min(-first % BLOCK, numel)
    return head, (first + numel) % BLOCK if numel > head else 0


QUICK = ((1, "as int8 keeps them", True), (4, "all in codes", True), (0, "some", False), (2, "bfloat16", False))


def cases() -> Iterator[Any]:
    for case in product((0, 1, 2, 4, 5), KINDS, (False, True)):
        yield pytest.param(*case, marks=() if case in QUICK else pytest.mark.exhaustive)


@pytest.mark.parametrize(("band", "kinds", "shared"), cases())
def test_the_bits_are_those_of_opened_statistics(directions: Any, band: int, kinds: str, shared: bool) -> None:
    fields = statistics(band, KINDS[kinds], 7 if shared else None)
    wide = [opened(field) for field in fields]
    before = [
        [codes.clone() for codes in field.codes] if isinstance(field, LowPrecisionRuns) else [] for field in fields
    ]
    if shared:
        for place, field in enumerate(fields):
            if isinstance(field, LowPrecisionRuns) and is_coded(field.dtype):
                memory = [
                    tuple(torch.full((count,), torch.nan) if count else None for count in ends(first, numel))
                    for first, numel in zip(FIRSTS, LENGTHS, strict=True)
                ]
                fields[place] = LowPrecisionRuns(
                    field.codes, field.exponents, field.firsts, field.keys, field.step, memory
                )
    out, squares = stepped(directions, fields, band, 3)
    expected, norms = stepped(directions, wide, band, 3)
    assert_same(out, expected)
    # Tiles that begin with a block are cut elsewhere.
    torch.testing.assert_close(squares, norms, rtol=1e-12, atol=0, equal_nan=True)
    assert int(squares[0].isfinite().sum()) == len(LENGTHS) - 2
    for field, values, codes in zip(fields[1:], wide[1:], before[1:], strict=True):
        if not isinstance(field, LowPrecisionRuns):
            assert_same(field, values)
            continue
        again = LowPrecisionRuns(
            [kept.clone() for kept in codes],
            [torch.full_like(exponents, 3) for exponents in field.exponents],
            field.firsts,
            field.keys,
            field.step,
        )
        encode_(values, again)
        for run in range(len(LENGTHS)):
            check_run(field, again, values, codes, run)


def check_run(field: LowPrecisionRuns, again: LowPrecisionRuns, values: Any, codes: Any, run: int) -> None:
    """What a run has alone is stored, and what it shares is left as it was and given in float32."""
    numel = LENGTHS[run]
    head, tail = ((0 if end is None else end.numel()) for end in field.loose[run]) if field.loose else (0, 0)
    assert_same([field.codes[run][head : numel - tail]], [again.codes[run][head : numel - tail]])
    if field.exponents:
        inner = slice(1 if head else 0, -1 if tail else None)
        assert_same([field.exponents[run][inner]], [again.exponents[run][inner]])
    if head:
        assert_same([field.codes[run][:head], field.loose[run][0]], [codes[run][:head], values[run][:head]])
    if tail:
        last = slice(numel - tail, None)
        assert_same([field.codes[run][last], field.loose[run][1]], [codes[run][last], values[run][last]])


def test_steps_may_be_counted_on_the_device(interpreter: None) -> None:
    from rankwise.sonew.cuda import sonew_directions

    counts = torch.arange(3, 3 + len(LENGTHS))
    fields = statistics(1, KINDS["all in codes"], counts)
    wide = [opened(field) for field in fields]
    out, _ = stepped(sonew_directions, fields, 1, counts)
    expected, _ = stepped(sonew_directions, wide, 1, counts)
    assert_same(out, expected)
    for field, values in zip(fields[1:], wide[1:], strict=True):
        again = runs_of(LENGTHS, FIRSTS, field.dtype, counts)
        again = LowPrecisionRuns(again.codes, again.exponents, FIRSTS, field.keys, counts)
        encode_(values, again)
        assert_same(field, again)


def test_steps_on_a_device_do_not_depend_on_the_layout(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters lie one behind the other, blocks of 64 across them; the ends of their runs are stored afterwards."""
    monkeypatch.setattr(optimizer_spec, "FEWEST_CODED", 1)
    options = {"band": 1, "graft": "none", "chain": "tensor", "state_dtype": "int8", "state_rounding": "stochastic"}
    held = []
    with using(triton):
        for layout in ("replicated", "flat"):
            framework = Framework(layout, Case("sonew", SONew, options), torch.float32, 0, 1, world_group())
            for _ in range(2):
                framework.step()
            held.append(framework.pieces())
    whole = {piece.key: values for piece, values in held[0]}
    assert_same([values for _, values in held[1]], [run_of(whole[piece.key], piece) for piece, _ in held[1]])
