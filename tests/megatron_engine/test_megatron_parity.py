"""Every optimizer, in every wrapper and parallel layout of real Megatron, follows one process.

Two figures, both relative to the largest change of a weight. *Same gradients*: the cell is fed the reduced gradients
that one process recorded, so that what is left is the sharded optimizer. *End to end*: the cell computes its own; they
differ by rounding, and the stock optimizer in the same cell shows by how much that alone moves a run. In bf16, where
one flipped sign is a whole step, the second figure is the mean difference over the mean change. Nothing is clipped:
the norm is Megatron's own, summed in another order in every layout.

With ``RANKWISE_MEGATRON_TABLE=FILE`` the figures are written down, for ``python -m benchmarks parity``.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from megatron_cells import Cell
from megatron_harness import Result, Trainer, largest_gap, opened, trained
from megatron_types import ELEMENT_WISE, TYPES, maker
from megatron_weights import cuts, reduced_gradient
from ranks import run_ranks
from torch import Tensor

from megatron_patches.cpu import cpu_megatron

STEPS = 10
DISTRIBUTED: dict[str, Any] = {"use_distributed_optimizer": True}
OVERLAPPED: dict[str, Any] = {
    **DISTRIBUTED,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 5000,
}
BIASED: dict[str, Any] = {"swiglu": False, "gqa": False}
MOE: dict[str, Any] = {"moe": 4}
DEEP: dict[str, Any] = {"layers": 4}
LAYER_WISE: dict[str, Any] = {"rankwise_layer_wise": True}

# By number of ranks. Together: every wrapper, every way to cut a parameter, biases, tied weights, experts.
LAYOUTS: dict[str, tuple[int, Cell]] = {
    "DP2": (2, Cell()),
    "DP2 distributed": (2, Cell(**OVERLAPPED)),
    "TP2": (2, Cell(tp=2, **BIASED)),
    "TP2 SP distributed": (2, Cell(tp=2, sp=True, **DISTRIBUTED)),
    "PP2": (2, Cell(pp=2, tied=True)),
    "PP2 interleaved distributed": (2, Cell(pp=2, vpp=2, **DEEP, **OVERLAPPED)),
    "EP2 distributed": (2, Cell(ep=2, **MOE, **DISTRIBUTED)),
    "DP3 distributed": (3, Cell(uneven=True, **DISTRIBUTED)),
    "TP2 DP2 distributed": (4, Cell(tp=2, sp=True, **DISTRIBUTED)),
    "TP2 DP2": (4, Cell(tp=2)),
    "DP2 layer-wise": (2, Cell(optimizer=LAYER_WISE)),
    "TP2 DP2 layer-wise": (4, Cell(tp=2, optimizer=LAYER_WISE)),
}
# The global batch does not divide by three: only prescribed gradients make sense there.
SAME_ONLY = ("DP3 distributed",)
ALLOWED_FP32, ALLOWED_HALF = 10.0, 2.0


class Figures(NamedTuple):
    """Of one cell: errors, and the largest difference between two ranks' copies of a weight."""

    same: float
    end_to_end: float
    replicas: float


def _alone(cell: Cell) -> Cell:
    """The cell that trains the same model in one process."""
    kept = ("swiglu", "gqa", "tied", "layers", "moe", "precision")
    return Cell(clip=0.0, **{name: getattr(cell, name) for name in kept})


def _record(gradients: list[dict[str, Tensor]], trainer: Trainer) -> None:
    gradients.append(trainer.weights(reduced_gradient)[0])


def _replay(gradients: list[dict[str, Tensor]], trainer: Trainer) -> None:
    """Put recorded gradients where Megatron's reduction has left its own."""
    for chunk in trainer.chunks:
        for parameter, cut in cuts(chunk, trainer.cell.tied):
            parameter.main_grad.copy_(cut.of(gradients[trainer.step][cut.name]))


def _run(cell: Cell, name: str, before: Any = None, steps: int = STEPS) -> Result | None:
    with opened(cell, maker(name)) as trainer:
        for _ in range(steps):
            trainer.train_step(before)
        return trained(trainer, 0)


def _references(rank: int, world: int, cells: list[Cell], names: list[str]) -> dict[tuple[str, str], Any]:
    found = {}
    with cpu_megatron():
        for cell in cells:
            for name in names:
                gradients: list[dict[str, Tensor]] = []
                start = _run(cell, name, steps=0)
                end = _run(cell, name, functools.partial(_record, gradients))
                found[name, str(cell)] = (start, end, gradients)
    return found


def _cells(rank: int, world: int, cells: list[tuple[str, Cell]], recorded: dict[Any, Any]) -> list[Any]:
    found = []
    with cpu_megatron():
        for name, cell in cells:
            try:
                gradients = recorded[name, str(_alone(cell))][2]
                same = None
                if cell.precision == "fp32" and name != "adam":
                    same = _run(cell, name, functools.partial(_replay, gradients))
                own = None if world == 3 else _run(cell, name)
            except Exception as error:
                error.add_note(f"{name} in {cell}")
                raise
            found.append((same, own))
    return found


def _mean_gap(weights: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    total = sum(reference[name].numel() for name in reference)
    return float(sum((weights[name] - reference[name]).abs().sum() for name in reference)) / total


@functools.cache
def _figures(precision: str, labels: tuple[str, ...]) -> dict[tuple[str, str], Figures]:
    names = ["adam", *TYPES]
    layouts = {
        label: (LAYOUTS[label][0], replace(LAYOUTS[label][1], precision=precision, clip=0.0)) for label in labels
    }
    alone = {str(_alone(cell)): _alone(cell) for _, cell in layouts.values()}
    recorded = run_ranks(1, _references, list(alone.values()), names)[0]
    found: dict[tuple[str, str], Figures] = {}
    gap = largest_gap if precision == "fp32" else _mean_gap
    for world in sorted({world for world, _ in layouts.values()}):
        cells = [(name, label) for label, (ranks, _) in layouts.items() if ranks == world for name in names]
        results = run_ranks(world, _cells, [(name, layouts[label][1]) for name, label in cells], recorded)[0]
        for (name, label), (same, own) in zip(cells, results, strict=True):
            cell = _alone(layouts[label][1])
            start, end, _ = recorded[name, str(cell)]
            change = gap(end.weights, start.weights)
            found[name, label] = Figures(
                0.0 if same is None else largest_gap(same.weights, end.weights) / change,
                0.0 if own is None else gap(own.weights, end.weights) / change,
                max(result.replica_gap for result in (same, own) if result is not None) if same or own else 0.0,
            )
    _write_down(precision, found)
    return found


def _write_down(precision: str, found: dict[tuple[str, str], Figures]) -> None:
    path = os.environ.get("RANKWISE_MEGATRON_TABLE")
    if path:
        rows = json.loads(Path(path).read_text()) if Path(path).exists() else []
        rows += [
            {"type": name, "layout": label, "precision": precision, **figures._asdict()}
            for (name, label), figures in found.items()
        ]
        Path(path).write_text(json.dumps(rows, indent=1))


FP32 = tuple(LAYOUTS)
BF16 = ("DP2", "DP2 distributed", "TP2 SP distributed", "PP2 interleaved distributed", "EP2 distributed")


@pytest.mark.parametrize("label", FP32)
@pytest.mark.parametrize("name", TYPES)
def test_same_gradients(name: str, label: str) -> None:
    figures = _figures("fp32", FP32)[name, label]
    assert figures.same <= (1e-6 if name in ELEMENT_WISE else 1e-5)
    assert figures.replicas == 0.0


@pytest.mark.parametrize("label", [label for label in FP32 if label not in SAME_ONLY])
@pytest.mark.parametrize("name", TYPES)
def test_end_to_end(name: str, label: str) -> None:
    found = _figures("fp32", FP32)
    assert 0 < found["adam", label].end_to_end < 1e-3
    assert found[name, label].end_to_end <= ALLOWED_FP32 * found["adam", label].end_to_end


@pytest.mark.parametrize("label", BF16)
@pytest.mark.parametrize("name", TYPES)
def test_bf16(name: str, label: str) -> None:
    found = _figures("bf16", BF16)
    assert found[name, label].end_to_end <= ALLOWED_HALF * found["adam", label].end_to_end
    assert found[name, label].replicas == 0.0
