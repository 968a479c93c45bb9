"""LDAdam's step on many matrices where they lie, in Triton's interpreter, against the plain functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rankwise.ldadam.formulas import side_normalized  # noqa: E402
from rankwise.ldadam.in_place import LowRankStep  # noqa: E402
from rankwise.ldadam.rule import Subspace, ldadam_step  # noqa: E402

GROUP: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.97), "rho": 0.9, "eps": 1e-6, "error_feedback": True}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def job(
    shape: tuple[int, int], rank: int, seed: int, group: dict[str, Any], step: int = 3, error: torch.dtype | None = None
) -> LowRankStep:
    """A matrix in the midst of training; with an error buffer of its own where that has a type."""
    short, long = min(shape), max(shape)
    first = randn(rank, long, seed=seed + 1)
    state = {
        "basis": torch.linalg.qr(randn(short, rank, seed=seed + 2).double())[0].float().contiguous(),
        "exp_avg": first,
        # Large enough for a positive variance: a difference of two nearly equal numbers would only show rounding.
        "exp_avg_sq": first.square() * 3 + 0.1,
    }
    added = randn(shape[0] * shape[1], seed=seed + 3) if group["error_feedback"] and error is None else None
    source, weight = randn(shape[0] * shape[1], seed=seed + 4), randn(shape[0] * shape[1], seed=seed + 5)
    own = None if error is None else torch.zeros(shape[0] * shape[1], dtype=error)
    return LowRankStep(shape, shape[0] > shape[1], added, source, weight, state, step, group, own)


def wanted(given: LowRankStep) -> dict[str, Tensor]:
    """What the rule makes of it in double precision."""
    error = torch.zeros_like(given.source) if given.gradient is None else given.gradient
    turned = (side_normalized(flat.double().view(given.shape)) for flat in (given.weight, given.source, error))
    before = Subspace(*(given.state[name].double() for name in ("basis", "exp_avg", "exp_avg_sq")))
    *moved, after = ldadam_step(*turned, before, given.step, **given.group)
    weight, error = ((value.mT if given.right else value).flatten() for value in moved)
    found = {"basis": after.U, "exp_avg": after.M, "exp_avg_sq": after.V, "weight": weight}
    return {**found, "error": error} if given.group["error_feedback"] else found


def results(given: LowRankStep) -> dict[str, Tensor]:
    error = given.source if given.error is None else given.error
    return {**given.state, "weight": given.weight, "error": error}


def step(*jobs: LowRankStep) -> Any:
    from rankwise.ldadam.cuda.grouped_matrices import ldadam_matrices_

    return ldadam_matrices_(jobs)


SHAPES = [(20, 33), (33, 20), (20, 33), (24, 24), (16, 130)]


@pytest.mark.parametrize("error", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("at_once", [1 << 26, 400])
def test_a_step_is_that_of_the_plain_functions(
    feedback: bool,
    error: torch.dtype | None,
    at_once: int,
    interpreter: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several shapes, ranks, groups and counts, a few at a time."""
    from rankwise.ldadam import signature

    monkeypatch.setattr(signature, "ELEMENTS_AT_ONCE", at_once)
    if error is not None and not feedback:
        return
    groups = [{**GROUP, "error_feedback": feedback}, {**GROUP, "error_feedback": feedback, "lr": 0.3}]
    jobs = [job(shape, 5, 10 * place, groups[place == 2], error=error) for place, shape in enumerate(SHAPES)]
    jobs += [job((20, 33), 7, 100, groups[0], error=error), job((20, 33), 5, 110, groups[0], step=9, error=error)]
    expected = [wanted(given) for given in jobs]
    bases = [given.state["basis"].double().clone() for given in jobs]
    found = step(*jobs)
    assert float(found.kept) == 0.0
    for given, want in zip(jobs, expected, strict=True):
        has = results(given)
        for name, value in want.items():
            tolerance = 0.02 if name == "error" and error == torch.bfloat16 else 1e-3
            torch.testing.assert_close(has[name].double(), value, rtol=tolerance, atol=tolerance, msg=name)
    left = sum(
        float(1 - (want["basis"].mT @ old).square().sum() / old.shape[1])
        for want, old in zip(expected, bases, strict=True)
    )
    assert float(found.rotation) == pytest.approx(left, abs=1e-4)


@pytest.mark.parametrize("broken", ["zero", "rank one", "not finite"])
def test_a_basis_that_cannot_be_factored_stays(broken: str, interpreter: None) -> None:
    """And nobody else hears of it."""
    bad, good = job((20, 33), 5, 0, GROUP), job((20, 33), 5, 50, GROUP)
    expected, old = wanted(good), bad.state["basis"].clone()
    assert bad.gradient is not None
    bad.state["exp_avg"].zero_()
    bad.gradient.zero_()
    bad.source.zero_()
    if broken == "rank one":
        bad.source.view(20, 33)[3] = 1.0
    if broken == "not finite":
        bad.source[7] = float("nan")
    found = step(bad, good)
    assert torch.equal(bad.state["basis"], old) and float(found.kept) == 1.0
    for name, value in expected.items():
        torch.testing.assert_close(results(good)[name].double(), value, rtol=1e-4, atol=1e-4, msg=name)
    if broken != "not finite":
        assert all(value.isfinite().all() for value in results(bad).values())


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_units_of_the_gradient_do_not_matter(size: float, interpreter: None) -> None:
    """Squares of single numbers would leave the range of the type."""
    given = job((20, 33), 5, 0, {**GROUP, "eps": 1e-30})
    given.state["exp_avg"].mul_(size)
    given.state["exp_avg_sq"].fill_(1e-30 if size < 1 else 1e30)
    assert given.gradient is not None
    given.gradient.mul_(size)
    given.source.mul_(size)
    expected = wanted(given)
    step(given)
    torch.testing.assert_close(given.state["basis"].double(), expected["basis"], rtol=0.0, atol=1e-4)


def test_launches_do_not_depend_on_the_number_of_matrices(launches: list[str]) -> None:
    counts = []
    for copies in (1, 4):
        launches.clear()
        step(*(job((20, 33), 5, seed, GROUP) for seed in range(copies)))
        counts.append(len(launches))
    assert counts[0] == counts[1] == 20


@pytest.mark.parametrize(("rows", "columns", "depth"), [(5, 33, 20), (130, 16, 40), (1, 1, 1), (20, 20, 129)])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("halved", [(False, False), (True, True), (True, False), (False, True)])
def test_grouped_products(
    rows: int, columns: int, depth: int, turned: tuple[bool, bool], halved: tuple[bool, bool], interpreter: None
) -> None:
    from rankwise.ldadam.cuda.grouped_products import Operand, grouped_product_, operand_of, places_of
    from rankwise.ldadam.cuda.halves import in_halves

    shapes = [(rows, depth), (depth, columns)]
    stored = [randn(3, *(shape[::-1] if turn else shape), seed=7) for shape, turn in zip(shapes, turned, strict=True)]
    factors = [stack.mT if turn else stack for stack, turn in zip(stored, turned, strict=True)]
    halves = [in_halves(list(stack)) for stack in stored]
    operands = [
        operand_of(half, stack.stride()[1:]) if in_halves_ else Operand(places_of(stack), stack.stride()[1:])
        for half, stack, in_halves_ in zip(halves, factors, halved, strict=True)
    ]
    added, out = randn(3, rows, columns, seed=8), torch.full((3, rows, columns), float("nan"))
    grouped_product_(out, *operands, depth, alpha=0.5, beta=-2.0, added=places_of(added))
    want = 0.5 * (factors[0].double() @ factors[1].double()) - 2.0 * added.double()
    rtol, atol = (1e-5, 3e-4) if any(halved) else (0.0, 2e-5)
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=atol)
    both = torch.empty(2, 3, rows, columns, dtype=torch.bfloat16)
    grouped_product_(both, *operands, depth, alpha=0.5, beta=-2.0, added=places_of(added))
    torch.testing.assert_close(both.float().sum(0), out, rtol=2.0**-17, atol=1e-30)


def test_three_products_of_halves_leave_little() -> None:
    """What tensor cores make of "bf16x3", worked out by hand; one product would leave 500 times the error."""
    left, right = randn(64, 512, seed=1), randn(512, 64, seed=2)
    exact = left.double() @ right.double()
    size = left.double().abs() @ right.double().abs()
    high = [part.bfloat16().float() for part in (left, right)]
    low = [(part - top).bfloat16().float() for part, top in zip((left, right), high, strict=True)]

    def error(*pairs: tuple[Tensor, Tensor]) -> float:
        # Products of such numbers are exact in single precision, and added up in it.
        total = sum(a @ b for a, b in pairs)
        assert isinstance(total, Tensor)
        return float(((total.double() - exact).abs() / size).max())

    three = error((low[0], high[1]), (high[0], low[1]), (high[0], high[1]))
    assert three < 2.0**-19 < 2.0**-12 < error((high[0], high[1]))
