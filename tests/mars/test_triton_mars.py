from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton_runs import LENGTHS, TILE, assert_runs_close, copies, runs  # noqa: E402

from rankwise.intervals import Run
from rankwise.kernels import triton  # noqa: E402
from rankwise.kernels.passes import FIELDS, Pass, Rule, Scalars  # noqa: E402
from rankwise.kernels.run_views import RunPlan
from rankwise.mars import rule as updates
from rankwise.updates import adamw as adamw_updates  # noqa: E402

GAMMA, BETAS, EPS, DECAY, STEP = 0.5, (0.9, 0.97), 1e-6, 0.1, 4
K = updates.correction_factor(GAMMA, BETAS[0])


@pytest.fixture(autouse=True)
def short_tiles(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwise.kernels.triton import steps

    monkeypatch.setattr(steps, "TILE", TILE)
    monkeypatch.setattr(steps, "PASS_TILE", TILE)
    monkeypatch.setattr(steps, "TILES", 2)


class Fields:
    """Weights, gradients, references and moments of many runs, with their state before a step in double precision."""

    def __init__(self, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> None:
        generator = torch.Generator().manual_seed(seed)
        # Each field in a flat buffer of its own, at an alignment of its own.
        self.params, self.grads, self.references, self.exp_avgs, self.exp_avg_sqs = (
            runs(lengths, generator, offset) for offset in (0, 1, 4, 3, 8)
        )
        for square in self.exp_avg_sqs:
            square.square_()
        self.coefficients = torch.rand(len(lengths), generator=generator)
        self.p, self.g, self.h, self.m, self.v = (
            copies(x) for x in (self.params, self.grads, self.references, self.exp_avgs, self.exp_avg_sqs)
        )

    def run(self, rule: Rule, factors: Tensor | None, scalars: Scalars, compared: bool = True) -> None:
        held = {"param": self.params, "grad": self.grads, "exp_avg": self.exp_avgs, "exp_avg_sq": self.exp_avg_sqs}
        more = {"reference": self.references} if compared else {}
        triton.run(Pass(rule, {**{name: held[name] for name in FIELDS[rule]}, **more}, scalars, factors))

    def clipped(self, scaled: bool) -> list[Tensor]:
        factors = self.coefficients.double() if scaled else torch.ones(len(self.g)).double()
        corrected = [updates.corrected_gradient(g, h, GAMMA, BETAS[0]) for g, h in zip(self.g, self.h, strict=True)]
        return [c * factor for c, factor in zip(corrected, factors, strict=True)]

    def check_grads_and_references(self, advance: bool) -> None:
        for grad, reference, old_grad, old in zip(self.grads, self.references, self.g, self.h, strict=True):
            assert torch.equal(grad.double(), old_grad)
            assert torch.equal(reference.double(), old_grad if advance else old)


def adamw_oracle(fields: Fields, grads: list[Tensor], lr: float) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    new_p, new_m, new_v = [], [], []
    for p, g, m, v in zip(fields.p, grads, fields.m, fields.v, strict=True):
        m, v, direction = adamw_updates.adamw_update(
            g,
            m,
            v,
            betas=BETAS,
            eps=EPS,
            corrections=adamw_updates.bias_corrections(BETAS, STEP),
        )
        new_p.append(adamw_updates.decoupled_step(p, direction, lr, DECAY))
        new_m.append(m)
        new_v.append(v)
    return new_p, new_m, new_v


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("advance", [False, True])
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05), torch.tensor(0.05, dtype=torch.float64)], ids=str)
def test_mars_adamw(scaled: bool, advance: bool, lr: float | Tensor) -> None:
    fields = Fields()
    scalars = Scalars(lr=lr, betas=BETAS, eps=EPS, weight_decay=DECAY, step=STEP, k=K, advance=advance)
    fields.run("adamw", fields.coefficients if scaled else None, scalars)
    for found, wanted in zip(
        (fields.params, fields.exp_avgs, fields.exp_avg_sqs),
        adamw_oracle(fields, fields.clipped(scaled), 0.05),
        strict=True,
    ):
        assert_runs_close(found, wanted)
    fields.check_grads_and_references(advance)


@pytest.mark.parametrize("scaled", [False, True])
def test_adamw(scaled: bool) -> None:
    fields = Fields(1)
    scalars = Scalars(lr=0.05, betas=BETAS, eps=EPS, weight_decay=DECAY, step=STEP)
    fields.run("adamw", fields.coefficients if scaled else None, scalars, compared=False)
    grads = [g * float(factor) for g, factor in zip(fields.g, fields.coefficients, strict=True)] if scaled else fields.g
    for found, wanted in zip(
        (fields.params, fields.exp_avgs, fields.exp_avg_sqs),
        adamw_oracle(fields, grads, 0.05),
        strict=True,
    ):
        assert_runs_close(found, wanted)
    fields.check_grads_and_references(False)


def test_a_tiny_second_moment_is_not_flushed() -> None:
    """The denominator is its root, 1e-20, not eps alone."""
    params, grads, exp_avgs, exp_avg_sqs = ([torch.full((3,), value)] for value in (0.0, 1e-20, 1e-20, 1e-40))
    fields = {"param": params, "grad": grads, "exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}
    triton.run(Pass("adamw", fields, Scalars(lr=1.0, betas=(0.5, 0.5), step=40)))
    torch.testing.assert_close(params[0], torch.full((3,), -1.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("advance", [False, True])
def test_mars_lion(advance: bool) -> None:
    fields = Fields(2)
    scalars = Scalars(lr=0.05, betas=BETAS, weight_decay=DECAY, k=K, advance=advance)
    fields.run("lion", fields.coefficients, scalars)
    moved = [updates.momentum(m, c, BETAS[0]) for c, m in zip(fields.clipped(True), fields.m, strict=True)]
    wanted = [adamw_updates.decoupled_step(p, m.sign(), 0.05, DECAY) for p, m in zip(fields.p, moved, strict=True)]
    assert_runs_close(fields.exp_avgs, moved)
    assert_runs_close(fields.params, wanted)
    fields.check_grads_and_references(advance)


def test_lion_stands_still_at_zero() -> None:
    params, grads, references, exp_avgs = ([torch.full((5,), value)] for value in (1.0, 0.0, 0.0, 0.0))
    fields = {"param": params, "grad": grads, "reference": references, "exp_avg": exp_avgs}
    triton.run(Pass("lion", fields, Scalars(lr=0.5, betas=(0.9, 0.0), k=K, advance=True)))
    assert torch.equal(params[0], torch.ones(5))


def test_mars_momentum() -> None:
    fields = Fields(3)
    fields.run("momentum", fields.coefficients, Scalars(betas=BETAS, k=K, advance=True))
    wanted = [updates.momentum(m, c, BETAS[0]) for c, m in zip(fields.clipped(True), fields.m, strict=True)]
    assert_runs_close(fields.exp_avgs, wanted)
    fields.check_grads_and_references(True)


@pytest.mark.parametrize("rule", ["momentum", "nesterov"])
def test_momenta_are_measured_where_they_are_made(rule: Rule, launches: list[str]) -> None:
    fields = Fields(7)
    scalars = Scalars(betas=BETAS, nesterov=0.3)
    held = {"grad": fields.grads, "exp_avg": fields.exp_avgs, "param": fields.params}
    found = triton.run(Pass(rule, {name: held[name] for name in FIELDS[rule]}, scalars, measured=True))
    made = fields.exp_avgs if rule == "momentum" else fields.params
    assert found is not None and found.dtype == torch.float64
    wanted = torch.stack([momentum.double().square().sum() for momentum in made])
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)
    assert launches == ["update_kernel", "_sum_kernel"]


def test_factors_of_a_clip_are_squared_norms() -> None:
    """Of zero, below and above the clip, infinite, NaN."""
    lengths, clip = (5, 70, 3, 64, 9), 0.5
    squares = torch.tensor([0.0, 0.2, 9.0, torch.inf, torch.nan], dtype=torch.float64)
    fields = Fields(8, lengths)
    fields.run("momentum", squares, Scalars(betas=BETAS, clip=clip), compared=False)
    factors = updates.clip_coefficient(squares, clip)
    wanted = [updates.momentum(m, g * f, BETAS[0]) for m, g, f in zip(fields.m, fields.g, factors, strict=True)]
    assert_runs_close(fields.exp_avgs[:4], wanted[:4])
    assert factors[0] == factors[1] == 1.0 and fields.exp_avgs[4].isnan().all()


def test_norms() -> None:
    fields = Fields(4)
    found = triton.squared_norms(fields.grads, fields.references, K)
    assert found.dtype == torch.float64
    wanted = torch.stack([c.square().sum() for c in fields.clipped(False)])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    plain = triton.squared_norms(fields.grads)
    torch.testing.assert_close(plain, torch.stack([g.square().sum() for g in fields.g]), rtol=1e-14, atol=0)
    assert torch.equal(plain, triton.squared_norms(fields.grads)), "the same sums in the same order"


def test_sums_do_not_overflow_in_single_precision() -> None:
    runs_ = [torch.full((200,), 1e25), torch.full((3,), 1e-25)]
    wanted = torch.tensor([200e50, 3e-50], dtype=torch.float64)
    torch.testing.assert_close(triton.squared_norms(runs_), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(triton.squared_norms(runs_, runs_, K), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)], ids=str)
def test_scaled_step(scaled: bool, lr: float | Tensor) -> None:
    fields = Fields(5)
    fields.run("step", fields.coefficients if scaled else None, Scalars(lr=lr, weight_decay=DECAY), compared=False)
    factors = fields.coefficients.double() if scaled else torch.ones(len(LENGTHS)).double()
    wanted = [
        adamw_updates.decoupled_step(p, d * factor, 0.05, DECAY)
        for p, d, factor in zip(fields.p, fields.g, factors, strict=True)
    ]
    assert_runs_close(fields.params, wanted)


def _norms(fields: Fields) -> None:
    triton.squared_norms(fields.grads, fields.references, K)


def _step(fields: Fields) -> None:
    fields.run("step", None, Scalars(lr=0.1), compared=False)


@pytest.mark.parametrize(("call", "count"), [(_norms, 2), (_step, 1)])
def test_launches_do_not_depend_on_the_number_of_runs(
    launches: list[str], call: Callable[[Fields], None], count: int
) -> None:
    for lengths in ((3,), (65,), LENGTHS, (1,) * 20):
        launches.clear()
        call(Fields(lengths=lengths))
        assert len(launches) == count


def test_nothing_at_all_launches_nothing(launches: list[str]) -> None:
    triton.run(Pass("momentum", {"grad": [], "exp_avg": [], "reference": []}, Scalars(advance=True)))
    triton.run(Pass("step", {"grad": [], "param": []}, Scalars(lr=0.1)))
    assert triton.squared_norms([], [], K).shape == (0,)
    empty = [torch.empty(0)]
    triton.run(Pass("step", {"grad": empty, "param": empty}, Scalars(lr=0.1)))
    assert launches == []
    assert torch.equal(triton.squared_norms(empty, empty, K), torch.zeros(1, dtype=torch.float64))


def test_a_second_step_on_the_same_memory_uploads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwise.kernels.triton import segments, tables

    def uploads() -> int:
        return sum(cache.cache_info().misses for cache in (tables.table_of, segments.planned_table))

    fields = Fields(6)
    _norms(fields)
    known = uploads()
    _norms(fields)
    assert uploads() == known
    # Of views that were planned, where the flat tensors begin says it all.
    flats, plan = [torch.randn(12), torch.randn(7)], RunPlan([[Run(1, 4), Run(5, 7)], [Run(0, 7)]])
    found = triton.squared_norms(plan.cut(flats))
    assert uploads() == known + 1
    assert torch.equal(triton.squared_norms(plan.cut(flats)), found) and uploads() == known + 1
    others = [torch.randn(12), flats[1]]
    for views in (plan.cut(others), RunPlan(plan.places).cut(others)):
        assert torch.equal(triton.squared_norms(views), triton.squared_norms(list(views)))


@pytest.mark.parametrize(
    "bad",
    [torch.zeros(4, dtype=torch.float64), torch.zeros(8)[::2], torch.zeros(3)],
    ids=["dtype", "strides", "length"],
)
def test_other_tensors_are_refused(bad: Tensor) -> None:
    with pytest.raises(ValueError, match=r"float32|one tensor per run"):
        triton.squared_norms([torch.zeros(4)], [bad], K)
