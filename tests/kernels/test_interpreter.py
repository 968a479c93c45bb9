"""What the tests' interpreter sees, so that kernels cannot do it unseen."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from triton_interpreter import interpreted  # noqa: E402


@triton.jit
def _product(a, b):  # type: ignore[no-untyped-def]
    return a * b


@triton.jit
def _multiples(out, factor, block: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, block)
    tl.store(out + places, _product(places, factor))


def test_integers_that_overflow_are_seen(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "_product", interpreted(_product))
    out = torch.zeros(8, dtype=torch.int32)
    multiples = interpreted(_multiples)
    multiples[(1,)](out, 3, block=8)
    assert out.tolist() == [0, 3, 6, 9, 12, 15, 18, 21]
    with pytest.raises(Exception, match="int32 overflow detected for operation mul"):
        multiples[(1,)](out, 2**30, block=8)


def test_the_language_is_what_it_was_after_a_kernel(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: getattr(tl, name) for name in ("arange", "store", "range")}
    test_integers_that_overflow_are_seen(interpreter, monkeypatch)
    assert {name: getattr(tl, name) for name in before} == before
