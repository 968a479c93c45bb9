"""Stock Megatron in every layout follows one process: the ground the plugin's own Megatron tests stand on.

Tolerances are relative to the largest change of a weight over the run. Measured over five steps in fp32: SGD 1e-5 at
most, which is one rounding of one weight; Adam 1.1e-4, because it divides small gradients by their own rounding.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import random
from megatron.core.transformer import torch_norm
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron_cells import BIASED, DISTRIBUTED, MOE, OVERLAPPED
from megatron_harness import Cell, Result, largest_gap, opened, run_cells, trained
from megatron_weights import main_weight, reduced_gradient
from ranks import run_ranks
from torch import Tensor

from megatron_patches.cpu import cpu_megatron

STEPS = 5
SGD: dict[str, Any] = {"optimizer": "sgd", "sgd_momentum": 0.9}
DEEP: dict[str, Any] = {"layers": 4}

REFERENCES = [Cell(), Cell(tied=True), Cell(**BIASED), Cell(**DEEP), Cell(**MOE)]
LAYOUTS = [
    Cell(),
    Cell(**DISTRIBUTED),
    Cell(**OVERLAPPED),
    Cell(overlap_grad_reduce=True, bucket_size=5000),
    Cell(recompute=True, microbatches=4, **OVERLAPPED),
    Cell(tp=2),
    Cell(tp=2, sp=True),
    Cell(tp=2, sp=True, recompute=True, **BIASED),
    Cell(tp=2, tied=True),
    Cell(pp=2),
    Cell(pp=2, tied=True, microbatches=4),
    Cell(pp=2, vpp=2, microbatches=4, **DEEP),
    Cell(pp=2, vpp=2, microbatches=4, **DEEP, **OVERLAPPED),
    Cell(ep=2, **MOE),
    Cell(ep=2, **MOE, **OVERLAPPED),
    Cell(tp=2, sp=True, **MOE),
]
WITHOUT_DISTRIBUTED = [cell for cell in LAYOUTS if not cell.use_distributed_optimizer]


def of_one_process(cell: Cell) -> Cell:
    """The cell that trains the same model in one process."""
    kept = ("swiglu", "gqa", "tied", "layers", "moe", "optimizer")
    return Cell(**{name: getattr(cell, name) for name in kept})


@cache
def one_process(sgd: bool) -> dict[str, tuple[Result, float]]:
    """Results of one process, and the largest change of a weight, by cell."""
    cells = [replace(cell, optimizer=SGD if sgd else {}) for cell in REFERENCES]
    starts = run_cells(1, cells, steps=0)
    ends = run_cells(1, cells, steps=STEPS)
    return {
        str(cell): (end, largest_gap(end.weights, start.weights))
        for cell, start, end in zip(cells, starts, ends, strict=True)
    }


@cache
def two_ranks(sgd: bool) -> dict[Cell, Result]:
    cells = WITHOUT_DISTRIBUTED if sgd else LAYOUTS
    runs = run_cells(2, [replace(cell, optimizer=SGD if sgd else {}) for cell in cells], steps=STEPS)
    return dict(zip(cells, runs, strict=True))


def check(cell: Cell, sgd: bool, tolerance: float) -> None:
    result = two_ranks(sgd)[cell]
    reference, change = one_process(sgd)[str(replace(of_one_process(cell), optimizer=SGD if sgd else {}))]
    assert change > 1e-3
    assert largest_gap(result.weights, reference.weights) / change < tolerance
    assert largest_gap(result.weights, result.model_weights) == 0.0
    assert result.replica_gap == 0.0
    assert result.losses == pytest.approx(reference.losses, abs=3e-6)
    assert result.norms == pytest.approx(reference.norms, rel=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", WITHOUT_DISTRIBUTED, ids=str)
def test_sgd_follows_one_process(cell: Cell) -> None:
    check(cell, sgd=True, tolerance=3e-5)


@pytest.mark.parametrize("cell", LAYOUTS, ids=str)
def test_adam_follows_one_process(cell: Cell) -> None:
    check(cell, sgd=False, tolerance=3e-4)


def test_overlap_has_many_buckets() -> None:
    buckets = {cell: result.buckets for cell, result in two_ranks(False).items()}
    assert buckets[Cell(**DISTRIBUTED)] == 1
    assert buckets[Cell(**OVERLAPPED)] > 4
    assert buckets[Cell(ep=2, **MOE, **OVERLAPPED)] > 4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_close(precision: str) -> None:
    cells = [
        Cell(precision=precision, **extra)
        for extra in ({}, DISTRIBUTED, OVERLAPPED, {"tp": 2, "sp": True}, {"pp": 2}, {"ep": 2, **MOE})
    ]
    for cell, result in zip(cells, run_cells(2, cells, steps=STEPS), strict=True):
        reference, change = one_process(False)[str(of_one_process(cell))]
        assert None not in result.norms
        assert result.losses == pytest.approx(reference.losses, abs=0.03)
        assert result.replica_gap == 0.0
        # The model is the rounded main weights, so both are there and told apart.
        assert 0.0 < largest_gap(result.weights, result.model_weights) < 0.02
        mean = sum((result.weights[k] - v).abs().sum().item() for k, v in reference.weights.items())
        assert mean / sum(v.numel() for v in reference.weights.values()) < 0.05 * change


# --- what the harness offers besides whole runs -----------------------------------------------------------------------


def _gradients(rank: int, world: int, cells: list[Cell]) -> list[Any]:
    """Unsharded gradients of the first step, unsharded weights before and after it, and the norm."""
    found = []
    with cpu_megatron():
        for cell in cells:
            with opened(cell) as trainer:
                seen: list[Any] = [trainer.weights()]
                _, norm = trainer.train_step(lambda t, seen=seen: seen.append(t.weights(reduced_gradient)))
                found.append((seen[0], seen[1], trainer.weights(main_weight), norm))
    return found


def test_gradients_are_whole() -> None:
    """SGD's first step moves the weights by the clipped gradients, in every layout alike."""
    layouts: list[dict[str, Any]] = [{}, {"tp": 2, "sp": True}, {"pp": 2, "tied": True}, {"ep": 2, **MOE}]
    cells = [Cell(optimizer={**SGD, "weight_decay": 0.0}, **extra) for extra in layouts]
    for (start, _), (gradients, gap), (end, _), norm in run_ranks(2, _gradients, cells)[0]:
        total = torch.stack([gradient.pow(2).sum() for gradient in gradients.values()]).sum().sqrt().item()
        assert total == pytest.approx(norm, rel=1e-5)
        assert gap == 0.0
        for name, gradient in gradients.items():
            # The scheduler's first rate, and weight decay of 0.1 on matrices.
            decayed = gradient / max(1.0, norm) + (0.1 * start[name] if start[name].dim() > 1 else 0.0)
            torch.testing.assert_close(end[name], start[name] - 5e-3 * decayed, rtol=0, atol=2e-7)


def test_gradients_are_whole_under_the_distributed_optimizer() -> None:
    scaled = Cell(precision="fp16", **OVERLAPPED)
    whole, split, half = run_ranks(2, _gradients, [Cell(), Cell(**OVERLAPPED), scaled])[0]
    assert largest_gap(split[1][0], whole[1][0]) < 1e-6
    assert 0.0 < largest_gap(half[1][0], whole[1][0]) < 1e-2


def _saved_and_resumed(rank: int, world: int, folder: Path, cell: Cell, other: Cell) -> list[Any]:
    with cpu_megatron():
        with opened(cell) as trainer:
            trained(trainer, 2)
            trainer.save(folder)
            results = [trained(trainer, 2)]
        for resumed in (cell, other):
            with opened(resumed) as trainer:
                trainer.load(folder)
                results.append(trained(trainer, 2))
    return results


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_resumes(tmp_path: Path, precision: str) -> None:
    """Exactly in the same layout, to rounding in another one."""
    cell, other = Cell(precision=precision), Cell(precision=precision, tp=2, sp=True)
    straight, same, moved = run_ranks(2, _saved_and_resumed, tmp_path, cell, other)[0]
    assert largest_gap(same.weights, straight.weights) == 0.0
    assert same.losses == straight.losses
    assert moved.losses == pytest.approx(straight.losses, abs=3e-6 if precision == "fp32" else 0.02)


# --- the CPU scope ----------------------------------------------------------------------------------------------------

TOUCHED = (
    torch.cuda,
    torch.cuda.random,
    torch.cuda.nvtx,
    torch.autograd,
    random,
    torch_norm.WrappedTorchNorm,
    moe_utils,
    token_dispatcher,
    filesystem_async,
)


def surroundings() -> list[dict[str, Any]]:
    return [dict(vars(owner)) for owner in TOUCHED]


@pytest.mark.parametrize("fails", [False, True])
def test_the_scope_leaves_nothing_behind(fails: bool) -> None:
    before, filters = surroundings(), list(random.logging.getLogger(random.__name__).filters)
    with pytest.raises(KeyError) if fails else cpu_megatron():
        with cpu_megatron(), cpu_megatron():
            assert torch.ones(1, device="cuda").type() == "torch.cuda.FloatTensor"
            assert torch.ones(1, device="cuda", dtype=torch.bfloat16).cuda().to("cuda").device.type == "cpu"
            assert torch.cuda.current_device() == torch.device("cpu")
            if fails:
                raise KeyError
    assert surroundings() == before
    assert random.logging.getLogger(random.__name__).filters == filters
    assert torch.ones(1).type() == "torch.FloatTensor"
    assert not torch.cuda.is_available() or torch.ones(1, device="cuda").is_cuda
    compiled = torch.compile(lambda x: x + 1, backend=_counting)
    compiled(torch.ones(1))
    assert _counting.calls == 1, "torch.compile stays off"
    _counting.calls = 0
    torch.compiler.reset()


def _counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    _counting.calls += 1
    return graph.forward


_counting.calls = 0


def test_importing_changes_nothing() -> None:
    """Importing the module neither replaces anything nor imports Megatron."""
    program = (
        "import sys, torch\n"
        "before = dict(vars(torch.cuda))\n"
        "import megatron_patches.cpu\n"
        "assert dict(vars(torch.cuda)) == before\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'megatron']\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_layers_may_be_imported_after_process_groups_are_made() -> None:
    """They are compiled while they are imported, from a list the compiler draws up anew for new process groups."""
    program = (
        "import torch, torch.distributed as dist, megatron_patches.cpu as cpu\n"
        "with cpu.cpu_megatron():\n"
        "    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "    assert torch.compile(lambda x: x + 1)(torch.ones(1)) == 2\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, cwd=Path(__file__).parents[2])
