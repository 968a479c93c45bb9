"""``python -m benchmarks gpu-frameworks`` on gloo: real cells, the judge's faults, going on, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from benchmarks.frameworks import queue  # noqa: E402
from benchmarks.frameworks.cells import CELLS, REFERENCES, Cell, cell_of, items_of  # noqa: E402
from benchmarks.frameworks.command import run  # noqa: E402
from benchmarks.frameworks.judge import EXACT, Distance, distance, verdict  # noqa: E402
from benchmarks.frameworks.page import frameworks_section  # noqa: E402
from benchmarks.frameworks.problem import CONTROL, KINDS  # noqa: E402
from benchmarks.frameworks.running import Place, Run, judged  # noqa: E402
from benchmarks.gpu.records import Records  # noqa: E402

DOCS = Path(__file__).resolve().parents[1] / "docs"
GENERATOR = np.random.default_rng(0)
START = {"a": GENERATOR.normal(size=(40, 30)), "b": GENERATOR.normal(size=7)}
STEP = {name: 1e-2 * GENERATOR.normal(size=value.shape) for name, value in START.items()}
END = {name: START[name] + STEP[name] for name in START}


def moved(factor: float, noise: float = 0.0) -> dict[str, np.ndarray]:
    """Weights after a step of a factor's length, with noise relative to it."""
    generator = np.random.default_rng(1)
    return {n: START[n] + factor * STEP[n] * (1 + noise * generator.normal(size=STEP[n].shape)) for n in START}


# --- the judge -------------------------------------------------------------------------------------------------------

NARROW = Distance(0.3, 0.01)
"""What rounding does to a cell in few bits."""


@pytest.mark.parametrize(
    ("found", "response", "follows"),
    [
        (moved(1.0), None, True),
        (moved(1.0, 1e-6), None, True),
        (moved(1.0, 1e-3), None, False),
        (moved(-1.0), None, False),
        (moved(1.0, 0.02), NARROW, True),
        (moved(-1.0), NARROW, False),
        (moved(0.0), NARROW, False),
        (moved(1.5), NARROW, False),
        (moved(np.nan), None, False),
        (moved(np.nan), NARROW, False),
        # A cell in which rounding does as much as a wrong sign can show nothing.
        (moved(1.0, 0.02), Distance(1.0, 0.4), False),
        (moved(1.0), Distance(1.0, 0.4), True),
    ],
    ids=[
        "same",
        "float32",
        "wrong",
        "sign",
        "rounded",
        "sign, narrow",
        "none",
        "longer",
        "nan",
        "nan, narrow",
        "blind",
        "equal",
    ],
)
def test_the_judge_sees_what_is_wrong(found: dict[str, np.ndarray], response: Distance | None, follows: bool) -> None:
    assert verdict(distance(found, END, START), response).follows == follows


def test_one_wrong_element_is_seen_in_float32_alone() -> None:
    """In few bits rounding takes single elements a step aside: there it is no fault."""
    found = moved(1.0)
    found["a"][3, 4] -= 2 * STEP["a"][3, 4]
    assert not verdict(distance(found, END, START), None).follows
    assert verdict(distance(found, END, START), Distance(1.0, 0.05)).follows


def test_what_cannot_be_compared_is_an_error() -> None:
    with pytest.raises(ValueError, match="differ by name"):
        distance({"a": END["a"]}, END, START)
    with pytest.raises(ValueError, match="has not moved"):
        distance(END, START, START)
    result = {"weights": END, "weights checksum": "1"}
    expected = {"start": {"weights": START}, "MARS-M": {"weights": END}}
    assert judged("MARS-M", [result, {"weights checksum": "1"}], expected).surprising is False
    with pytest.raises(ValueError, match="ranks end with different weights"):
        judged("MARS-M", [result, {"weights checksum": "2"}], expected)
    with pytest.raises(ValueError, match="one process has no result"):
        judged("LDAdam", [result], expected)
    rounded = {**result, "weights": moved(1.0, 0.02)}
    assert judged("MARS-M", [{**rounded, "perturbed": moved(3.0)}], expected).surprising, "it can show nothing"
    assert not judged("MARS-M", [{**rounded, "perturbed": moved(1.05)}], expected).surprising


# --- the cells -------------------------------------------------------------------------------------------------------


def test_cells_are_as_many_as_their_keys_and_each_has_its_reference() -> None:
    keys = [cell.key for cell in CELLS]
    assert len(set(keys)) == len(keys)
    assert {cell.reference for cell in CELLS} == set(REFERENCES)
    assert all(cell_of(cell.key) is cell for cell in CELLS)
    assert {cell.front for cell in CELLS} == {"deepspeed", "fsdp", "megatron", "torchtitan"}
    assert {cell.ranks for cell in CELLS} == {2, 3, 4}
    # Every type runs in some cell of every front, at most half of them at once.
    for front in ("deepspeed", "fsdp", "megatron", "torchtitan"):
        of_front = [kinds for cell, kinds in items_of() if cell.front == front]
        left = {"MKOR, sketch"} if front == "megatron" else set()
        assert set(KINDS) - set().union(*of_front) <= left
        assert max(map(len, of_front)) <= 8 and max(cell.seconds for cell in CELLS) <= 60


def test_real_cells_follow_one_process_and_a_further_call_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO-3 and rows of FSDP2 with two types each; then nothing is left, until the code changes."""
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(queue, "items_of", lambda: TWO)
    path = tmp_path / "cells.json"

    def call(again: bool = False, shown: bool = False) -> tuple[int, str]:
        status = run(200.0, (), (), "cpu", 2, 150.0, None, again, shown, path)
        return status, capsys.readouterr().out

    status, said = call()
    assert status == 0 and "6 of 6 figures are within their bounds" in said, said
    content = json.loads(path.read_text())
    rows = content["items"]
    assert [row["status"] for row in rows.values()] == ["done", "done"]
    assert {"device", "torch", "deepspeed", "revision"} <= set(content["about"])
    values = [figure["value"] for row in rows.values() for figure in row["figures"]]
    assert 0 < max(values) < EXACT
    assert "one process" not in call()[1]
    monkeypatch.setattr(queue, "code_of", lambda cell: "other code")
    assert [line.split()[0] for line in call(shown=True)[1].splitlines()] == ["stale", "stale"]


TWO = [
    (cell_of("deepspeed/ZeRO-3, 2 ranks"), (CONTROL, "LDAdam", "MARS-M")),
    (cell_of("fsdp/rows, 2 ranks"), (CONTROL, "LDAdam", "MARS-M")),
]


@pytest.mark.exhaustive
def test_a_wrong_step_of_the_sharded_run_is_red(tmp_path: Path) -> None:
    """Each rank lies about the learning rate of what it is compared with: the cell says so."""
    place = Place("cpu", str(tmp_path))
    cell = cell_of("fsdp/rows, 2 ranks")
    alone = Run(REFERENCES["plain float32"], ("start", "LDAdam"), place)
    ranks = Run(cell, ("MARS-AdamW",), place)
    for each in (alone, ranks):
        while not each.is_over():
            running_seconds = each.seconds
            assert running_seconds < 150, each.ranks.last_words()
    expected: dict[str, Any] = alone.results()[0]
    found = ranks.found({**expected, "MARS-AdamW": expected["LDAdam"]})
    assert [figure.surprising for figure in found.figures] == [True] and not found.problems and not found.left


@pytest.mark.exhaustive
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    cell = next(cell for cell in CELLS if cell.is_killed and cell.front == "fsdp")
    ranks = Run(cell, cell.kinds, Place("cpu", str(tmp_path)))
    while not ranks.is_over():
        assert ranks.seconds < 150, ranks.ranks.last_words()
    figures = ranks.found({}).figures
    assert [figure.surprising for figure in figures] == [False, False], figures


def test_what_was_cut_off_goes_on_with_the_types_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = Records(tmp_path / "cells.json")
    records.open({"device": "here"})
    cell = Cell("fsdp", "rows", 2, {"how": "rows"})
    entry = queue.Entry(cell, (CONTROL, "LDAdam"), "", "unmeasured")
    had = {"name": CONTROL, "value": 1e-6, "unit": "", "low": None, "high": 1.0, "goal": None, "surprising": False}
    records.write(
        entry.key, {"status": "cut", "seconds": 9.0, "planned": 9.0, "figures": [had], "rows": [], "code": ""}
    )
    begun: list[tuple[str, ...]] = []
    monkeypatch.setattr(queue, "Run", lambda cell, kinds, place: begun.append(tuple(kinds)))
    queue._Queue(Place("cpu", str(tmp_path)), records, 60.0, print).start(entry)
    assert begun == [("LDAdam",)] and records.state(entry.key, "") == "unmeasured"


def test_the_page_says_what_has_not_run() -> None:
    section = frameworks_section(None, None)
    assert section.count("| – | – |") == len(CELLS) and "one card: not run yet" in section
    figure = {"name": "LDAdam", "value": 0.5, "unit": "of the largest change", "surprising": True}
    row = {"status": "done", "reason": "", "figures": [figure]}
    content = {
        "about": {"device": "here", "date": "today", "torch": "2"},
        "items": {"deepspeed/ZeRO-2, 2 ranks: types": row},
    }
    assert "| deepspeed | ZeRO-2 | 2 | **0 of 1** | – |" in frameworks_section(content, None)
