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
from counted_launches import Launches, counts_of
from ds_harness import REFERENCE, run_ranks

from deepspeed_plugin.checkpoints import CheckpointError
from deepspeed_plugin.checkpoints.converting import convert
from deepspeed_plugin.registry import build
from rankwise.comm.exchange import MatrixExchange
from rankwise.kernels import lists
from rankwise.kernels.dispatch import using
from rankwise.options.validation import OptionError
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
    "ZeRO 2, AutoTP beside it": Grid(2, ("LDAdam", "MARS-M"), {"stage": 2, "cut": 2}),
    "ZeRO 2, AutoTP beside all types": Grid(2, ALL, {"stage": 2, "cut": 2}),
    "ZeRO 3, AutoTP beside it": Grid(2, ALL, {"stage": 3, "cut": 2, "model": "qwen2_moe"}),
    "ZeRO 1, AutoTP on four ranks": Grid(4, ALL, {"stage": 1, "cut": 2}),
    "ZeRO 2, AutoTP and experts on four ranks": Grid(4, ALL, {"stage": 2, "cut": 2, "shared": 4, "model": "qwen2_moe"}),
    "ZeRO 3, AutoTP on four ranks": Grid(4, ALL, {"stage": 3, "cut": 2}),
    "ZeRO 2, all ranks of AutoTP": Grid(4, ALL, {"stage": 2, "cut": 4}),
    "ZeRO 1, all types": Grid(2, ALL, {"stage": 1}),
    "ZeRO 2, a shared expert": Grid(4, ALL, {"stage": 2, "model": "qwen2_moe"}),
    "ZeRO 3, a shared expert": Grid(2, ALL, {"stage": 3, "model": "qwen2_moe"}),
    "ZeRO 2, whole stacks": Grid(2, ALL, {"stage": 2, "shared": 1}),
    "ZeRO 3, whole stacks": Grid(2, ALL, {"stage": 3, "shared": 1}),
    "ZeRO 3, an expert on each rank": Grid(4, ALL, {"stage": 3, "shared": 4}),
}
QUICK = ("ZeRO 2, cut and shared out", "ZeRO 3, cut and shared out", "ZeRO 2, AutoTP beside it")


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
    "other experts, through a universal checkpoint": ((2, 2, 2), (3, 4, 4), ("LDAdam", SKETCH), True),
    "all types, from ZeRO 3 to 2": ((3, 4, 2), (2, 2, 1), ALL, False),
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


# --- what is refused -------------------------------------------------------------------------------------------------


def _refusals(rank: int, world: int, folder: str) -> list[str]:
    half = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    trained, other = Cell("LDAdam"), {"shared": 1}
    engine = runs.engine_of(trained, world)
    runs.train(engine, rank, world, range(1))
    engine.save_checkpoint(folder, tag="saved")
    said = []
    model = runs.model_of(trained)
    mine = build("LDAdam", list(model.parameters()), **trained.block["params"])
    try:
        runs.initialized(model, trained, world, optimizer=mine)
    except OptionError as refusal:
        said.append(str(refusal))
    for cell, loads, frozen in (
        (Cell("LDAdam", stage=0), False, None),
        (Cell("LDAdam", stage=1, config=half), False, None),
        (Cell("LDAdam", experts=8, **other), True, None),
        (Cell("LDAdam", **other), True, "w2"),
        (Cell("LDAdam", model="qwen2_moe", **other), True, None),
        # DeepSpeed forgets nothing of AutoTP: these come last.
        (Cell("LDAdam", cut=2, config={"gradient_clipping": 1.0}), False, None),
        (Cell("LDAdam", cut=2), True, None),
    ):
        try:
            run = runs.engine_of(cell, world, freeze=frozen)
            if loads:
                run.load_checkpoint(folder, tag="saved")
            said.append("accepted")
        except (OptionError, CheckpointError) as refusal:
            said.append(str(refusal))
    return said


def test_what_cannot_be_done_is_refused_alike(tmp_path: Path) -> None:
    words = (
        "optimizer='an instance beside expert_parallel' is invalid",
        "expert layers under='LDAdam'",
        "expert layers under='BF16_Optimizer'",
        "of another model",
        "model.layers.0.mlp.experts.w2, which is not trained, lies in a file for each expert",
        "of another model",
        "gradient_clipping=1.0",
        "autotp_size 1, this run has 2",
    )
    for messages in run_ranks(2, _refusals, str(tmp_path)):
        for message, word in zip(messages, words, strict=True):
            assert word in message, message


# --- launches --------------------------------------------------------------------------------------------------------


def _operations(rank: int, world: int, cells: list[Cell]) -> list[tuple[int, list[str]]]:
    """Matrices of the experts that this rank owns, and what starts something on a device in a third step."""
    found = []
    for cell in cells:
        engine = runs.engine_of(cell, world)
        runs.train(engine, rank, world, range(2))
        optimizer, launches = engine.basic_optimizer, Launches(counts_of(engine.basic_optimizer))
        optimizer.register_step_pre_hook(lambda *_, counter=launches: counter.__enter__() and None)
        optimizer.register_step_post_hook(lambda *_, counter=launches: counter.__exit__(None, None, None))
        runs.train(engine, rank, world, range(2, 3))
        owned = [key for key, owner in optimizer.planner.owners().items() if owner == rank and ".experts." in key]
        found.append((len(owned), launches.found))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_hundreds_of_experts_take_the_launches_of_a_few(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MatrixExchange, "one_by_one_on", ())  # as on an accelerator
    names = ("MARS-M",)
    cells = [Cell(name, experts=experts, stage=stage) for name in names for experts in (4, 256)]
    with using(lists):
        for of_rank in run_ranks(2, _operations, cells):
            for name, (few, expected), (many, counted) in zip(names, of_rank[::2], of_rank[1::2], strict=True):
                assert (few, many) == (2 * 3 * 4 // 2, 2 * 3 * 256 // 2), name
                assert counted == expected, name
