"""Checkpoints on other sizes of expert, tensor and pipeline parallelism, as Megatron's own loop asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_harness
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron_cells import DISTRIBUTED, MOE, Cell
from megatron_harness import Result, Trainer, largest_gap, opened, trained
from megatron_types import maker
from megatron_weights import bare
from ranks import run_ranks

import megatron_patches
from megatron_patches.cpu import cpu_megatron

# As in test_megatron_checkpoints: roundings of sums in another order.
LARGEST_MOVE = 1e-6
# Optimizer, and the layouts it is saved in and resumed on.
MOVES: dict[str, tuple[str, Cell, Cell]] = {
    "EP2 to EP1": ("ldadam", Cell(ep=2, **MOE, **DISTRIBUTED), Cell(**MOE, **DISTRIBUTED)),
    "EP1 to EP2": ("ldadam", Cell(**MOE, **DISTRIBUTED), Cell(ep=2, **MOE, **DISTRIBUTED)),
    "EP2 to EP1, whole": ("sonew", Cell(ep=2, **MOE), Cell(**MOE, **DISTRIBUTED)),
    "EP1 to EP2 fp16": ("mars-m", Cell(precision="fp16", **MOE), Cell(ep=2, precision="fp16", **MOE)),
    "EP2, whole to distributed": ("ldadam", Cell(ep=2, **MOE), Cell(ep=2, **MOE, **DISTRIBUTED)),
    "PP2 to TP2": ("ldadam", Cell(pp=2, **DISTRIBUTED), Cell(tp=2, **DISTRIBUTED)),
    "PP2, whole to distributed": ("ldadam", Cell(pp=2), Cell(pp=2, **DISTRIBUTED)),
    "stock PP2": ("adam", Cell(pp=2), Cell(pp=2)),
}
SHARDING = "distrib_optim_sharding_type"


def _metadata(cell: Cell) -> dict[str, Any]:
    """What Megatron's loop stores of a run."""
    stored: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return {**stored, SHARDING: "dp_reshardable"} if cell.use_distributed_optimizer else stored


def _save(trainer: Trainer, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(trainer.sharded_state(), str(folder), content_metadata=_metadata(trainer.cell))


def _load(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """As Megatron's loop: the checkpoint's metadata tell how to ask for the rest."""
    metadata = dist_checkpointing.load_content_metadata(
        preloaded_state_dict=dist_checkpointing.load_common_state_dict(str(folder))
    )
    state = trainer.sharded_state(True)
    state["optimizer"] = trainer.optimizer.sharded_state_dict(state, is_loading=True, metadata=dict(metadata))
    state = dist_checkpointing.load(state, str(folder))
    bare(trainer.chunks[0]).load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.scheduler.load_state_dict(state["opt_param_scheduler"])
    trainer.step = state["iteration"]
    return dict(metadata)


def _moved(rank: int, world: int, folder: Path) -> dict[str, tuple[Result | None, Result | None, dict[str, Any]]]:
    megatron_patches.apply()
    found = {}
    with cpu_megatron():
        for label, (name, cell, other) in MOVES.items():
            with opened(cell, maker(name)) as trainer:
                trainer.advance(2)
                _save(trainer, folder / label)
                whole = trained(trainer, 2)
            with opened(other, maker(name)) as trainer:
                metadata = _load(trainer, folder / label)
                found[label] = whole, trained(trainer, 2), metadata
    return found


def test_states_move_to_any_layout(tmp_path: Path) -> None:
    for label, (whole, again, metadata) in run_ranks(2, _moved, tmp_path)[0].items():
        assert whole is not None and again is not None
        if MOVES[label][0] == "adam":
            assert SHARDING not in metadata
            continue
        # What Megatron's loop looks for before it lets the distributed optimizer resume on other sizes.
        assert metadata[SHARDING] == "fully_reshardable"
        limit = LARGEST_MOVE if MOVES[label][1].precision == "fp32" else 1e-3
        assert largest_gap(again.weights, whole.weights) <= limit, label


def _padded(rank: int, world: int, folder: Path) -> None:
    """To a layout for which Megatron rounds the vocabulary up, and back again."""
    megatron_patches.apply()
    vocabulary = megatron_harness.VOCABULARY
    plain, rounded = Cell(precision="bf16", **DISTRIBUTED), Cell(tp=2, precision="bf16", **DISTRIBUTED)
    with cpu_megatron():
        with opened(plain, maker("ldadam")) as trainer:
            trainer.advance(2)
            _save(trainer, folder / "plain")
            before = [value.clone() for value in _states(trainer)]
        megatron_harness.VOCABULARY = vocabulary + vocabulary // 2
        with opened(rounded, maker("ldadam")) as trainer:
            _load(trainer, folder / "plain")
            _save(trainer, folder / "rounded")
        megatron_harness.VOCABULARY = vocabulary
        with opened(plain, maker("ldadam")) as trainer:
            _load(trainer, folder / "rounded")
            after = _states(trainer)
        assert len(before) == len(after) > 10 and all(map(torch.equal, before, after))


def _states(trainer: Trainer) -> list[torch.Tensor]:
    inner = trainer.optimizer.chained_optimizers[0].optimizer
    states = [inner.state[weight] for group in inner.param_groups for weight in group["params"]]
    return [state[name] for state in states for name in sorted(state)]


def test_a_vocabulary_rounded_up_for_another_layout(tmp_path: Path) -> None:
    run_ranks(2, _padded, tmp_path)


def _padded_and_changed(rank: int, world: int, folder: Path) -> str:
    """Another padding, and another rank: what does not fit is the second."""
    megatron_patches.apply()
    vocabulary = megatron_harness.VOCABULARY
    with cpu_megatron():
        with opened(Cell(precision="bf16", **DISTRIBUTED), maker("ldadam")) as trainer:
            trainer.advance(1)
            _save(trainer, folder)
        megatron_harness.VOCABULARY = vocabulary + vocabulary // 2
        with opened(Cell(tp=2, precision="bf16", **DISTRIBUTED), maker("ldadam", rank=8)) as trainer:
            with pytest.raises(ValueError, match="LDAdam: ") as error:
                _load(trainer, folder)
        megatron_harness.VOCABULARY = vocabulary
    return str(error.value)


def test_a_padded_vocabulary_is_not_blamed_for_what_else_does_not_fit(tmp_path: Path) -> None:
    for message in run_ranks(2, _padded_and_changed, tmp_path):
        assert "matrix.basis." in message and "rank=16, now 8" in message
        assert "embedding" not in message and "output_layer" not in message
