"""Checkpoints move between versions of Megatron: the installed one and a checkout, named as in ``make test``."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_cells import DISTRIBUTED, MOE, Cell
from megatron_harness import Result, largest_gap
from megatron_resumes import Job
from megatron_types import TYPES

HERE = Path(__file__).resolve().parent
CHECKOUT = next(filter(None, os.environ.get("RANKWISE_MEGATRON_LM", "").split(os.pathsep)), None)
"""The other version. Which one the path of these tests finds first does not matter."""
CELLS = {
    "fp32": Cell(),
    "distributed bf16": Cell(precision="bf16", **DISTRIBUTED),
    "TP2 SP distributed": Cell(tp=2, sp=True, **DISTRIBUTED),
    "EP2 distributed": Cell(ep=2, **MOE, **DISTRIBUTED),
    "layer-wise bf16": Cell(precision="bf16", optimizer={"rankwise_layer_wise": True}),
}
JOBS: tuple[tuple[str, str], ...] = tuple(
    [(name, "distributed bf16") for name in TYPES] + [("ldadam", label) for label in CELLS if "bf16" not in label]
) + (("mars-m", "layer-wise bf16"),)
# Versions sum in another order here and there; a layout does as much (see test_megatron_checkpoints.py).
ROUNDING = 1e-6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHECKOUT is None, reason="RANKWISE_MEGATRON_LM names no Megatron-LM checkout"),
]


def _under(checkout: str | None, action: str, folder: Path) -> tuple[list[Result], str]:
    """What was found, and the error in its place."""
    path = os.pathsep.join(filter(None, [checkout, str(HERE.parent), str(HERE)]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(HERE / "megatron_resumes.py"), action, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    return (torch.load(folder / action, weights_only=False), "") if done.returncode == 0 else ([], done.stderr)


@functools.cache
def _moved(folder: Path, forth: bool) -> tuple[dict[tuple[str, str], tuple[Result, Result]], str]:
    folder.mkdir()
    jobs: list[Job] = [(name, CELLS[label]) for name, label in JOBS]
    torch.save(jobs, folder / "jobs")
    whole, failure = _under(None if forth else CHECKOUT, "save", folder)
    assert not failure, failure[-6000:]
    again, failure = _under(CHECKOUT if forth else None, "resume", folder)
    return dict(zip(JOBS, zip(whole, again, strict=not failure), strict=not failure)), failure


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("versions")


@pytest.mark.parametrize(("name", "label"), JOBS)
@pytest.mark.parametrize("forth", [True, False], ids=["forth", "back"])
def test_goes_on_under_another_version(folder: Path, name: str, label: str, forth: bool) -> None:
    moved, failure = _moved(folder / str(forth), forth)
    if "has no common.pt" in failure:
        pytest.skip("see test_what_an_older_version_cannot_read_is_named")
    assert not failure, failure[-6000:]
    whole, again = moved[name, label]
    assert again.losses == pytest.approx(whole.losses, rel=1e-5)
    assert largest_gap(again.weights, whole.weights) <= ROUNDING


def test_what_an_older_version_cannot_read_is_named(folder: Path) -> None:
    """Megatron's own optimizers end there, too, in an AttributeError."""
    _, failure = _moved(folder / "False", False)
    written = (folder / "False" / "0" / "common.pt").exists()
    assert ("has no common.pt" in failure) is not written
    assert written or "go on with the version that wrote it, or a later one" in failure
