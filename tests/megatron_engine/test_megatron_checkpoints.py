"""Megatron's distributed checkpoints of our optimizers: resumed bitwise, and on other parallel sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron_cells import DISTRIBUTED, MOE, OVERLAPPED, Cell
from megatron_harness import Result, largest_gap, opened
from megatron_resumes import resume, roll_back, save
from megatron_types import TYPES, maker
from ranks import once, run_ranks

from megatron_patches.cpu import cpu_megatron

SAME: dict[str, tuple[int, Cell]] = {
    "DP2": (2, Cell()),
    "DP2 distributed bf16": (2, Cell(precision="bf16", **DISTRIBUTED)),
    "DP2 bf16": (2, Cell(precision="bf16")),
    "DP2 distributed fp16": (2, Cell(precision="fp16", **DISTRIBUTED)),
    "TP2 SP distributed": (2, Cell(tp=2, sp=True, **DISTRIBUTED)),
    "PP2 interleaved distributed": (2, Cell(pp=2, vpp=2, layers=4, microbatches=4, **DISTRIBUTED)),
    "EP2 distributed": (2, Cell(ep=2, **MOE, **DISTRIBUTED)),
    "DP2 layer-wise": (2, Cell(optimizer={"rankwise_layer_wise": True})),
    "CP2 distributed": (2, Cell(cp=2, **DISTRIBUTED)),
}
# From, to: fp32, so that nothing but the order of sums differs.
MOVES: dict[str, tuple[tuple[int, Cell], tuple[int, Cell]]] = {
    "DP2 to TP2": ((2, Cell(**DISTRIBUTED)), (2, Cell(tp=2, **DISTRIBUTED))),
    "TP2 to DP2": ((2, Cell(tp=2)), (2, Cell(**DISTRIBUTED))),
    "DP2 to TP2 DP2": ((2, Cell(**DISTRIBUTED)), (4, Cell(tp=2, **DISTRIBUTED))),
    "TP2 DP2 to one": ((4, Cell(tp=2, **DISTRIBUTED)), (1, Cell())),
    "PP2 to DP2": ((2, Cell(pp=2, **DISTRIBUTED)), (2, Cell(**DISTRIBUTED))),
    "CP2 to DP2": ((2, Cell(cp=2, **DISTRIBUTED)), (2, Cell(**DISTRIBUTED))),
}
CONTEXT_MOVES: dict[str, tuple[tuple[int, Cell], tuple[int, Cell]]] = {
    "DP2 to CP2": ((2, Cell(**DISTRIBUTED)), (2, Cell(cp=2, **DISTRIBUTED))),
    "CP2 to CP4": ((2, Cell(cp=2, **DISTRIBUTED)), (4, Cell(cp=4))),
    "CP4 to CP2 TP2": ((4, Cell(cp=4)), (4, Cell(cp=2, tp=2, **DISTRIBUTED))),
    "CP2 to one": ((2, Cell(cp=2)), (1, Cell())),
}
ALL_MOVES = MOVES | CONTEXT_MOVES
# Measured at most 3e-7 of a weight of order one, five roundings in fp32; the stock optimizer shows the same.
LARGEST_MOVE = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


# Matrix states everywhere, every type in one way to cut its states or another; the whole grid is exhaustive.
USUAL = [("ldadam", label) for label in SAME]
USUAL += [(name, "DP2 distributed bf16") for name in ("mars-adamw", "mars-shampoo", "sonew", "mkor", "ldadam-narrow")]
USUAL += [(name, "TP2 SP distributed") for name in ("mars-lion", "mars-m", "sonew", "mkor-h", "sonew-narrow")]
GRID = [(name, label) for label in SAME for name in (*TYPES, *(f"{name}-narrow" for name in ("ldadam", "sonew")))]


@once
def _bitwise(folder: Path, jobs: tuple[tuple[str, str], ...]) -> dict[tuple[str, str], tuple[Result, Result]]:
    cells = [(name, SAME[label][1]) for name, label in jobs]
    target = folder / str(len(jobs))
    target.mkdir()
    whole = run_ranks(2, save, cells, target)[0]
    again = run_ranks(2, resume, [(*cell, target / str(index)) for index, cell in enumerate(cells)])[0]
    return dict(zip(jobs, zip(whole, again, strict=True), strict=True))


def _check_bitwise(folder: Path, name: str, label: str, jobs: list[tuple[str, str]]) -> None:
    whole, again = _bitwise(folder, tuple(jobs))[name, label]
    assert again.losses == whole.losses
    assert all(torch.equal(again.weights[key], whole.weights[key]) for key in whole.weights)
    assert all(torch.equal(again.model_weights[key], whole.model_weights[key]) for key in whole.weights)


@pytest.mark.parametrize(("name", "label"), USUAL)
def test_resumes_bitwise(folder: Path, name: str, label: str) -> None:
    _check_bitwise(folder, name, label, USUAL)


@pytest.mark.exhaustive
def test_resumes_bitwise_everywhere(folder: Path) -> None:
    for name, label in GRID:
        _check_bitwise(folder, name, label, GRID)


def test_experts_of_the_last_stage_resume_bitwise(folder: Path) -> None:
    """Rank 0, which writes what all ranks share, holds no experts."""
    cell = Cell(pp=2, ep=2, dense_layers=1, **MOE, **DISTRIBUTED)
    target = folder / "experts"
    target.mkdir()
    whole = run_ranks(4, save, [("ldadam", cell)], target)[0][0]
    again = run_ranks(4, resume, [("ldadam", cell, target / "0")])[0][0]
    assert again.losses == whole.losses
    assert all(torch.equal(again.weights[key], whole.weights[key]) for key in whole.weights)


@once
def _moved(folder: Path, label: str, names: tuple[str, ...]) -> list[tuple[Result, Result]]:
    (world, cell), (other_world, other) = ALL_MOVES[label]
    target = folder / "-".join((label.replace(" ", "-"), *names))
    target.mkdir()
    whole = run_ranks(world, save, [(name, cell) for name in names], target)[0]
    jobs = [(name, other, target / str(index)) for index, name in enumerate(names)]
    return list(zip(whole, run_ranks(other_world, resume, jobs)[0], strict=True))


@pytest.mark.parametrize("label", MOVES)
def test_resumes_on_another_layout(folder: Path, label: str) -> None:
    names = ("ldadam", "sonew")
    for name, (whole, again) in zip(names, _moved(folder, label, names), strict=True):
        assert largest_gap(again.weights, whole.weights) <= LARGEST_MOVE, name


def test_buffers_in_8_bits_move(folder: Path) -> None:
    """Their blocks lie elsewhere then, and are rounded once more: a hundredth of what is lost without them."""
    (whole, again), (_, without) = _moved(folder, "DP2 to TP2", ("ldadam-int8", "ldadam-no-feedback"))
    gap = largest_gap(again.weights, whole.weights)
    assert gap <= 0.01 * largest_gap(without.weights, whole.weights)


@pytest.mark.exhaustive
@pytest.mark.parametrize("label", ALL_MOVES)
def test_all_resume_on_another_layout(folder: Path, label: str) -> None:
    for name, (whole, again) in zip(TYPES, _moved(folder, label, tuple(TYPES)), strict=True):
        assert largest_gap(again.weights, whole.weights) <= LARGEST_MOVE, name


ROLLED_BACK = [("mkor", Cell(precision="bf16", **OVERLAPPED)), ("ldadam", SAME["DP2 layer-wise"][1])]
EVERYWHERE = [
    *(Cell(precision=precision, **OVERLAPPED) for precision in ("fp32", "bf16", "fp16")),
    Cell(precision="bf16", optimizer={"use_precision_aware_optimizer": True}, **OVERLAPPED),
    *(cell for _, cell in SAME.values()),
]


@pytest.mark.parametrize(
    "jobs",
    [
        ROLLED_BACK,
        pytest.param([(name, cell) for name in TYPES for cell in EVERYWHERE], marks=pytest.mark.exhaustive),
    ],
    ids=["usual", "everywhere"],
)
def test_a_run_rolls_back_bitwise(jobs: list[tuple[str, Cell]], tmp_path: Path) -> None:
    """Its schedule, too: Megatron's own adds the checkpoint's steps to those that it has taken."""
    for job, (whole, again) in zip(jobs, run_ranks(2, roll_back, jobs, tmp_path)[0], strict=True):
        assert again.losses == whole.losses, job
        assert all(torch.equal(again.weights[key], whole.weights[key]) for key in whole.weights), job
        assert all(torch.equal(again.model_weights[key], whole.model_weights[key]) for key in whole.weights), job


def _without_our_patch(rank: int, world: int, folder: Path) -> str:
    cell = Cell(precision="bf16", **DISTRIBUTED)
    with cpu_megatron():
        with opened(cell, maker("mars-adamw")) as trainer:
            trainer.advance(1)
            trainer.save(folder)
        with opened(cell, maker("mars-lion")) as trainer:
            with pytest.raises(BaseException) as error:  # noqa: PT011 - torch's CheckpointException is no Exception
                trainer.load(folder)
        return f"{type(error.value).__name__}: {error.value}"


def test_without_our_patch_megatron_refuses_another_optimizers_states(tmp_path: Path) -> None:
    """See test_megatron_resuming.py for what is said with it."""
    for message in run_ranks(2, _without_our_patch, tmp_path):
        assert message.startswith("CheckpointException: ") and "optimizer.rankwise.MARS-lion." in message


def _replicas(rank: int, world: int) -> list[tuple[Any, ...]]:
    with cpu_megatron(), opened(Cell(tp=2, **DISTRIBUTED), maker("ldadam")) as trainer:
        trainer.advance(1)
        state = trainer.optimizer.sharded_state_dict(trainer.sharded_state()["model"], metadata={})
        tensors = [*state["elements"].values(), *state["matrices"].values()]
        assert all(isinstance(tensor, dist_checkpointing.ShardedTensor) for tensor in tensors)
        return [
            (tensor.key, tensor.global_shape, tensor.global_offset, tensor.local_shape)
            for tensor in tensors
            if tensor.replica_id == 0
        ]


def test_every_element_has_one_writer() -> None:
    written: dict[str, torch.Tensor] = {}
    for key, shape, offset, size in (piece for rank in run_ranks(4, _replicas) for piece in rank):
        count = written.setdefault(key, torch.zeros(shape, dtype=torch.int64))
        count[tuple(slice(first, first + length) for first, length in zip(offset, size, strict=True))] += 1
    assert any(".matrix." in key for key in written) and any(".error." in key for key in written)
    for key, count in written.items():
        assert bool((count == 1).all()), key


@pytest.mark.parametrize("label", ["DP2 to TP2"])
def test_mars_without_the_clip_resumes_on_another_layout(folder: Path, label: str) -> None:
    ((whole, again),) = _moved(folder, label, ("mars-m-unclipped",))
    assert largest_gap(again.weights, whole.weights) <= LARGEST_MOVE
