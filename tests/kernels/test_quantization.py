"""Codes of element states: what they promise, and that their forms have the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from narrow_cases import FIRSTS, LENGTHS, assert_same, copy_of, runs_of, values_of
from oracles import codes_by_search

from rankwise.kernels import lists, native, quantization
from rankwise.kernels.dispatch import quantization_for, using
from rankwise.kernels.low_precision_runs import BFLOAT16, BLOCK, ROOT, SIGNED, LowPrecisionRuns
from rankwise.kernels.native import compiled_quantization as compiled
from rankwise.kernels.quantization import BROKEN, CODED

KINDS = pytest.mark.parametrize("dtype", [SIGNED, ROOT, BFLOAT16], ids=["signed", "root", "bfloat16"])
CODES = pytest.mark.parametrize("dtype", [SIGNED, ROOT], ids=["signed", "root"])
FORMS = pytest.mark.parametrize(
    "form", [quantization, pytest.param(compiled, marks=pytest.mark.compiled)], ids=["plain", "native"]
)


def assert_same_bits(form: ModuleType, dtype: torch.dtype, step: int | torch.Tensor | None) -> None:
    """Of a form and the plain one: there, with exponents of their own and with larger ones, and back."""
    ours = runs_of(LENGTHS, FIRSTS, dtype, step)
    plain, values = copy_of(ours), [values_of(numel, dtype, seed) for seed, numel in enumerate(LENGTHS)]
    form.encode_(values, ours)
    quantization.encode_(values, plain)
    assert_same(ours, plain)
    if dtype != BFLOAT16:
        found = form.exponents_of(values, ours)
        torch.testing.assert_close(found, quantization.exponents_of(values, plain), rtol=0, atol=0)
        larger = (found.int() + 2).clamp(max=CODED[dtype].most).where(found < BROKEN, BROKEN).to(torch.int8)
        form.encode_(values, ours, larger)
        quantization.encode_(values, plain, larger)
        assert_same(ours, plain)
    opened, expected = ([torch.empty_like(value) for value in values] for _ in range(2))
    form.decode_(opened, ours)
    quantization.decode_(expected, ours)
    assert_same(opened, expected)
    others = [torch.randn_like(value) for value in values]
    form.add_decoded(others, ours, opened)
    quantization.add_decoded(others, ours, expected)
    assert_same(opened, expected)
    form.add_decoded(others, ours, others)
    assert_same(others, expected)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.compiled
@pytest.mark.usefixtures("threads")
@KINDS
@pytest.mark.parametrize("step", [None, 77], ids=["nearest", "stochastic"])
def test_the_compiled_form_has_the_same_bits(dtype: torch.dtype, step: int | None) -> None:
    assert_same_bits(compiled, dtype, step)


@pytest.mark.compiled
def test_what_the_compiled_form_leaves_to_the_plain_one() -> None:
    assert_same_bits(compiled, SIGNED, torch.tensor(7))
    values = [values_of(100, SIGNED, 0).double()]
    found, expected = runs_of([100], [0], SIGNED), runs_of([100], [0], SIGNED)
    compiled.encode_(values, found)
    quantization.encode_(values, expected)
    assert_same(found, expected)


@CODES
@FORMS
def test_codes_are_the_nearest(form: ModuleType, dtype: torch.dtype) -> None:
    values = values_of(5000, dtype, 1, is_finite=True)
    if dtype == ROOT:
        # Whose roots are float32s.
        values = values.sqrt().bfloat16().float().clamp(max=2.0**63).square()
    codes, exponents, opened = codes_by_search(values.double().numpy(), dtype == ROOT)
    kept = runs_of([5000], [0], dtype)
    form.encode_([values], kept)
    np.testing.assert_array_equal(kept.exponents[0].numpy(), exponents)
    np.testing.assert_array_equal(kept.codes[0].numpy(), codes)
    found = torch.empty(5000)
    form.decode_([found], kept)
    np.testing.assert_array_equal(found.double().numpy(), opened)
    assert found.isfinite().all() and not (found[values != 0] == 0).any() or dtype == SIGNED


@CODES
@FORMS
@pytest.mark.parametrize("step", [None, 5], ids=["nearest", "stochastic"])
def test_nothing_is_rounded_twice(form: ModuleType, dtype: torch.dtype, step: int | None) -> None:
    """Neither with its own exponent nor with a larger one, where what a code stands for has a code again."""
    codes = torch.arange(-127, 128) if dtype == SIGNED else torch.arange(256)
    kept = runs_of([len(codes)], [0], dtype, step)
    kept.codes[0].copy_(codes)
    kept.exponents[0].fill_(-9)
    opened = [torch.empty(len(codes))]
    form.decode_(opened, kept)
    again = copy_of(kept)
    form.encode_(opened, again, kept.exponents[0])
    assert_same(again, kept)
    # Every other code, or those of a third of the range that are whole at twice the scale.
    chosen = [
        opened[0][codes % 2 == 0]
        if dtype == SIGNED
        else opened[0][(codes % 2 == 0) & (codes < 64) | (codes >= 64) & (codes < 224)]
    ]
    larger = runs_of([len(chosen[0])], [0], dtype, step)
    form.encode_(chosen, larger, torch.full_like(larger.exponents[0], -8))
    found = [torch.empty_like(chosen[0])]
    form.decode_(found, larger)
    assert_same(found, chosen)


@CODES
@FORMS
@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan, -1.0])
def test_what_is_not_finite_stays_so(form: ModuleType, dtype: torch.dtype, broken: float) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 5] = broken
    kept, opened = runs_of([len(values)], [0], dtype), torch.empty_like(values)
    form.encode_([values], kept)
    form.decode_([opened], kept)
    lost = broken != -1.0 or dtype == ROOT
    assert opened[BLOCK : 2 * BLOCK].isnan().all() if lost else opened.isfinite().all()
    assert opened[:BLOCK].eq(1).all() and opened[2 * BLOCK :].eq(1).all()


@KINDS
@FORMS
def test_the_noise_knows_no_cuts(form: ModuleType, dtype: torch.dtype) -> None:
    """A parameter has the same codes in one run and in many, also where places need more than 32 bits."""
    first, cuts = 2**32 - 3 * BLOCK, [BLOCK, 5 * BLOCK, 300]
    values = values_of(sum(cuts), dtype, 3)
    whole = runs_of([sum(cuts)], [first], dtype, 9)
    form.encode_([values], whole)
    parts = runs_of(cuts, [first, first + BLOCK, first + 6 * BLOCK], dtype, 9)
    parts = LowPrecisionRuns(parts.codes, parts.exponents, parts.firsts, [5, 5, 5], 9)
    form.encode_(list(values.split(cuts)), parts)
    assert_same([torch.cat(list(parts.codes))], whole.codes)
    if dtype != BFLOAT16:
        assert_same([torch.cat(list(parts.exponents))], whole.exponents)
    form.encode_([values], other := LowPrecisionRuns(copy_of(whole).codes, whole.exponents, [first], [5], 10))
    assert not torch.equal(other.codes[0], whole.codes[0])


@KINDS
def test_stochastic_rounding_is_unbiased(dtype: torch.dtype) -> None:
    value, numel = 1.0078125 + 1 / 1024, 1 << 16
    values = torch.full((numel,), value).square() if dtype == ROOT else torch.full((numel,), value)
    values[::BLOCK] = 16.0
    kept, opened = runs_of([numel], [0], dtype, 3), torch.empty(numel)
    quantization.encode_([values], kept)
    quantization.decode_([opened], kept)
    found = (opened.sqrt() if dtype == ROOT else opened).view(-1, BLOCK)[:, 1:].double()
    assert len(found.unique()) == 2
    # Four standard deviations of a mean.
    assert abs(found.mean() - value) < 4 * found.std() / found.numel() ** 0.5


@KINDS
@FORMS
def test_other_lengths_are_refused(form: ModuleType, dtype: torch.dtype) -> None:
    kept = runs_of([65], [0], dtype)
    for given, runs in (
        (torch.zeros(64), kept),
        (torch.zeros(65), LowPrecisionRuns(kept.codes, [torch.zeros(3)], [0], [1])),
    ):
        with pytest.raises(ValueError, match="it must have a code for each"):
            form.encode_([given], runs)
        with pytest.raises(ValueError, match="it must have a code for each"):
            form.decode_([given], runs)


@KINDS
def test_large_runs_in_parts(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    values, kept, parts = values_of(1000, dtype, 0), runs_of([1000], [7], dtype, 4), runs_of([1000], [7], dtype, 4)
    quantization.encode_([values], kept)
    monkeypatch.setattr(quantization, "_AT_ONCE", 2 * BLOCK)
    quantization.encode_([values], parts)
    assert_same(parts, kept)


def test_the_form_goes_by_device() -> None:
    cpu = torch.device("cpu")
    with using(lists):
        assert quantization_for(cpu, torch.float32) is quantization
    with using(native):
        assert quantization_for(cpu, torch.float32) is compiled
