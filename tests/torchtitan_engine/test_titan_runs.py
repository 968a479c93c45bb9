"""torchtitan's trainer with our optimizers: however it shares a model out, one rank is followed and a run resumes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from titan_runs import CASES, CELLS, Weights, difference, merged, optimizer, resume, seed, start, train

from rankwise.options.validation import OptionError

OURS = [case for case in CASES if case not in ("adamw", "switched")]
FEW = ["ldadam", "mkor-h"]
IN_CI = ("adamw", *FEW)
NOISE = 10.0
"""How many times as far from one rank as AdamW; under pipelines, which cut batches into micro-batches, or as one rank
that cuts them, too, where that is more."""
BASES = {"deepseek": "experts-one", "llama": "one"}


@cache
def _alone(cell: str, cases: tuple[str, ...]) -> dict[str, Weights]:
    return merged(run_ranks(1, train, CELLS[cell], list(cases), seed(CELLS[cell].model)))


def _together(cell: str, cases: list[str], folder: str = "") -> dict[str, Weights]:
    return merged(run_ranks(CELLS[cell].world, train, CELLS[cell], cases, seed(CELLS[cell].model), folder))


def _follows(cell: str, cases: list[str], found: dict[str, Weights], known: tuple[str, ...]) -> None:
    base = "long-one" if CELLS[cell].length > 32 else BASES[CELLS[cell].model]
    expected = _alone(base, known)
    control = difference(found["adamw"], expected["adamw"])
    assert control < 1e-3
    cut = _alone("micro-one", known) if cell.startswith("pp") else expected
    for case in cases:
        allowed = NOISE * max(control, difference(cut[case], expected[case]))
        assert difference(found[case], expected[case]) <= allowed, case


# --- in CI ------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_follows_one_rank_and_resumes(tmp_path: Path) -> None:
    """Two sharded ranks; then from half way with the same bits, and on one rank."""
    cases, folder = ["adamw", *FEW], str(tmp_path)
    whole = _together("fsdp-2", cases, folder)
    _follows("fsdp-2", cases, whole, IN_CI)
    again = merged(run_ranks(2, resume, CELLS["fsdp-2"], FEW, folder))
    elsewhere = merged(run_ranks(1, resume, CELLS["one"], FEW, folder))
    for case in FEW:
        assert difference(again[case], whole[case]) == 0.0, case
        assert difference(elsewhere[case], whole[case]) <= 5e-5, case


@pytest.mark.exhaustive
def test_stages_follow_one_rank() -> None:
    cases = ["adamw", "mkor-h"]
    _follows("pp-2", cases, _together("pp-2", cases), IN_CI)


def _differs(rank: int, world: int) -> str:
    chosen = optimizer("ldadam")
    chosen.param_groups[0].optimizer_kwargs["rank"] = 4 * (1 - rank)
    with pytest.raises(OptionError) as caught:
        start(CELLS["fsdp-2"], chosen)
    return str(caught.value)


def test_what_one_rank_refuses_ends_all() -> None:
    first, second = run_ranks(2, _differs)
    assert first == second
    assert "rank=0 is invalid" in first and first.endswith("(on rank 1)")


# --- by hand ----------------------------------------------------------------------------------------------------------

MOVES = [("fsdp-2", "hsdp-4"), ("tp-fsdp-4", "fsdp-2"), ("hsdp-4", "one"), ("pp-fsdp-4", "fsdp-2"), ("fsdp-2", "pp-2")]
MOVES += [
    ("ep-fsdp-4", "ep-2"),
    ("ep-2", "experts-one"),
    ("tp-fsdp-4", "tp-fsdp-4"),
    ("pp-2", "pp-2"),
    ("ep-2", "ep-2"),
]
MOVED = ["mars-m", "sonew", "ldadam", "mkor-h", "switched"]
# torch's pipelines rehearse on unwritten memory, and torchtitan counts where its routers send that.
UNLIKE = "experts-pp-2"


@pytest.mark.exhaustive
@pytest.mark.parametrize("cell", [name for name, cell in CELLS.items() if cell.world > 1 and name != UNLIKE])
def test_every_type_follows_one_rank(cell: str) -> None:
    cases = ["adamw", *OURS]
    _follows(cell, cases, _together(cell, cases), tuple(cases))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("before", "after"), MOVES, ids=map("-to-".join, MOVES))
def test_resumes_elsewhere(before: str, after: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    saved = _together(before, MOVED, folder)
    found: dict[str, Any] = merged(run_ranks(CELLS[after].world, resume, CELLS[after], MOVED, folder))
    for case in MOVED:
        assert difference(found[case], saved[case]) <= (0.0 if before == after else 1e-4), case
