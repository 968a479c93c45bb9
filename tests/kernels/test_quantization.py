"""Block-wise quantization: what it promises, and that its forms have the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from oracles import quantized_to_8_bits
from torch import Tensor

from rankwise.kernels import blocked, native, quantization
from rankwise.kernels.forms import quantization_for, using
from rankwise.kernels.native import compiled_quantization as compiled
from rankwise.kernels.quantization import BLOCK, dequantized, quantized_length

LENGTHS = (1, 63, 64, 65, 127, 128, 1000, 4096, 16384 + 7, 40000)


def values_of(numel: int, seed: int = 0) -> Tensor:
    """Of all magnitudes, block by block, with zeros and the edges of what scales reach."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(numel, generator=generator)
    sizes = torch.randint(-140, 128, (-(-numel // BLOCK),), generator=generator).float()
    found = torch.ldexp(found, sizes.repeat_interleave(BLOCK)[:numel]).clamp(-3e38, 3e38)
    found[torch.rand(numel, generator=generator) < 0.1] = 0.0
    return found


def packed(numel: int) -> Tensor:
    return torch.full((quantized_length(numel),), 171, dtype=torch.uint8)


def assert_same_bits(form: ModuleType, runs: list[Tensor], has_nans: bool = False) -> None:
    """Of a form and the plain one, there and back, and into the values themselves."""
    ours, plain = ([packed(len(run)) for run in runs] for _ in range(2))
    form.quantize_(runs, ours)
    quantization.quantize_(runs, plain)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    others = [torch.randn_like(run) for run in runs]
    found, expected = ([torch.empty_like(run) for run in runs] for _ in range(2))
    form.add_dequantized(others, ours, found)
    quantization.add_dequantized(others, ours, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=has_nans)
    form.add_dequantized(others, ours, others)
    torch.testing.assert_close(others, expected, rtol=0, atol=0, equal_nan=has_nans)


def quantized(values: Tensor, form: ModuleType = quantization) -> Tensor:
    kept = packed(values.numel())
    form.quantize_([values], [kept])
    return kept


@pytest.mark.parametrize("numel", LENGTHS)
def test_integers_and_scales(numel: int) -> None:
    values = values_of(numel)
    codes, scales = quantized_to_8_bits(values.double().numpy())
    kept = quantized(values)
    np.testing.assert_array_equal(kept[:numel].view(torch.int8).numpy(), codes)
    exponents = kept[numel:].view(torch.int8).double().numpy()[: len(scales[::BLOCK])]
    np.testing.assert_array_equal(2.0**exponents, scales[::BLOCK])
    np.testing.assert_array_equal(dequantized(kept, numel).double().numpy(), codes * scales)
    error = np.abs(values.double().numpy() - codes * scales)
    assert (error <= scales / 2).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_nothing_is_rounded_twice(dtype: torch.dtype) -> None:
    kept = quantized(values_of(40000))
    opened = dequantized(kept, 40000, dtype)
    assert opened.dtype == dtype
    torch.testing.assert_close(quantized(opened), kept, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_quantized_as_float32_is(dtype: torch.dtype) -> None:
    sizes = torch.arange(-20, 15).repeat_interleave(BLOCK)
    values = torch.ldexp(torch.rand(len(sizes)) - 0.5, sizes).to(dtype)
    torch.testing.assert_close(quantized(values), quantized(values.float()), rtol=0, atol=0)


@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("form", [quantization, compiled], ids=["plain", "native"])
def test_what_is_not_finite_stays_so(form: ModuleType, broken: float) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 5] = broken
    opened = dequantized(quantized(values, form), len(values))
    assert opened[BLOCK : 2 * BLOCK].isnan().all()
    assert opened[:BLOCK].eq(1).all() and opened[2 * BLOCK :].eq(1).all()
    sums = torch.empty_like(values)
    form.add_dequantized([torch.zeros_like(values)], [quantized(values, form)], [sums])
    assert sums.isnan().sum() == BLOCK


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_the_compiled_form_has_the_same_bits() -> None:
    if not native.is_available():
        pytest.skip("no compiler")
    runs = [values_of(numel, seed) for seed, numel in enumerate((*LENGTHS, 0))]
    assert_same_bits(compiled, runs)
    runs[3][7], runs[4][100] = torch.nan, -torch.inf
    assert_same_bits(compiled, runs, has_nans=True)


def test_the_compiled_form_leaves_other_types_to_the_plain_one() -> None:
    values = values_of(100).double()
    torch.testing.assert_close(quantized(values, compiled), quantized(values), rtol=0, atol=0)
    every_other = torch.randn(200)[::2]
    torch.testing.assert_close(quantized(every_other, compiled), quantized(every_other.clone()), rtol=0, atol=0)


@pytest.mark.parametrize("form", [quantization, compiled], ids=["plain", "native"])
@pytest.mark.parametrize("kept", [torch.zeros(96, dtype=torch.uint8), torch.zeros(80), torch.zeros(80, 1).byte()])
def test_other_lengths_and_types_are_refused(form: ModuleType, kept: Tensor) -> None:
    values = torch.zeros(65)
    with pytest.raises(ValueError, match="bytes in a row"):
        form.quantize_([values], [kept])
    with pytest.raises(ValueError, match="bytes in a row"):
        form.add_dequantized([values], [kept], [values])


def test_large_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of(1000)
    kept, opened = quantized(values), dequantized(quantized(values), 1000)
    monkeypatch.setattr(quantization, "_AT_ONCE", 2 * BLOCK)
    torch.testing.assert_close(quantized(values), kept, rtol=0, atol=0)
    torch.testing.assert_close(dequantized(kept, 1000), opened, rtol=0, atol=0)


def test_a_part_is_done_with_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    values, kept = values_of(4 * BLOCK), quantized(values_of(4 * BLOCK))
    done: list[str] = []
    powers, add = quantization._powers, torch.add
    monkeypatch.setattr(quantization, "_AT_ONCE", BLOCK)
    monkeypatch.setattr(quantization, "_powers", lambda *given: done.append("made") or powers(*given))
    monkeypatch.setattr(torch, "add", lambda *given, **more: done.append("added") or add(*given, **more))
    quantization.add_dequantized([values], [kept], [values])
    assert done == 4 * ["made", "added"]


def test_the_form_goes_by_device() -> None:
    cpu = torch.device("cpu")
    with using(blocked):
        assert quantization_for(cpu, torch.float32) is quantization
    with using(native):
        assert quantization_for(cpu, torch.float32) is compiled
