"""Megatron's own FSDP (version 1) on gloo ranks: each strategy follows one process and resumes, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cells import BIASED, Cell
from megatron_harness import Result, move, opened, trained
from megatron_types import TYPES, maker
from ranks import run_ranks

import megatron_patches
from megatron_patches.cpu import cpu_megatron
from megatron_patches.registry import RankwiseConfig, get_megatron_optimizer
from megatron_patches.support import SupportError

STEPS = 3
STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
OURS = (*TYPES, "mkor-sketch")
# Of the largest change of a weight, or what Megatron's Adam shows in the same cell. Where rounding can flip a sign or
# an edge: of the mean change.
ALLOWED = 2e-4
ADAM = 1e-3
DISCONTINUOUS = ("mars-lion", "sonew")
# Ranks, and what cuts the model over them.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{strategy: (2, {"megatron_fsdp": strategy}) for strategy in STRATEGIES},
    "TP2": (4, {"megatron_fsdp": "optim_grads_params", "tp": 2}),
    "HSDP": (4, {"megatron_fsdp": "optim_grads_params", "instances": 2}),
    "HSDP, optim": (4, {"megatron_fsdp": "optim", "instances": 2}),
}
USUAL = ("mars-m", "ldadam", "mkor")
FULL_SHARDS = {"megatron_fsdp": "optim_grads_params"}
FULL = Cell(megatron_fsdp="optim_grads_params")


def _run(rank: int, world: int, jobs: list[tuple[str, Cell]], steps: int) -> list[Result]:
    found = []
    with cpu_megatron():
        for name, cell in jobs:
            with opened(cell, maker(name)) as trainer:
                found.append(trained(trainer, steps))
    return found


def _check(label: str, names: tuple[str, ...]) -> None:
    """How far each type ends from one process."""
    alone, (world, layout) = Cell(clip=0.0), LAYOUTS[label]
    all_names = ("adam", *names)
    start = run_ranks(1, _run, [("adam", alone)], 0)[0][0]
    ends = run_ranks(1, _run, [(name, alone) for name in all_names], STEPS)[0]
    found = run_ranks(world, _run, [(name, Cell(clip=0.0, **layout)) for name in all_names], STEPS)[0]
    gaps = [move(mine.weights, end.weights, start.weights) for end, mine in zip(ends, found, strict=True)]
    figures = {n: gap.mean if n in DISCONTINUOUS else gap.largest for n, gap in zip(all_names, gaps, strict=True)}
    print(label, figures)
    assert max(figures.values()) <= max(ALLOWED, figures["adam"]), figures
    assert figures["adam"] <= ADAM
    assert all(mine.replica_gap == 0 for mine in found)


@pytest.mark.slow
def test_follows_one_process() -> None:
    _check("optim_grads_params", USUAL)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("label", LAYOUTS)
def test_every_type_follows_one_process(label: str) -> None:
    _check(label, OURS)


def _resumed(rank: int, world: int, folder: Path, jobs: list[tuple[str, Cell]]) -> list[tuple[Result, Result]]:
    found = []
    megatron_patches.apply()
    with cpu_megatron():
        for index, (name, cell) in enumerate(jobs):
            place = folder / str(index)
            with opened(cell, maker(name)) as trainer:
                trained(trainer, 2)
                trainer.save(place)
                whole = trained(trainer, 2)
            with opened(cell, maker(name)) as trainer:
                trainer.load(place)
                found.append((whole, trained(trainer, 2)))
    return found


HALF = {"precision": "bf16", **BIASED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jobs", "world"),
    [
        ([("ldadam", FULL), ("mkor", Cell(**FULL_SHARDS, **HALF))], 2),
        pytest.param(
            [
                (name, Cell(megatron_fsdp=strategy, **kind))
                for strategy in STRATEGIES
                for kind in ({}, HALF)
                for name in OURS
            ],
            2,
            marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)],
        ),
        pytest.param(
            [(name, Cell(**LAYOUTS[label][1], **HALF)) for label in ("HSDP", "TP2") for name in USUAL],
            4,
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["usual", "every type", "HSDP and TP2"],
)
def test_resumes_bitwise(jobs: list[tuple[str, Cell]], world: int, tmp_path: Path) -> None:
    for job, (whole, again) in zip(jobs, run_ranks(world, _resumed, tmp_path, jobs)[0], strict=True):
        assert again.losses == whole.losses, job
        assert all(torch.equal(again.weights[key], whole.weights[key]) for key in whole.weights), job


# --- refused ---------------------------------------------------------------------------------------------------------


def _refused(rank: int, world: int, given: list[tuple[Cell, dict[str, Any]]]) -> list[str]:
    messages = []
    with cpu_megatron():
        for cell, fields in given:
            with opened(cell, maker("adam")) as trainer:
                config = RankwiseConfig(**{**cell.optimizer_config(), "optimizer": "mars-m", **fields})
                with pytest.raises(SupportError) as caught:
                    get_megatron_optimizer(config, trainer.chunks)
                messages.append(str(caught.value))
    return messages


def test_what_does_not_work_is_refused_by_name() -> None:
    sharded = Cell(precision="bf16", **FULL_SHARDS)
    given: dict[str, tuple[Cell, dict[str, Any]]] = {
        "--expert-model-parallel-size is invalid with --use-megatron-fsdp": (
            Cell(megatron_fsdp="optim", moe=4, ep=2),
            {},
        ),
        "--use-precision-aware-optimizer is invalid with --use-megatron-fsdp": (
            sharded,
            {"use_precision_aware_optimizer": True},
        ),
        "--data-parallel-sharding-strategy no_shard is invalid with --use-megatron-fsdp": (
            Cell(megatron_fsdp="no_shard"),
            {},
        ),
        "--outer-dp-sharding-strategy is invalid with --use-megatron-fsdp": (
            Cell(instances=2, outer="optim", **FULL_SHARDS),
            {},
        ),
    }
    for messages in run_ranks(2, _refused, list(given.values())):
        for text, message in zip(given, messages, strict=True):
            assert text in message and "--optimizer mars-m" in message
