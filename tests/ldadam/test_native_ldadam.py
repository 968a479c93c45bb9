"""LDAdam's C++ step against the plain functions in fp64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rankwise.ldadam import native
from rankwise.ldadam.formulas import projects_right, side_normalized
from rankwise.ldadam.rule import Subspace, ldadam_step, subspace_step

pytestmark = pytest.mark.compiled

GROUP = {"betas": (0.9, 0.99), "rho": 0.9, "eps": 1e-8, "error_feedback": True, "lr": 0.01}
# Rows and columns on either side of a tile's 48 columns, 16 rows, 6 and 8 rows; rank 16 needs 16 of each.
SIZES = st.integers(16, 115)
NAMES = ("basis", "exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    # Two threads wait for each other busily: beside other processes a minute instead of a second.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Problem:
    """A parameter with gradients, and its states in fp64 as a few plain steps leave them."""

    def __init__(self, rows: int, columns: int, rank: int, seed: int, feedback: bool = True) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.shape, self.rank, self.right = (rows, columns), rank, projects_right(rows, columns)
        self.group = {**GROUP, "error_feedback": feedback}
        short, long = sorted((rows, columns))
        self.error, self.weight = torch.zeros(rows, columns).double(), self.random().double()
        self.state = {
            name: torch.zeros(*size, dtype=torch.float64)
            for name, size in zip(NAMES, ((short, rank), (rank, long), (rank, long)), strict=True)
        }
        self.step = 0
        for _ in range(3):
            self.advance(self.random())

    def random(self) -> Tensor:
        """A gradient as float32 has it."""
        return torch.randn(self.shape, generator=self.generator)

    def advance(self, gradient: Tensor) -> float:
        """One plain step; the share of the old subspace in the new one."""
        self.step += 1
        before = Subspace(*(self.state[name] for name in NAMES))
        turned = map(side_normalized, (self.weight, gradient.double(), self.error))
        weight, error, after = ldadam_step(*turned, before, self.step, **self.group)
        self.state = dict(zip(NAMES, after, strict=True))
        self.weight, self.error = (value.mT if self.right else value for value in (weight, error))
        return float((after.U.mT @ before.U).square().sum() / self.rank)

    def job(self, gradient: Tensor, added: bool) -> native.LowRankStep:
        """The next step in C++."""
        feedback = self.group["error_feedback"]
        source = self.error.float() if feedback else gradient
        pending = gradient.reshape(-1) if feedback and added else None
        if feedback and not added:
            source = source + gradient
        state = {name: value.float().contiguous() for name, value in self.state.items()}
        weight = self.weight.float().reshape(-1)
        rest = (pending, source.reshape(-1), weight, state, self.step + 1, self.group)
        return native.LowRankStep(self.shape, self.right, *rest)

    def assert_followed(self, job: native.LowRankStep) -> None:
        """Of the step that :meth:`advance` took too."""
        close = {"rtol": 2e-4, "atol": 2e-4}
        for name in NAMES:
            scale = self.state[name].abs().max()
            torch.testing.assert_close(job.state[name].double() / scale, self.state[name] / scale, **close)
        torch.testing.assert_close(job.weight.double(), self.weight.reshape(-1), rtol=0.0, atol=2e-5)
        if self.group["error_feedback"]:
            torch.testing.assert_close(job.source.double(), self.error.reshape(-1), rtol=0.0, atol=5e-4)


@pytest.mark.parametrize("rank", [16, 32])
@settings(deadline=None, max_examples=40)
@given(rows=SIZES, columns=SIZES, added=st.booleans(), feedback=st.booleans(), seed=st.integers(0, 2**16))
def test_a_step_is_that_of_the_plain_functions(rank, rows, columns, added, feedback, seed) -> None:
    rows, columns = max(rows, rank), max(columns, rank)
    problem = Problem(rows, columns, rank, seed, feedback)
    gradient = problem.random()
    job, kept_gradient = problem.job(gradient, added), gradient.clone()
    (kept,) = native.ldadam_steps_([job])
    assert kept == pytest.approx(problem.advance(gradient), abs=1e-3)
    problem.assert_followed(job)
    if not feedback or added:
        assert torch.equal(gradient, kept_gradient)


def test_bits_do_not_depend_on_company_or_threads() -> None:
    """One by one, in a list, with one thread or several: a matrix is rounded alike."""
    problems = [
        Problem(rows, columns, 16, seed) for seed, (rows, columns) in enumerate([(70, 40), (40, 130), (64, 64)])
    ]
    gradients = [problem.random() for problem in problems]
    results = []
    for threads, repeated in ((1, 1), (2, 1), (4, 1), (2, 3), (3, 5)):
        torch.set_num_threads(threads)
        jobs = [p.job(g, True) for _ in range(repeated) for p, g in zip(problems, gradients, strict=True)]
        native.ldadam_steps_(jobs)
        results += [jobs[start : start + 3] for start in range(0, len(jobs), 3)]
    for jobs in results[1:]:
        for job, first in zip(jobs, results[0], strict=True):
            assert torch.equal(job.weight, first.weight) and torch.equal(job.source, first.source)
            assert all(torch.equal(job.state[name], first.state[name]) for name in NAMES)


@pytest.mark.parametrize("shape", [(40, 90), (90, 40)])
def test_the_functional_form_has_the_bits_of_the_one_in_place(shape: tuple[int, int]) -> None:
    problem = Problem(*shape, 16, seed=3)
    gradient = problem.random()
    job = problem.job(gradient, False)
    matrix = side_normalized(job.source.clone().view(shape))
    old = [job.state[name].clone() for name in NAMES]
    hyper = {name: value for name, value in GROUP.items() if name != "lr"}
    *states, direction = native.subspace_step(matrix, *old, problem.step + 1, **hyper)
    error, weight = job.source.clone().view(shape), job.weight.clone().view(shape)
    native.ldadam_steps_([job])
    assert all(torch.equal(got, job.state[name]) for got, name in zip(states, NAMES, strict=True))
    for target, factor in ((error, states[1]), (weight, direction * GROUP["lr"])):
        left, right = (factor.mT, states[0].mT) if problem.right else (states[0], factor)
        native.subtract_product_(target, left, right)
    assert torch.equal(error.view(-1), job.source) and torch.equal(weight.view(-1), job.weight)


@pytest.mark.parametrize("broken", ["rank one", "zero", "nan", "infinite"])
@pytest.mark.parametrize("shape", [(40, 90), (90, 40)])
def test_a_matrix_that_cholesky_fails_on_is_left_to_others(shape: tuple[int, int], broken: str) -> None:
    """Nothing of it has changed but that its gradient is in its source."""
    problem = Problem(*shape, 16, seed=4)
    problem.error.zero_()
    problem.state["exp_avg"].zero_()
    gradient = problem.random()
    if broken == "rank one":
        gradient = gradient[:, :1] @ gradient[:1]
    elif broken == "zero":
        gradient.zero_()
    else:
        gradient[3, 5] = torch.nan if broken == "nan" else torch.inf
    job, other = problem.job(gradient, True), Problem(50, 60, 16, seed=5)
    before = {name: value.clone() for name, value in job.state.items()}
    weight, companion = job.weight.clone(), other.job(other.random(), True)
    assert native.ldadam_steps_([job, companion])[0] is None
    assert torch.equal(job.weight, weight) and all(torch.equal(job.state[name], before[name]) for name in NAMES)
    torch.testing.assert_close(job.source, gradient.reshape(-1), equal_nan=True, rtol=0.0, atol=0.0)
    assert bool(companion.weight.isfinite().all())


def test_what_has_no_form_takes_the_plain_functions() -> None:
    like = torch.ones(4)
    assert native.takes(16, like) and native.takes(32, like)
    assert not native.takes(8, like) and not native.takes(48, like)
    assert not native.takes(16, like.double()) and not native.takes(16, torch.ones(4, 4).mT)
    problem = Problem(20, 30, 5, seed=6)
    old = [problem.state[name].float() for name in NAMES]
    matrix, hyper = problem.random(), {name: value for name, value in GROUP.items() if name != "lr"}
    got = native.subspace_step(matrix, *old, 4, **hyper)
    expected = subspace_step(matrix, *old, 4, **hyper)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_bits_of_a_product_do_not_depend_on_the_rows_at_hand() -> None:
    """A rank that holds some rows of a matrix gets the bits of one that has them all."""
    generator = torch.Generator().manual_seed(7)
    left, right = torch.randn(37, 16, generator=generator), torch.randn(16, 101, generator=generator)
    matrix = torch.randn(37, 101, generator=generator)
    whole = matrix.clone()
    native.subtract_product_(whole, left, right)
    torch.testing.assert_close(whole.double(), matrix.double() - left.double() @ right.double(), rtol=0.0, atol=2e-5)
    for start, end in ((0, 5), (5, 21), (21, 37)):
        part = matrix[start:end].clone()
        native.subtract_product_(part, left[start:end], right)
        assert torch.equal(part, whole[start:end])


@pytest.mark.parametrize("size", [1e-25, 1e15])
@pytest.mark.parametrize("shape", [(40, 90), (90, 40)])
def test_units_of_the_gradient_do_not_matter(shape: tuple[int, int], size: float) -> None:
    """Squares of such entries have no place in float32."""
    problem = Problem(*shape, 16, seed=8)
    gradient = problem.random()
    expected = problem.job(gradient, True)
    scaled = problem.job(gradient * size, True)
    scaled.source.mul_(size)
    scaled.state = {**scaled.state, "exp_avg": scaled.state["exp_avg"] * size}
    expected_share, share = (native.ldadam_steps_([job])[0] for job in (expected, scaled))
    assert share == pytest.approx(expected_share, rel=1e-4)
    torch.testing.assert_close(scaled.state["basis"], expected.state["basis"], rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("shape", [(40, 90), (90, 40)])
def test_a_basis_is_orthonormal_or_refused(shape: tuple[int, int]) -> None:
    """Of rank fifteen but for rounding: the last column can often be factored, and may mean nothing."""
    refused = 0
    for seed in range(30):
        problem = Problem(*shape, 16, seed)
        problem.error.zero_()
        problem.state["exp_avg"].zero_()
        rows, columns = (torch.randn(length, 15, generator=problem.generator) for length in shape)
        job = problem.job(rows @ columns.mT, True)
        (kept,) = native.ldadam_steps_([job])
        refused += kept is None
        basis = job.state["basis"].double()
        torch.testing.assert_close(basis.mT @ basis, torch.eye(16).double(), rtol=0.0, atol=1e-5)
    assert 0 < refused < 30, "some are refused, and some are not"
