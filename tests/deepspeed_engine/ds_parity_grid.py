"""The cells of the parity matrix, the covering part of it that the default run takes, and how a cell is measured."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from ds_harness import (
    REFERENCE,
    REFERENCE_PARAMS,
    SONEW_DEFAULTS,
    TYPES,
    Job,
    Record,
    Regime,
    error,
    first_grads,
    mean_error,
    noise_response,
    regime_of,
    replay_error,
    run_all,
    run_plain,
    run_ranks,
    whole,
)

WORLDS = (1, 2, 3, 4)
LABELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    **{name: (name, params) for name, params in TYPES.items()},
    "SONew, default gamma": ("SONew", SONEW_DEFAULTS),
}
WRAPPERS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (0, {}),
    "BF16_Optimizer": (1, {"data_types": {"grad_accum_dtype": "fp32"}}),
    "ZeRO-1": (1, {}),
    "ZeRO-2": (2, {}),
    "ZeRO-3": (3, {}),
}
ZERO = ("ZeRO-1", "ZeRO-2", "ZeRO-3")
PRECISIONS: dict[str, tuple[torch.dtype, tuple[str, ...]]] = {
    "fp32": (torch.float32, ("stage 0", *ZERO)),
    "bf16": (torch.bfloat16, ("stage 0", "BF16_Optimizer", *ZERO)),
    "fp16": (torch.float16, ("stage 0", *ZERO)),
    # Stage 0 takes no loss scale but 1 (DeepSpeed's backward pass does not apply it there), so no dynamic one.
    "fp16 dynamic": (torch.float16, ZERO),
}
"""Type of the weights, and the wrappers that apply."""

STATIC_SCALE = 256.0
GROWTH_WINDOW = 3
"""Steps after which a dynamic loss scale doubles: it does so three times in ten steps."""

CLIPPING = {True: 1.0, False: 0.1}
"""By whether the head is tied: a fifth of the gradient norms there are, so that clipping acts in every step."""

SEEDS, SEEDS_OF_THE_DEFAULT = 5, 3
SPLITS = (2, 3, 4)


class Group(NamedTuple):
    """Cells that run in one set of processes."""

    precision: str
    wrapper: str
    world: int

    @property
    def stage(self) -> int:
        return WRAPPERS[self.wrapper][0]

    @property
    def class_name(self) -> str:
        """The wrapper class, or "" for none."""
        if self.wrapper == "stage 0":
            return "" if self.precision == "fp32" else "FP16_UnfusedOptimizer"
        if self.wrapper == "BF16_Optimizer":
            return "BF16_Optimizer"
        return "DeepSpeedZeroOptimizer_Stage3" if self.stage == 3 else "DeepSpeedZeroOptimizer"

    def __str__(self) -> str:
        return f"{self.precision}-{self.wrapper}-{self.world}".replace(" ", "_")


def all_groups(worlds: Sequence[int] = WORLDS) -> list[Group]:
    return [
        Group(precision, wrapper, world)
        for precision, (_, wrappers) in PRECISIONS.items()
        for wrapper, world in product(wrappers, worlds)
    ]


def default_groups() -> dict[Group, list[str]]:
    """Every type in fp32 on two ranks, and cells that complete all pairs of type, precision, wrapper, world up to 3.

    MKOR, whose statistics must not carry a loss scale, is wherever there is one.
    """
    groups = all_groups(WORLDS[:-1])
    chosen = {group: list(LABELS) for group in groups if group.precision == "fp32" and group.world == 2}
    missing = set().union(*(_pairs(group, label) for group, label in product(groups, LABELS)))
    for group, labels in chosen.items():
        for label in labels:
            missing -= _pairs(group, label)
    while missing:
        group, label = max(product(groups, LABELS), key=lambda cell: _gain(*cell, missing, chosen))
        chosen.setdefault(group, []).append(label)
        missing -= _pairs(group, label)
    for group in chosen:
        if group.precision == "fp16" and "MKOR" not in chosen[group]:
            chosen[group].append("MKOR")
    return {group: chosen[group] for group in groups if group in chosen}


def _gain(group: Group, label: str, missing: set[Any], chosen: Mapping[Group, Any]) -> tuple[int, bool, int]:
    """New pairs first, then groups that run anyway, then what is cheap; one rank alone shows little."""
    cost = (3 if group.world == 1 else group.world) * (2 if group.stage == 3 else 1)
    return len(_pairs(group, label) & missing), group in chosen, -cost


def _pairs(group: Group, label: str) -> set[Any]:
    return set(combinations([("type", label), *zip(Group._fields, group, strict=True)], 2))


def job_of(label: str, precision: str, wrapper: str, seed: int) -> Job:
    """The job of a cell; the head is tied in the odd stages of fp32 and the odd seeds of the half types."""
    name, params = LABELS.get(label, (REFERENCE, REFERENCE_PARAMS))
    stage, config = WRAPPERS[wrapper]
    dtype = PRECISIONS[precision][0]
    fp16 = {"loss_scale": 1.0 if stage == 0 else STATIC_SCALE}
    if precision == "fp16 dynamic":
        fp16 = {"loss_scale_window": GROWTH_WINDOW}
    tied = (stage if dtype is torch.float32 else seed) % 2 == 1
    extra: dict[str, Any] = {"gradient_clipping": CLIPPING[tied]}
    if dtype is torch.float16:
        extra["fp16"] = fp16
    return Job(name, params, config={**config, **extra}, dtype=dtype, tied=tied, seed=seed)


Weights = dict[str, np.ndarray]


@functools.cache
def plain(label: str, precision: str, wrapper: str, seed: int, regime: Regime) -> tuple[Weights, Weights]:
    """Initial and final weights of one process."""
    return run_plain(job_of(label, precision, wrapper, seed), regime=regime)


@functools.cache
def own_response(label: str, precision: str) -> float:
    """How far rounding moves one process in half precision.

    The samples stay the same and each micro-batch is cut into parts, so that every gradient is rounded otherwise; of
    the median errors over the seeds, that of the worst cut.
    """
    wrapper = "ZeRO-2"
    found = []
    for shares in SPLITS:
        errors = []
        for seed in range(SEEDS):
            initial, expected = plain(label, precision, wrapper, seed, Regime())
            errors.append(
                mean_error(run_plain(job_of(label, precision, wrapper, seed), shares=shares)[1], expected, initial)
            )
        found.append(float(np.median(errors)))
    return max(found)


@functools.cache
def fp32_response(label: str, wrapper: str) -> float:
    """How far gradient noise of the size of fp32 rounding moves one process, in the largest weight."""
    return noise_response(job_of(label, "fp32", wrapper, 0), 1e-7)


def seeds_of(group: Group, seeds: int = SEEDS) -> range:
    """fp32 needs one run: its bound has room for the chance in one. Half precision is judged by a median."""
    return range(1 if group.precision == "fp32" else seeds)


def train(rank: int, world: int, jobs: list[Job], zero: Mapping[str, Any]) -> list[Record]:
    """Train jobs on a CPU that DeepSpeed thinks cannot do fp16."""
    get_accelerator().is_fp16_supported = lambda: True
    return run_all(rank, world, jobs, zero)


class Run(NamedTuple):
    """One engine run beside one process."""

    label: str
    job: Job
    ranks: list[Record]
    initial: Weights
    expected: Weights
    regime: Regime


def runs(group: Group, labels: Sequence[str], main: Any = train, seeds: Sequence[int] | None = None) -> Iterator[Run]:
    """Train AdamW and the labelled types with every seed in one set of processes."""
    cells = [(label, seed) for label in (REFERENCE, *labels) for seed in seeds or seeds_of(group)]
    jobs = [job_of(label, group.precision, group.wrapper, seed) for label, seed in cells]
    results = run_ranks(group.world, main, jobs, {"stage": group.stage}, timeout=1800.0)
    for index, (label, seed) in enumerate(cells):
        ranks: list[Record] = [rank[index] for rank in results]
        regime = regime_of(jobs[index], group.stage, ranks[0])
        if label != REFERENCE:
            regime = replace(regime, idle_step=False)
        yield Run(label, jobs[index], ranks, *plain(label, group.precision, group.wrapper, seed, regime), regime)


def rows_of(group: Group, found: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per type: errors with the same gradients (worst seed) and end to end (median), AdamW's first."""
    rows = []
    for label in dict.fromkeys(run.label for run in found):
        own = [run for run in found if run.label == label]
        row: dict[str, Any] = {**group._asdict(), "type": label, "seeds": len(own)}
        ends = [(run.ranks[0].master, run.expected, run.initial) for run in own]
        row["largest"] = float(np.median([error(*end) for end in ends]))
        row["mean"] = float(np.median([mean_error(*end) for end in ends]))
        if label != REFERENCE:
            row["same_gradients"] = max(replay_error(run.job, run.ranks) for run in own)
            row["first_gradients"] = max(first_grads_error(run) for run in own)
        rows.append(row)
    return rows


def first_grads_error(run: Run) -> float:
    """Mean difference of the first step's gradients from one process's, relative to their mean size."""
    expected = first_grads(run.job, run.regime)
    found = whole(record.grads[0] for record in run.ranks)
    return mean_error(found, expected, {name: np.zeros_like(values) for name, values in expected.items()})
