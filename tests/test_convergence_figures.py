"""Figures of docs/evidence.md that are no contest: MKOR's direction, memory, cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.convergence import directions
from benchmarks.convergence.costs import cost_claims, cost_section, measure_memory, memory_section
from benchmarks.convergence.experiments import CHECK
from benchmarks.convergence.rates_page import measured_ratios, rates_page
from benchmarks.convergence.results import Results
from benchmarks.convergence.tasks import make_task
from rankwise.launch.optimizer_guide import CHOICES, NOT_MEASURED

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_directions_leave_the_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shadows see its steps and change none; the gradient's own direction is the gradient's."""
    monkeypatch.setattr(directions, "SHADOWS", {name: directions.SHADOWS[name] for name in ("gradient", "MKOR", "Eva")})
    whole = directions._dense

    def looked(task: Any, layers: Any) -> list[Any]:
        whole(task, layers)
        return identities(layers)

    monkeypatch.setattr(directions, "_dense", looked)
    trained: list[torch.Tensor] = []

    def kept(*arguments: Any) -> Any:
        task = make_task(*arguments)
        trained.append(task.model[0].weight)
        return task

    monkeypatch.setattr(directions, "make_task", kept)
    rows = directions.measure_directions(12, 0, 1e-2, CHECK.task)
    monkeypatch.setattr(directions, "SHADOWS", {})
    monkeypatch.setattr(directions, "_SHARES", ())
    assert directions.measure_directions(12, 0, 1e-2, CHECK.task) == []
    assert torch.equal(*trained)
    cosines = [row["cosine"] for row in rows if row["name"] == "gradient"]
    assert cosines == pytest.approx([1.0] * len(cosines)) and len(rows) == 3 * len(cosines) == 3 * 4 * 7
    assert all(0.0 < row["cosine"] for row in rows if row["name"] == "MKOR"), "it descends"
    assert (
        "| gradient | 1.00 | 1.00 |" in directions.directions_section(rows) and directions.directions_section([]) == ""
    )


def identities(layers: Any) -> list[Any]:
    shapes = [layer.grad.shape for layer in layers]
    facts = dict.fromkeys(("input_top", "input_mean", "output_top", "output_mean"), 0.5)
    return [directions._Dense(torch.eye(columns), torch.eye(rows), facts) for rows, columns in shapes]


# --- what they keep and take -----------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_ranks_hold_what_was_predicted() -> None:
    rows = measure_memory("tiny")
    assert [row["name"] for row in rows][:2] == ["MARS-AdamW", "MARS-Lion"] and rows[-1]["name"] == "MKOR"
    check_memory(rows)


def test_recorded_ranks_held_what_was_predicted() -> None:
    rows = json.loads((DOCS / "data" / "convergence" / "memory.json").read_text())
    check_memory(rows)
    section = memory_section(rows)
    assert "| AdamW, fp32 | 8.00 | 4.00 | 4.00 | 1.00 | 1.00 |\n" in section
    assert "| MARS-AdamW | 11.99 | 5.99 | 5.99 |" in section


def check_memory(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["held"] == pytest.approx(row["predicted_2_1"], rel=5e-3), row["name"]
        assert row["predicted_8_1"] < row["predicted_2_1"] < row["predicted_1_0"]


def test_costs_are_shares_of_a_whole_step() -> None:
    where = {"device": "one", "torch": "2", "date": "2030-01-02", "parameters": 10**6, "batch": 9.0}
    section = cost_section([{**where, "name": "AdamW", "step": 1.0}, {**where, "name": "MARS", "step": 3.0}])
    assert "| AdamW | 1000.0 | 10.00% | +0.00% |\n| MARS | 3000.0 | 25.00% | +20.00% |" in section
    ldadam = {"name": "LDAdam, rank 16", "parameters": 10, "predicted_1_0": 54}
    (row,) = cost_claims([ldadam], [])
    assert row[3:] == ("5.40 bytes per parameter", "5.4", "**holds**")
    assert cost_claims([{**ldadam, "predicted_1_0": 60}], [])[0][-1] == "**does not hold**"
    assert cost_claims([], []) == []
    assert "Nothing of this" in cost_section([]) and "Nothing of this" in memory_section([])


def test_the_page_of_rates_is_what_was_recorded() -> None:
    assert (DOCS / "rates.md").read_text(encoding="utf-8") == rates_page(Results(DOCS / "data" / "convergence"))
    assert "not measured yet" in rates_page(Results(DOCS / "nowhere"))


def test_the_rates_of_the_choices_are_those_measured() -> None:
    measured = measured_ratios(Results(DOCS / "data" / "convergence"))
    assert {"MARS-AdamW", "MKOR", "SONew"} <= measured.keys()
    for spelling, choice in CHOICES.items():
        expected = measured.get(spelling, {NOT_MEASURED})
        assert set(choice.rate.split(" to ")) == expected, f"{spelling}: docs/rates.md has {expected}"
