"""torchft's replicas, through torchtitan: they die, begin anew and heal, and go on with the bits of one run."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

pytest.importorskip("torchft", reason="torchft is not installed")

from replicas import CASES, NARROW, TOGETHER, WORLD, Options, records, repeated, run  # noqa: E402


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what has other bits."""
    assert found.keys() == expected.keys()

    def same(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, Tensor) else one == other

    return [name for name in expected if not same(found[name], expected[name])]


def ends(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What both replicas have in the end."""
    return [pickle.loads((folder / f"{name}-{rank}.pickle").read_bytes()) for name in ("survivor", "joining")]


@pytest.mark.parametrize("options", [CASES, pytest.param(NARROW, marks=pytest.mark.exhaustive)], ids=["wide", "8-bit"])
def test_a_replica_that_died_heals_with_the_bits_of_one_run(options: Options, tmp_path: Path) -> None:
    run(options, tmp_path)
    expected = run_ranks(WORLD, repeated, options, str(tmp_path))
    for rank in range(WORLD):
        survivor, healed = ends(tmp_path, rank)
        assert differences(healed["states"], survivor["states"]) == []
        assert differences(survivor["states"], expected[rank]) == []
        assert survivor["skipped"]
    steps = records(tmp_path, "survivor", 0)
    assert [record["step"] for record in steps] == list(range(len(steps)))
    assert sum(record["of"] == 2 for record in steps) >= 2 * TOGETHER and any(record["of"] == 1 for record in steps)
