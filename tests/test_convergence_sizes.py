"""docs/sizes.md: differences over sizes and lengths, from results whose answer is known and from those recorded."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.convergence.experiment import Run
from benchmarks.convergence.experiments import CHECK
from benchmarks.convergence.ladder import FIRST
from benchmarks.convergence.ladder_page import ladder_section
from benchmarks.convergence.language_models import ADAMW
from benchmarks.convergence.rates_page import rates_by_size
from benchmarks.convergence.results import Results
from benchmarks.convergence.runner import schedule, train
from benchmarks.convergence.sizes import CELLS, CONTENDERS, Cell
from benchmarks.convergence.sizes_page import (
    differences,
    follows,
    gains,
    sizes_page,
    steps_for,
)
from benchmarks.convergence.variations import BASE, VARIATIONS
from rankwise.launch.optimizer_guide import CHOICES, NOT_MEASURED

DOCS = Path(__file__).resolve().parents[1] / "docs"

SHORT = Run(CHECK.task, "adam", {}, 1e-2, 40, 0)
Loss = Callable[[Cell, str, int], float]


def planted(tmp_path: Path, names: tuple[str, ...], loss: Loss, cells: tuple[Cell, ...] = tuple(CELLS)) -> Results:
    """Results of whole searches, whose best rate is the guess of every contender."""
    results = Results(tmp_path / "none")
    for cell in cells:
        experiment = CELLS[cell]
        for name in names:
            contender = experiment.contender(name)
            trials = [
                experiment.run(contender, setting, exponent, 0)
                for setting in contender.settings
                for exponent in (-1, 0, 1)
            ]
            finals = [experiment.run(contender, contender.settings[0], 0, seed) for seed in experiment.seeds]
            for run in (*trials, *finals):
                off = abs(run.lr / contender.guess - 1.0) + (run.options != contender.settings[0])
                results.add([row(run, loss(cell, name, run.seed) + off)])
    return results


def row(run: Any, loss: float) -> dict[str, Any]:
    fields = {name: getattr(run, name) for name in ("task", "optimizer", "options", "lr", "steps", "seed")}
    where = {"device": "one", "threads": 1, "torch": "2", "python": "3", "rankwise": "0", "date": "2030-01-02"}
    figures = {"validation_loss": loss, "seconds": 2.0 * run.steps, "state_bytes": 80, "parameters": 10}
    return {"run": fields, "diverged": False, **figures, **where}


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    results = planted(tmp_path, ("AdamW", "SOAP"), lambda _, name, seed: seed - 0.05 * (name == "SOAP"))
    for found in differences(tuple(CELLS), "SOAP", results).values():
        assert found.mean == pytest.approx(-0.05) and found.half == pytest.approx(0.0, abs=1e-9)
    assert differences(tuple(CELLS), "Muon", results) == {}


def test_steps_are_read_off_the_power_law_between_neighbours() -> None:
    def loss(steps: float) -> float:
        return 5.0 * steps**-0.2

    known = {steps: loss(steps) for steps in (640, 2550, 10200)}
    for steps in (300, 640, 1000, 2550, 9000, 40000):
        assert steps_for(loss(steps), known) == pytest.approx(steps)
    bent = known | {10200: loss(2550) - 0.01}
    assert steps_for(loss(2550) - 0.01, bent) == pytest.approx(10200), "by the piece it lies on"
    assert steps_for(1.0, {640: 2.0}) is None


def test_the_page_says_what_is_not_there(tmp_path: Path) -> None:
    page = sizes_page(Results(tmp_path))
    assert page.count("**Missing:") == len(CELLS) + len(VARIATIONS)
    assert "--only E9-1.1M" in page and "not run yet" in page


def test_the_page_shows_gains_speed_ups_and_rates(tmp_path: Path) -> None:
    """AdamW's loss falls by the power 0.1 of the steps; SOAP needs half as many."""

    def loss(cell: Cell, name: str, seed: int) -> float:
        return (4.0 + 0.01 * seed) * (cell.all_steps * (2.0 if name == "SOAP" else 1.0)) ** -0.1

    page = sizes_page(planted(tmp_path, ("AdamW", "SOAP"), loss))
    assert "| SOAP | 2.00 | 2.00 | 2.00 (*) | 1.00 at 1.1M |" in page
    rates = rates_by_size(planted(tmp_path, ("AdamW", "MARS-AdamW, gamma 0.025"), loss))
    assert f"| AdamW |{' 0.008 (1) |' * len(CELLS)}" in rates
    assert "| MARS-AdamW, gamma 0.025 | 0.016 (2) |" in rates and f"| Muon |{'  |' * len(CELLS)}" in rates


def test_the_page_of_sizes_is_what_was_recorded() -> None:
    results = Results(DOCS / "data" / "convergence")
    assert (DOCS / "sizes.md").read_text(encoding="utf-8") == sizes_page(results)
    assert len(differences(tuple(CELLS)[:1], "Muon", results)) == 1
    assert len(CONTENDERS) == 13


CONTENDER_OF = {
    "MARS-AdamW": "MARS-AdamW, gamma 0.025",
    "MARS-M": "MARS-M",
    "SONew": "SONew",
    "LDAdam": "LDAdam, rank d/4, buffer int8",
    "MKOR": "MKOR on AdamW",
    "MKOR-Sketch": "MKOR on AdamW, rule sketch",
}


def test_the_gains_of_the_choices_are_those_measured() -> None:
    results = Results(DOCS / "data" / "convergence")
    for spelling, choice in CHOICES.items():
        if spelling != "MARS":
            name = CONTENDER_OF.get(spelling)
            expected = gains(name, results) if name else NOT_MEASURED
            assert choice.gains == expected, f"{spelling}: write it into launch/optimizer_guide.py"


@pytest.mark.parametrize("name", ["Muon", "MKOR on AdamW, rule sketch"])
def test_readme_has_the_gains(name: str) -> None:
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert f"{gains(name, Results(DOCS / 'data' / 'convergence'))} parameters" in readme


def test_readme_has_what_training_takes() -> None:
    cells = [cell for cell in CELLS if cell.parameters == 260_736 and cell.bytes_each < 80]
    found = differences(cells, "Muon", Results(DOCS / "data" / "convergence"))
    short, long = (f"{found[cell].mean:.2f} after {cell.bytes_each}" for cell in cells)
    assert f"{short} bytes of text a parameter and {long} (" in (DOCS.parent / "README.md").read_text(encoding="utf-8")


def test_readme_has_the_shares_of_the_ladders_rung_for_cpus() -> None:
    page = ladder_section(Results(DOCS / "data" / "convergence")).split("### On CPUs")[1]
    shares = [re.search(rf"\| {re.escape(name)} \| (\d+) ± \d+ % \|", page) for name in FIRST[1:]]
    muon, mars, sketch = (share[1] for share in shares if share)
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert f"reach its last loss after {muon}, {mars} and {sketch} % of the steps" in readme


def test_gains_say_which_are_not_settled(tmp_path: Path) -> None:
    def loss(cell: Cell, name: str, seed: int) -> float:
        return 2.0 - (name != "AdamW") * (0.1 + (seed - 2) * (0.5 if cell.parameters > 10**6 else 0.001))

    found = gains("Muon", planted(tmp_path, ("AdamW", "Muon"), loss))
    assert found == "-0.10 at 0.075M, -0.10 at 0.12M, -0.10 at 0.26M, -0.10? at 1.1M"


SIZES = tuple(cell for cell in CELLS if cell.bytes_each == 20)
LENGTHS = tuple(cell for cell in CELLS if cell.bytes_each != 20)


@pytest.mark.parametrize(
    ("cells", "gain", "expected"),
    [
        (tuple(CELLS), 0.05, "**it changes**"),
        ((*SIZES[:2], *LENGTHS), 0.05, "**it changes**"),
        (SIZES, 0.05, "4 of 4 sizes, 0 of 2 lengths yet"),
        ((*SIZES[:1], *LENGTHS), 0.05, "1 of 4 sizes, 2 of 2 lengths yet"),
        (tuple(CELLS), -0.05, "0 of 4 sizes, 0 of 2 lengths"),
    ],
)
def test_a_default_follows_from_two_sizes_and_all_lengths(
    tmp_path: Path, cells: tuple[Cell, ...], gain: float, expected: str
) -> None:
    results = planted(tmp_path, ("Muon", "MARS-M"), lambda _, name, seed: 2.0 - gain * (name == "MARS-M"), cells)
    assert follows("MARS-M", "Muon", results) == expected


def test_a_default_stays_where_the_interval_includes_zero(tmp_path: Path) -> None:
    results = planted(
        tmp_path, ("Muon", "MARS-M"), lambda _, name, seed: 2.0 - (name == "MARS-M") * (0.05 + 0.1 * (seed - 2))
    )
    assert follows("MARS-M", "Muon", results) == "0 of 4 sizes, 0 of 2 lengths"


def test_schedules_warm_up_and_end_at_zero() -> None:
    cosine, wsd = ([schedule(step, 200, shape) for step in range(200)] for shape in ("cosine", "wsd"))
    assert cosine[:10] == wsd[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert set(wsd[9:160]) == {1.0} and wsd[180] == pytest.approx(0.5) and wsd[199] == pytest.approx(1 / 40)
    assert cosine[105] == pytest.approx(0.5) and 0.0 < cosine[199] < 1e-3


def test_the_schedule_of_a_run_is_no_part_of_its_model() -> None:
    rows = [train(replace(SHORT, task={**CHECK.task, **further})) for further in ({}, {"schedule": "wsd"})]
    assert rows[0]["train_loss"] != rows[1]["train_loss"] and rows[1]["run"]["task"]["schedule"] == "wsd"


def test_adamw_that_decays_otherwise_is_adamw() -> None:
    """MARS with nothing to correct stands for it; with decoupled decay it is torch's."""
    (mars,) = (each for each in VARIATIONS if each.name == "E11-cautious")
    contender = mars.contender("AdamW")
    setting = {**contender.settings[0], "weight_decay_method": "decoupled"}
    task = {**BASE.task, "layers": 1, "hidden": 16}
    ours = train(Run(task, contender.optimizer, setting, 4e-3, 12, 0))
    torchs = train(Run(task, "adamw", ADAMW, 4e-3, 12, 0))
    assert ours["validation_loss"] == pytest.approx(torchs["validation_loss"], rel=1e-4)
