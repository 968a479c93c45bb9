"""Nobody reads gradients of main weights after the step: optimizers may use their memory."""

from __future__ import annotations

from typing import Any

import torch
from megatron_cells import DISTRIBUTED, MOE, OVERLAPPED, Cell
from megatron_harness import Result, opened, trained
from megatron_types import maker
from ranks import run_ranks

from megatron_patches.cpu import cpu_megatron

STEPS = 3
CELLS = [
    Cell(**DISTRIBUTED),
    Cell(precision="bf16", **OVERLAPPED),
    Cell(precision="fp16", **DISTRIBUTED),
    Cell(precision="bf16"),
    Cell(precision="bf16", tp=2, sp=True, **MOE, **DISTRIBUTED),
]


def _wrappers(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _spoil(wrapper: Any) -> None:
    inner = wrapper.optimizer
    step = inner.step

    def spoiling() -> None:
        step()
        assert inner.planner.source.spends_gradients
        found = [tensor for group in inner.param_groups for tensor in group["params"] if tensor.grad is not None]
        assert found
        for tensor in found:
            tensor.grad.fill_(torch.nan)

    inner.step = spoiling


def _run(cell: Cell, spoilt: bool) -> Result | None:
    with opened(cell, maker("sonew")) as trainer:
        if spoilt:
            for wrapper in _wrappers(trainer.optimizer):
                _spoil(wrapper)
        return trained(trainer, STEPS)


def _all(rank: int, world: int) -> list[tuple[Result | None, Result | None]]:
    with cpu_megatron():
        return [(_run(cell, False), _run(cell, True)) for cell in CELLS]


def test_what_becomes_of_gradients_matters_to_nothing() -> None:
    for cell, (kept, spoilt) in zip(CELLS, run_ranks(2, _all)[0], strict=True):
        assert kept is not None and spoilt is not None
        assert spoilt.losses == kept.losses and spoilt.norms == kept.norms, cell
        for name, weight in kept.weights.items():
            assert torch.equal(spoilt.weights[name], weight), (cell, name)


def _of_fp32(rank: int, world: int) -> list[bool]:
    with cpu_megatron(), opened(Cell(), maker("sonew")) as trainer:
        trainer.train_step()
        return [wrapper.optimizer.planner.source.spends_gradients for wrapper in _wrappers(trainer.optimizer)]


def test_a_model_s_own_gradients_stay() -> None:
    assert run_ranks(1, _of_fp32) == [[False]]
