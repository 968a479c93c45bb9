"""Experts that AutoEP shares out: they follow one process, resume to the bit, and move to other ranks and stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import autoep_runs as runs
import ds_harness as ds
import numpy as np
import pytest
from autoep_runs import SKETCH, STEPS, Cell
from ds_harness import REFERENCE, run_ranks

from deepspeed_plugin.checkpoints.converting import convert
from rankwise.step.optimizer import ShardedOptimizer

# In one cell, AdamW's error is that of the other order of summation; ours may be ten times that.
ALLOWED = 10.0
TYPES = ("MARS-AdamW", "MARS-M", "SONew", "LDAdam", SKETCH)
ALL = (*TYPES, "MARS-Lion", "MARS-Shampoo", "MKOR-H")
Weights = dict[str, np.ndarray]


def _cells(names: Iterable[str], **common: Any) -> list[Cell]:
    return [Cell(name, **common) for name in names]


def _run(rank: int, world: int, cells: list[Cell], folder: str) -> list[tuple[Weights, bool]]:
    """Final weights of this rank, and whether a resumed run ended on the same bytes."""
    found = []
    for cell in cells:
        engine = runs.engine_of(cell, world)
        runs.train(engine, rank, world, range(2))
        engine.save_checkpoint(f"{folder}/{cell.name}", tag="saved")
        resumed = runs.engine_of(cell, world, seed=1)
        resumed.load_checkpoint(f"{folder}/{cell.name}", tag="saved")
        for run in (engine, resumed):
            runs.train(run, rank, world, range(2, STEPS))
        mine, theirs = runs.weights_of(engine), runs.weights_of(resumed)
        same = all(np.array_equal(mine[key], theirs[key]) for key in mine)
        if isinstance(engine.basic_optimizer, ShardedOptimizer):
            same = same and ds.digest(engine.basic_optimizer) == ds.digest(resumed.basic_optimizer)
        found.append((mine, same))
        engine.destroy()
        resumed.destroy()
    return found


def _joined(ranks: Iterable[Weights]) -> Weights:
    found: Weights = {}
    for weights in ranks:
        for key, value in weights.items():
            assert np.array_equal(found.setdefault(key, value), value), f"ranks disagree on {key}"
    return found


def _response(cell: Cell) -> float:
    """How far one process moves where its micro-batches are cut into other parts."""
    initial, expected = runs.run_whole(cell)
    return max(ds.error(runs.run_whole(cell, shares)[1], expected, initial) for shares in (2, 4))


@dataclass(frozen=True)
class Grid:
    """Types in one setting.

    Attributes:
        world: Ranks.
        types: Types, beside AdamW.
        common: What the cells have in common.
    """

    world: int
    types: tuple[str, ...]
    common: dict[str, Any]


GRIDS = {
    "ZeRO 2, cut and shared out": Grid(4, TYPES, {"stage": 2}),
    "ZeRO 3, cut and shared out": Grid(4, ("LDAdam",), {"stage": 3}),
    "ZeRO 3, all types": Grid(4, ALL, {"stage": 3}),
    "ZeRO 1, all types": Grid(2, ALL, {"stage": 1}),
    "ZeRO 2, a shared expert": Grid(4, ALL, {"stage": 2, "model": "qwen2_moe"}),
    "ZeRO 3, a shared expert": Grid(2, ALL, {"stage": 3, "model": "qwen2_moe"}),
    "ZeRO 2, whole stacks": Grid(2, ALL, {"stage": 2, "shared": 1}),
    "ZeRO 3, whole stacks": Grid(2, ALL, {"stage": 3, "shared": 1}),
    "ZeRO 3, an expert on each rank": Grid(4, ALL, {"stage": 3, "shared": 4}),
}
QUICK = ("ZeRO 2, cut and shared out", "ZeRO 3, cut and shared out")


@pytest.mark.parametrize(
    "grid", [pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.exhaustive) for name in GRIDS]
)
def test_experts_follow_one_process_and_resume(grid: str, tmp_path: Path) -> None:
    world, types, common = vars(GRIDS[grid]).values()
    cells = _cells((*types, REFERENCE), **common)
    results = run_ranks(world, _run, cells, str(tmp_path))
    errors = {}
    for cell, *ranks in zip(cells, *results, strict=True):
        assert all(same for _, same in ranks), f"{cell.name}: the resumed run ended elsewhere"
        initial, expected = runs.run_whole(cell)
        errors[cell.name] = ds.error(_joined(weights for weights, _ in ranks), expected, initial)
    floor = max(errors.pop(REFERENCE), 1e-6)
    far = {name: error for name, error in errors.items() if not error <= ALLOWED * floor}
    # What rounding does to the type's own rule, in one process, may be more.
    assert all(error <= ALLOWED * _response(Cell(name, **common)) for name, error in far.items()), (errors, floor)


# --- other ranks, other stages ---------------------------------------------------------------------------------------


def _continue(rank: int, world: int, cells: list[Cell], folder: str, tag: str) -> list[Weights]:
    found = []
    for cell in cells:
        engine = runs.engine_of(cell, world, seed=1)
        engine.load_checkpoint(f"{folder}/{cell.name}", tag=tag)
        runs.train(engine, rank, world, range(2, STEPS))
        found.append(runs.weights_of(engine))
        engine.destroy()
    return found


def _convert(rank: int, world: int, cells: list[Cell], folder: str) -> None:
    for cell in cells:
        convert(f"{folder}/{cell.name}/saved", f"{folder}/{cell.name}/universal", workers=1)


UNIVERSAL = {"checkpoint": {"load_universal": True}}
MOVES = {
    "other experts, through a universal checkpoint": ((2, 2, 2), (3, 4, 4), ("MARS-M", "LDAdam"), True),
    "other experts": ((3, 4, 2), (2, 2, 1), ("LDAdam", SKETCH), False),
    "all types, from ZeRO 2": ((2, 4, 2), (3, 4, 4), ALL, True),
    "all types, from ZeRO 3": ((3, 4, 4), (1, 2, 2), ALL, True),
    "all types, to one rank": ((3, 2, 2), (2, 1, 1), ALL, False),
    "all types, from one rank": ((2, 1, 1), (3, 4, 2), ALL, True),
    "all types, on other experts of as many ranks": ((3, 4, 2), (3, 4, 4), ALL, False),
}


@pytest.mark.parametrize(
    "move",
    [pytest.param(n, marks=pytest.mark.exhaustive if n.startswith("all") else pytest.mark.slow) for n in MOVES],
)
def test_states_continue_on_other_experts(move: str, tmp_path: Path) -> None:
    (stage, world, shared), (new_stage, new_world, new_shared), types, universal = MOVES[move]
    cells = _cells(types, stage=stage, shared=shared)
    stayed = run_ranks(world, _run, cells, str(tmp_path))
    moved_cells = [
        replace(cell, stage=new_stage, shared=new_shared, config=UNIVERSAL if universal else {}) for cell in cells
    ]
    if universal:
        run_ranks(1, _convert, cells, str(tmp_path))
    tag = "universal" if universal else "saved"
    moved = run_ranks(new_world, _continue, moved_cells, str(tmp_path), tag)
    for at, cell in enumerate(cells):
        initial, _ = runs.run_whole(cell)
        assert all(same for _, same in (ranks[at] for ranks in stayed)), cell.name
        here, there = _joined(ranks[at][0] for ranks in stayed), _joined(ranks[at] for ranks in moved)
        assert ds.error(there, here, initial) <= ALLOWED * max(_response(cell), 1e-6), cell.name
