"""The same training under DeepSpeed and under Megatron ends at the same weights, for every optimizer.

A small language model of plain PyTorch modules, which both frameworks recognise, is trained on two ranks: by DeepSpeed
with ZeRO-1 and ZeRO-2, and by megatron-core's distributed optimizer. Initial weights, samples of each rank and
micro-batch, learning rates and decay are the same. What is left is rounding: the frameworks sum gradients in another
order and clip them by formulas of their own. Each one's AdamW shows by how much that alone moves a run.

With ``RANKWISE_MEGATRON_TABLE=FILE`` the figures are written down, for ``python -m benchmarks megatron-parity``.
"""

from __future__ import annotations

import pytest
from cpu_deepspeed import prepare_ranks
from frameworks_alike import (
    ALLOWED,
    OPTIONS,
    STEPS,
    Figures,
    all_under_deepspeed,
    all_under_megatron,
    check_alike,
    figures_of,
)
from language_model import Model
from megatron_harness import largest_gap
from megatron_table import write_down
from ranks import once, run_ranks

from megatron_patches.registry import NAMES

USUAL = ("mars-lion", "mars-m", "sonew", "ldadam", "mkor")
STAGES = (1, 2)


@once
def _compared(names: tuple[str, ...]) -> dict[tuple[str, int, bool], Figures]:
    prepare_ranks()
    every = ["adam", *names]
    jobs = [(name, stage, False) for name in every for stage in STAGES] + [("ldadam", 1, True), ("mars-lion", 1, True)]
    start = {name: parameter.detach() for name, parameter in Model(True).named_parameters()}
    theirs = dict(zip(every, run_ranks(2, all_under_megatron, every, STEPS)[0], strict=True))
    ours = run_ranks(2, all_under_deepspeed, jobs)
    for first, second in zip(*ours, strict=True):
        assert largest_gap(first, second) == 0.0
    found = {
        job: figures_of(weights, theirs[job[0]].weights, start) for job, weights in zip(jobs, ours[0], strict=True)
    }
    write_down(
        {"type": name, "layout": f"ZeRO-{stage}", "precision": "frameworks", **figures._asdict()}
        for (name, stage, perturbed), figures in found.items()
        if not perturbed
    )
    return found


def _check(name: str, stage: int, names: tuple[str, ...]) -> None:
    found = _compared(names)
    check_alike(name, found[name, stage, False], found["adam", stage, False])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", USUAL)
def test_both_end_at_the_same_weights(name: str, stage: int) -> None:
    _check(name, stage, USUAL)


def test_another_learning_rate_is_seen() -> None:
    found = _compared(USUAL)
    perturbed, stock = found["ldadam", 1, True], found["adam", 1, False]
    assert found["mars-lion", 1, True].most > ALLOWED * stock.largest
    assert perturbed.largest > 10 * ALLOWED * stock.largest and perturbed.mean > 10 * ALLOWED * stock.mean


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", STAGES)
def test_all_end_at_the_same_weights(stage: int) -> None:
    assert {*OPTIONS} == {*NAMES}
    for name in OPTIONS:
        _check(name, stage, tuple(OPTIONS))
