"""Megatron's optimizer steps inside autocast and with another default type: the same bits as without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron_cells import Cell
from megatron_harness import opened
from megatron_types import maker
from ranks import run_ranks
from torch import Tensor

from megatron_patches.cpu import cpu_megatron


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AROUND: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    # Megatron itself makes norms on the default device, whatever the optimizer.
    "default type": _in_float64,
}
CELLS: dict[str, tuple[str, Cell]] = {
    "distributed": ("ldadam", Cell(use_distributed_optimizer=True)),
    "whole, bf16": ("mars-m", Cell(precision="bf16")),
}


def _trained(name: str, cell: Cell, around: Callable[[], Any]) -> dict[str, Tensor]:
    with opened(cell, maker(name)) as trainer:
        step = trainer.optimizer.step

        def surrounded() -> Any:
            with around():
                return step()

        trainer.optimizer.step = surrounded
        for _ in range(3):
            trainer.train_step()
        return {str(key): value.clone() for key, value in trainer.weights()[0].items()}


def _all(rank: int, world: int) -> dict[str, dict[str, dict[str, Tensor]]]:
    with cpu_megatron():
        return {
            label: {key: _trained(name, cell, how) for key, how in AROUND.items()}
            for label, (name, cell) in CELLS.items()
        }


def test_steps_under_megatron_do_not_depend_on_what_surrounds_them() -> None:
    found = run_ranks(2, _all)[0]
    for label, runs in found.items():
        assert runs["nothing"]
        for around, weights in runs.items():
            for key, value in runs["nothing"].items():
                assert torch.equal(weights[key], value), (label, around, key)
