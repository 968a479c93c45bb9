"""What users of DeepSpeed's Muon have reported, asked of every type at every stage.

Clipping that shrinks an orthogonalised update, a run that leaves its course when the optimizer is offloaded, an update
for every micro-batch, matrices stepped as by SGD at stage 0 or not at all under ``zero.Init``, and rates of param
groups that a schedule overwrites. In each of these settings the engine must hand over the gradients that one process
has, step once for all micro-batches, and end where one process ends that was fed the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import ds_harness as ds
import numpy as np
import pytest
from ds_parity_grid import LABELS
from ranks import run_ranks
from test_ds_variants import WARMUP, expected_matrices

STEPS = 4
STAGES = (0, 1, 2, 3)
TOLERANCE = 1e-5
"""Of the largest change of a weight, and of the largest gradient."""
TIGHT = 1e-2
"""A clipping norm about a hundredth of the gradients'."""


@dataclass(frozen=True)
class Report:
    """A setting users had trouble with, the stages that have it, and the stage that CI runs."""

    job: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = STAGES
    ci: int = 3
    check: Callable[[ds.Job, list[ds.Record]], None] | None = None


def _keeps_its_length(job: ds.Job, ranks: list[ds.Record]) -> None:
    """All types normalise what they step by: clipping, which shrank Muon's steps 85-fold, may not even halve them."""
    initial, expected = ds.run_plain(replace(job, config={"gradient_clipping": 1e9}))
    final = ds.whole(record.final for record in ranks)
    for name in ("up.weight", "mix.weight"):
        clipped, whole = (np.linalg.norm(weights[name] - initial[name]) for weights in (final, expected))
        assert 0.5 * whole <= clipped <= 2.0 * whole, (job.name, name, clipped / whole)


def _keeps_the_groups_rates(job: ds.Job, ranks: list[ds.Record]) -> None:
    """A schedule that starts at 0 moves the rates it is told to, and the rule of each group stays its own."""
    rates = [step["up.weight"] for step in ranks[0].lrs]
    assert rates[0] == 0.0 and 0.0 < rates[-2] < rates[-1], (job.name, rates)


REPORTS = {
    "tight clipping": Report(job={"config": {"gradient_clipping": TIGHT}}, ci=2, check=_keeps_its_length),
    "offloaded": Report(zero={"offload_optimizer": {"device": "cpu"}}, stages=(1, 2, 3), ci=3),
    "many micro-batches": Report(),
    "stage 0": Report(stages=(0,), ci=0),
    "zero.Init": Report(job={"zero_init": True}, stages=(3,), ci=3),
    "scheduled groups": Report(job={"config": WARMUP, "split": True}, ci=1, check=_keeps_the_groups_rates),
}


def _cells() -> list[Any]:
    """Every report at its stages; what other tests have in CI, zero.Init, is exhaustive here."""
    found = []
    for (name, report), stage in product(REPORTS.items(), STAGES):
        if stage in report.stages:
            in_ci = stage == report.ci and name != "zero.Init"
            mark = pytest.mark.slow if in_ci else pytest.mark.exhaustive
            found.append(pytest.param(name, stage, marks=mark, id=f"{name}-{stage}".replace(" ", "_")))
    return found


@pytest.mark.parametrize(("name", "stage"), _cells())
def test_what_happened_to_muon_does_not_happen(name: str, stage: int) -> None:
    report = REPORTS[name]
    cell = [ds.Job(kind, params, steps=STEPS, **report.job) for kind, params in LABELS.values()]
    results = run_ranks(2, ds.run_all, cell, {"stage": stage, **report.zero})
    for job, *ranks in zip(cell, *results, strict=True):
        final = ds.whole(record.final for record in ranks)
        assert ds.replay_error(job, ranks) <= TOLERANCE, job.name
        assert all(np.array_equal(record.model[key], final[key]) for record in ranks for key in final), job.name
        # ZeRO steps its param groups one by one.
        rounds = 2 if job.split and stage > 0 else 1
        assert all(record.calls == [rounds] * STEPS for record in ranks), "one update for all micro-batches"
        assert ranks[0].matrices == expected_matrices(job), "every matrix takes the rule"
        if not job.zero_init:  # which draws other weights
            first, expected = ds.whole(record.grads[0] for record in ranks), ds.first_grads(job)
            zero = {key: np.zeros_like(value) for key, value in expected.items()}
            assert ds.error(first, expected, zero) <= TOLERANCE, (
                job.name,
                "gradients of all micro-batches, clipped once",
            )
        if report.check is not None:
            report.check(job, ranks)
