"""A file of each rank, written with `torch.save` from `optimizer.state_dict()`: right for the same ranks alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from sharded_models import Run
from torch import Tensor

CASES = ("ldadam",)
BEFORE, AFTER = 2, 2


def _write(rank: int, world: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    found = {}
    for case in CASES:
        run = Run(case, f"rows-{world}").train(BEFORE)
        torch.save(run.optimizer.state_dict(), folder / f"{case}-{rank}.pt")
        found[case] = run.train(AFTER).weights()
    return found


def _read(folder: Path, case: str, rank: int) -> dict[str, object]:
    return torch.load(folder / f"{case}-{rank}.pt", weights_only=True)


def _resume(rank: int, world: int, folder: Path) -> dict[str, dict[str, Tensor]]:
    found = {}
    for case in CASES:
        run = Run(case, f"rows-{world}").train(BEFORE)
        run.optimizer.load_state_dict(_read(folder, case, rank))
        found[case] = run.train(AFTER).weights()
    return found


def _refused(rank: int, world: int, folder: Path, files: list[int]) -> list[str]:
    """Messages; training goes on as if nothing had been loaded."""
    messages = []
    for case in CASES:
        run, untouched = (Run(case, f"rows-{world}" if world > 1 else None).train(BEFORE) for _ in range(2))
        with pytest.raises(ValueError) as refused:
            run.optimizer.load_state_dict(_read(folder, case, files[rank]))
        messages.append(str(refused.value))
        expected = untouched.train(AFTER).weights()
        assert all(torch.equal(value, expected[name]) for name, value in run.train(AFTER).weights().items())
    return messages


def test_a_file_of_each_rank(tmp_path: Path) -> None:
    expected = run_ranks(2, _write, tmp_path)
    for found, other in zip(run_ranks(2, _resume, tmp_path), expected, strict=True):
        assert all(torch.equal(found[case][name], other[case][name]) for case in CASES for name in other[case])
    # One rank has its own file: it must not wait for the other.
    for messages in run_ranks(2, _refused, tmp_path, [0, 0]):
        assert all(re.search(r"rank \d of 2 wrote it: with parts .* torch.distributed", text) for text in messages)
    assert all("rank 1 of 2 wrote it" in text for text in _refused(0, 1, tmp_path, [1]))
