"""Other people's suites: the page is that of the results, what fails is explained, and a slice of them runs here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.command import WRONG, torch_rows
from benchmarks.peers.deepspeed_hook import CONTROL, OPTIONS, placed
from benchmarks.peers.expected import counted, expectations, fits, verdict
from benchmarks.peers.page import peers_page
from benchmarks.peers.results import RESULTS, key_of, merge, read
from benchmarks.peers.runner import Suite, collected, outcomes, spread
from benchmarks.peers.torch_checks import CHECKS
from benchmarks.peers.torch_records import RECORDS

ROOT = Path(__file__).resolve().parents[1]
ROWS = read(RESULTS)
SLICE = ("tensor_rate", "sparse_gradients", "hooks_of_dictionaries", "pickled", "unknown_keyword", WRONG)
"""Checks of torch's records that run here; together they take seconds."""


def test_the_page_is_that_of_the_results() -> None:
    """`python -m benchmarks peers` writes it."""
    assert (ROOT / "docs/peers.md").read_text() == peers_page(ROWS)
    assert len({key_of(row) for row in ROWS}) == len(ROWS)


def test_every_expected_failure_has_a_reason_and_is_one() -> None:
    """None stands on the list that no case was seen to need."""
    for each in expectations():
        assert each["reason"].strip() and each["message"] and each["types"] and each["cases"], each
        assert set(each["types"]) <= {*OPTIONS, *RECORDS}
        for case in each["cases"]:
            one = {**each, "cases": [case]}
            assert any(fits(one, row) and verdict(row)[0] == "expected failure" for row in ROWS), one


def test_nothing_unexpected_is_among_the_results() -> None:
    found = [(row["type"], row["case"], row["message"]) for row in ROWS if counted(row)]
    wrong = [verdict(row)[0] for row in ROWS if counted(row)]
    assert [each for each, name in zip(found, wrong, strict=True) if name.startswith("unexpected")] == []


@pytest.mark.parametrize("check", SLICE)
@pytest.mark.parametrize("name", RECORDS)
def test_a_slice_of_the_records_of_torch(name: str, check: str) -> None:
    for row in torch_rows([name], [check]):
        assert verdict(row)[0] in ("passed", "expected failure"), (row["case"], row["message"])


def test_the_results_have_every_record_and_check() -> None:
    seen = {(row["type"], row["case"].partition("[")[0]) for row in ROWS if row["suite"] == "torch"}
    assert seen == {(name, check) for name in RECORDS for check in (*CHECKS, WRONG)}


def test_adam_is_replaced_wherever_a_configuration_has_it() -> None:
    config = {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9], "torch_adam": True}}, "a": 1}
    kept = json.loads(json.dumps(config))
    found = placed(config, "LDAdam")
    assert found["optimizer"] == {"type": "LDAdam", "params": {"lr": 0.1, "rank": 2}} and found["a"] == 1
    assert placed(config, CONTROL)["optimizer"]["params"] == {"lr": 0.1, "torch_adam": True}
    assert config == kept, "tests compare their configurations later"
    for other in ({}, {"optimizer": {"type": "Lamb"}}, {"optimizer": None}):
        assert placed(other, "LDAdam") is other


@pytest.mark.parametrize(
    ("outcome", "message", "found"),
    [
        ("passed", "", "unexpected pass"),
        ("failed", "KeyError: 'exp_avg_sq'", "expected failure"),
        ("hung", "no end within 5 s", "unexpected failure"),
        ("failed", "RuntimeError: something else", "unexpected failure"),
        ("skipped", "", "skipped"),
    ],
)
def test_what_is_expected_is_told_from_what_is_not(outcome: str, message: str, found: str) -> None:
    listed = [{"suite": "s", "types": ["MKOR"], "cases": ["a.py::f*"], "message": "exp_avg_sq", "reason": "why"}]
    row = {"suite": "s", "type": "MKOR", "case": "a.py::f[1-x]", "outcome": outcome, "message": message}
    assert verdict(row, listed)[0] == found
    other = {**row, "case": "a.py::g"}
    assert verdict(other, listed)[0] == {"passed": "passed", "skipped": "skipped"}.get(outcome, "unexpected failure")


def test_cases_are_spread_over_the_parameters_of_a_function() -> None:
    cases = [f"a.py::f[{index}]" for index in range(5)] + ["a.py::g"]
    assert spread(cases, 1) == ["a.py::f[0]", "a.py::g"]
    assert spread(cases, 3) == ["a.py::f[0]", "a.py::f[2]", "a.py::f[4]", "a.py::g"]


_THEIRS = """
import os, time, pytest

def test_good(): pass
def test_bad(): assert 1 == 2, "so it is"
def test_hangs(): time.sleep(600 * (os.environ.get("RANK", "0") == "0"))
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
@pytest.mark.parametrize("place", [0, 1])
def test_hook(place):
    import their_place
    their_place.mark() if place else None
"""
_HOOK = """
import os, pathlib
def mark(): pathlib.Path(os.environ["RANKWISE_PEER_MARKS"]).touch()
"""


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_cases_run_apart_from_what_hangs(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(_THEIRS)
    (tmp_path / "their_place.py").write_text(_HOOK)
    paths = {"PYTHONPATH": str(tmp_path)}
    suite = Suite("theirs", tmp_path, ["test_theirs.py"], "their_place", paths, limit=6.0, ranks=ranks)
    cases = collected(suite)
    assert len(cases) == 6
    found: dict[str, Any] = {row["case"].partition("::")[2]: row for row in outcomes(suite, cases)}
    ends = {name: (row["outcome"], row["placed"]) for name, row in found.items()}
    assert ends == {
        "test_good": ("passed", False),
        "test_bad": ("failed", False),
        "test_hangs": ("hung", False),
        "test_skipped": ("skipped", False),
        "test_hook[0]": ("passed", False),
        "test_hook[1]": ("passed", True),
    }
    assert "so it is" in found["test_bad"]["message"] and "no end within 6 s" in found["test_hangs"]["message"]


def test_rows_are_merged_by_what_they_are_about(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    row = {"suite": "s", "type": "MKOR", "case": "c", "outcome": "failed"}
    merge(path, [row, {**row, "case": "b"}])
    merge(path, [{**row, "outcome": "passed"}])
    assert [(each["case"], each["outcome"]) for each in read(path)] == [("b", "failed"), ("c", "passed")]
