"""E13: its rungs, the queue, runs put aside and beside each other, graphs, the text, and the page."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import os
import resource
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from graph_recorder import Recorder
from typer.testing import CliRunner

from benchmarks.convergence import corpus, queue, runner, session, tasks
from benchmarks.convergence.commands import app
from benchmarks.convergence.corpus import SOURCES, Source, build, load
from benchmarks.convergence.experiment import Contender, Run
from benchmarks.convergence.experiments import CHECK, chosen
from benchmarks.convergence.ladder import ANCHOR, CONTENDERS, FIRST, LARGEST, RUNGS, STEADY, experiment_of
from benchmarks.convergence.ladder_page import ladder_section, share_of_steps
from benchmarks.convergence.language_models import E3
from benchmarks.convergence.optimizers import make_optimizer
from benchmarks.convergence.packed_text import pack, unpack
from benchmarks.convergence.queue import expected_seconds, missing_rows, queued, work_beside
from benchmarks.convergence.results import Results
from benchmarks.convergence.runner import Place, train
from benchmarks.convergence.search import known_figures, missing_at_once, next_exponent
from benchmarks.convergence.sizes import CELLS
from benchmarks.convergence.step_times import measure_times
from benchmarks.gpu.whole_models import LanguageModel
from rankwise.launch.data import Corpus

NOTHING = Results(Path("nowhere"))
LOWEST = {rung.name: experiment_of(rung, NOTHING) for rung in RUNGS}
SMALL = {"layers": 1, "hidden": 16, "heads": 2, "window": 8, "batch": 2}


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Corpus:
    tokens = np.random.default_rng(0).integers(0, 256, 2000).astype(np.uint8)
    found = Corpus(tokens[:1500], tokens[1500:], 256, 1.0, tmp_path)
    monkeypatch.setattr(tasks, "packaged_text", lambda name, kind: found)
    monkeypatch.setattr(tasks, "text", lambda: replace(found, vocab_size=257))
    monkeypatch.setattr(tasks.Decoder, "validation_windows", 4)
    monkeypatch.setattr(tasks.LanguageModel, "validation_windows", 4)
    return found


def row(run: Run, loss: float = 1.0, **further: Any) -> dict[str, Any]:
    where = {"device": "one", "threads": 1, "torch": "2", "python": "3", "rankwise": "0", "date": "2030-01-02"}
    fields = {name: getattr(run, name) for name in ("task", "optimizer", "options", "lr", "steps", "seed")}
    figures = {"validation_loss": loss, "seconds": 30.0, "state_bytes": 80, "parameters": 10, "curve": [1.0] * 20}
    return {"run": fields, "diverged": False, **figures, **where, **further}


def searched(results: Results, names: tuple[str, ...] = CONTENDERS, shift: int = 0) -> Results:
    """The searches up to 4 M are over: the best rate is the guess, or others for AdamW."""
    for rung in (rung for rung in RUNGS if rung.searched):
        experiment = experiment_of(rung, results)
        for contender in map(experiment.contender, names):
            best = shift if contender.name == "AdamW" else 0
            for exponent in range(min(best - 1, -1), max(best + 1, 1) + 1):
                run = experiment.run(contender, contender.settings[0], exponent, 0)
                results.add([row(run, 1.0 + abs(exponent - best))])
    return results


# --- rungs and the queue ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: f"{rung.name}")
def test_a_rungs_model_has_its_parameters(rung: Any) -> None:
    with torch.device("meta"):
        model = LanguageModel(tasks.shape_of(rung.layers, rung.hidden, rung.heads, rung.window, rung.vocabulary))
    assert sum(parameter.numel() for parameter in model.parameters()) == rung.parameters
    tokens = rung.batch * rung.window
    assert rung.batch % 16 == rung.batch % rung.parts == 0 and rung.steps * tokens == pytest.approx(
        rung.each * rung.parameters, rel=1e-3
    )
    grown = tokens / (64 * 256) / (rung.parameters / RUNGS[0].parameters) ** 0.5
    assert grown == pytest.approx(1.0, abs=0.05), "with the square root of the parameters"


def test_rates_are_carried_up_once_they_are_known() -> None:
    results = Results(Path("nowhere"))
    assert not LOWEST["E13-16M"].contenders and len(chosen("E13", results)) == len(RUNGS)
    searched(results, ("AdamW", "SOAP"), shift=2)
    large = {rung.name: experiment_of(rung, results) for rung in RUNGS}
    assert [one.name for one in large["E13-16M-5"].contenders] == ["AdamW", "AdamW" + STEADY, "SOAP"]
    assert [one.name for one in large["E13-124M"].contenders] == ["AdamW"]
    guess = LOWEST[ANCHOR.name].contender("AdamW").guess
    assert LOWEST["E13-1M"].contender("AdamW").guess == 2 * guess, "the search begins lower where models are wider"
    assert large["E13-16M"].contender("AdamW").guess == guess * 4 / 2
    assert large["E13-124M"].contender("AdamW").guess == guess * 4 / 3
    (steady,) = large["E13-16M"].contender("AdamW" + STEADY).settings
    assert steady["weight_decay"] == pytest.approx(0.2)
    # One run each, which is the trial and the seed.
    assert [next_exponent(figures, 1) for figures in ({}, {0: 1.0})] == [0, None]
    assert [run.seed for run in missing_at_once(large["E13-16M"], large["E13-16M"].contenders[0], results)] == [1]


def test_ranks_of_ldadam_follow_the_width() -> None:
    results = searched(Results(Path("nowhere")))
    ranks = [
        experiment_of(rung, results).contender("LDAdam, rank d/4, buffer int8").settings[0]["rank"]
        for rung in RUNGS
        if not rung.names
    ]
    assert ranks == [32, 64, 128, 128, 16]


def test_the_first_trials_can_be_run_at_once() -> None:
    adamw, one = LOWEST["E13-1M"], LOWEST["E13-1M"].contenders[0]
    results = Results(Path("nowhere"))
    first = list(missing_at_once(adamw, one, results))
    assert [run.lr / one.guess for run in first] == [1.0, 0.5, 2.0]
    results.add([row(first[2], 0.5)])
    assert list(missing_at_once(adamw, one, results)) == first[:2], "whichever ends first"
    results.add([row(run, 1.0) for run in first[:2]])
    assert [run.lr / one.guess for run in missing_at_once(adamw, one, results)] == [4.0]


def test_the_queue_goes_by_worth() -> None:
    results = Results(Path("nowhere"))
    others = [CELLS[next(iter(CELLS))]]
    experiments = [*others, *LOWEST.values()]

    def stages() -> list[tuple[str, int]]:
        found = [(entry.experiment.name, entry.run.seed) for entry in queued(experiments, results)]
        return [key for key, _ in itertools.groupby(found)]

    cheap = [("E13-1M", 0), ("E13-4M", 0)]
    assert stages() == [*cheap, *cheap, ("E9-0.075M", 0), ("E13-0.3M", 0)]
    first = [entry.contender for entry in queued(experiments, results)]
    assert first[:12] == [name for name in FIRST for _ in range(3)] == first[12:24], "before the trials of the others"
    searched(results)
    small = [(name, seed) for name in ("E13-1M", "E13-4M") for seed in (1, 2, 3)]
    more = [(name, seed) for name in ("E13-4M", "E13-1M") for seed in (2, 3)]
    once = [(name, 1) for name in ("E13-1M", "E13-4M", "E13-16M-5", "E13-124M")]
    last = [("E13-0.3M", seed) for _ in CONTENDERS for seed in (1, 2, 3)]
    assert stages() == [*small, *once, *more, ("E13-16M", 1), ("E9-0.075M", 0), *last], "0.3 M each to its end"
    assert len([e for e in queued(experiments, results) if e.experiment.name == "E13-124M"]) == len(LARGEST)


def test_a_short_session_ends_with_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many runs as the first four have at 1 M, all of their seeds are there."""
    monkeypatch.setattr(queue, "Worker", Here)
    results, needed = Results(tmp_path), len(FIRST) * 6
    experiment = LOWEST["E13-1M"]
    guesses = {str(one.settings[0]): one.guess for one in experiment.contenders}

    def task(run: Run, place: Place) -> dict[str, Any]:
        return row(run, 1.0 + abs(math.log2(run.lr / guesses[str(run.options)])))

    lines = work_beside(list(LOWEST.values()), results, Place(), 1, task=task)
    assert len([next(lines) for _ in range(needed)]) == needed
    assert all(len(known_figures(experiment, experiment.contender(name), results)) == 3 for name in FIRST)


def test_what_a_run_takes_is_that_of_its_like() -> None:
    experiment, results = LOWEST["E13-4M"], Results(Path("nowhere"))
    run = experiment.run(experiment.contenders[0], experiment.contenders[0].settings[0], 0, 7)
    planned = expected_seconds(run, results, "one")
    assert planned == pytest.approx(2490 * (6 * 4080384 * 128 * 256 / 2e14 + 6e-3))
    results.add([row(replace(run, seed=seed), seconds=seconds) for seed, seconds in ((0, 11.0), (1, 13.0))])
    assert expected_seconds(run, results, "one") == 12.0 and expected_seconds(run, results, "two") == planned
    assert np.isnan(expected_seconds(E3.run(E3.contenders[0], {}, 0, 0), results, "one"))


def test_what_is_missing_is_listed_with_its_seconds() -> None:
    lines = list(missing_rows(NOTHING, "one"))
    assert len(lines) == 5 * len(CONTENDERS) + len(LARGEST) + 1
    assert lines[0].startswith("E13-1M AdamW: 6 runs of ") and "E13-124M MARS-M: 1 run of " in "\n".join(lines)
    assert "at the rate that E13-4M finds" in lines[18] and lines[-1].endswith("less with some side by side")
    results = searched(Results(Path("nowhere")))
    assert next(missing_rows(results, "one")).startswith("E13-1M AdamW: 3 runs of 30 s")


# --- runs that are put aside -----------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass with every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now

    perf_counter = monotonic


OTHERS = (
    Contender("MKOR and Muon", "mkor and muon", 2e-2, ({"momentum": 0.9, "weight_decay": 0.1},)),
    E3.contender("MKOR-H on AdamW"),
)


def put_aside(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> tuple[dict[str, Any], int]:
    """A run in sessions of so many steps, and how many there were."""
    for session_number in itertools.count(1):
        with monkeypatch.context() as patch:
            patch.setattr(runner, "time", Clock())
            found = train(run, Place(end=steps + 2.5, folder=folder, every=1e9))
        if found is not None:
            return found, session_number
        torch.manual_seed(session_number)  # what else the process has done
    raise AssertionError


@pytest.mark.parametrize(
    "contender", [*LOWEST["E13-1M"].contenders, *OTHERS], ids=lambda contender: f"{contender.name}"
)
@pytest.mark.usefixtures("text")
def test_a_run_goes_on_bit_for_bit(contender: Contender, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = dict(contender.settings[0]) | ({"rank": 4} if "rank" in contender.settings[0] else {})
    run = Run({**RUNGS[0].task, **SMALL}, contender.optimizer, setting, contender.guess, 12, 1)
    whole = train(run)
    cut, sessions = put_aside(run, tmp_path, monkeypatch, 5)
    assert sessions > 2 and len(list(tmp_path.iterdir())) == 1, "it is deleted once the row is written"
    assert whole is not None and not whole["diverged"]
    for figure in ("validation_loss", "curve", "state_bytes"):
        assert cut[figure] == whole[figure]


@pytest.mark.parametrize("contender", CHECK.contenders, ids=lambda contender: contender.name)
def test_epochs_go_on_where_they_were(contender: Contender, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = replace(CHECK.run(contender, contender.settings[0], 0, 1), steps=24)  # an epoch has 18
    cut, sessions = put_aside(run, tmp_path, monkeypatch, 10)
    whole = train(run)
    assert whole is not None and sessions > 2 and cut["train_loss"] == whole["train_loss"]


def test_what_cannot_be_saved_is_run_at_once(tmp_path: Path) -> None:
    """K-FAC has no dictionary of states, and factors of gradients are in none."""
    for optimizer, options in (("kfac", {}), ("gradient factors", {"betas": (0.9, 0.95), "weight_decay": 0.1})):
        run = Run(CHECK.task, optimizer, options, 1e-3, 6, 1)
        assert train(run, Place(end=time.monotonic(), folder=tmp_path)) is not None


@pytest.mark.usefixtures("text")
def test_a_run_is_saved_on_its_way_and_another_runs_file_is_not_taken(tmp_path: Path) -> None:
    run = Run({**RUNGS[0].task, **SMALL}, "adamw", {}, 1e-3, 6, 1)
    place = Place(folder=tmp_path, every=0.0)
    saved: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        whole = runner._Course.save
        patch.setattr(runner._Course, "save", lambda course, path: (saved.append(course.step), whole(course, path)))
        train(run, place)
    assert saved == [0, 1, 2, 3, 4, 5]
    (path,) = [place.file(run)]
    path.write_bytes(b"broken")
    again = train(run, place)
    assert again is not None and again["curve"] == train(run)["curve"]
    others = {place.file(one) for one in (run, replace(run, seed=2), replace(run, lr=2e-3), replace(run, steps=7))}
    assert len(others) == 4 and Place(torch.device("meta"), folder=tmp_path).folder == tmp_path


@pytest.mark.usefixtures("text")
def test_a_run_that_another_process_does_is_left_to_it(tmp_path: Path) -> None:
    run, place = Run({**RUNGS[0].task, **SMALL}, "adamw", {}, 1e-3, 6, 1), Place(folder=tmp_path)
    with runner._claimed(place.file(run)) as is_ours:
        assert is_ours and train(run, place) is None and train(replace(run, seed=2), place) is not None
    assert train(run, place) is not None and not list(tmp_path.iterdir())


def test_a_lock_that_its_owner_removed_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, locks = tmp_path / "run.pt", fcntl.flock

    def late(lock: Any, how: int) -> None:
        """The owner ends, and another process claims the run, between the opening of the file and its lock."""
        monkeypatch.undo()
        path.with_suffix(".lock").unlink()
        another = claims.enter_context(path.with_suffix(".lock").open("w"))
        locks(another, how)
        locks(lock, how)

    with ExitStack() as claims:
        monkeypatch.setattr(fcntl, "flock", late)
        with runner._claimed(path) as is_ours:
            assert not is_ours


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_broken_device_is_no_divergence(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: Any, closure: Any = None) -> None:
        raise error("the device is gone")

    monkeypatch.setattr(torch.optim.Adam, "step", breaks)
    with pytest.raises(error):
        train(Run(CHECK.task, "adam", {}, 1e-2, 3, 0))


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (torch.linalg.LinAlgError("singular"), True),
        (RuntimeError("MKOR: the factors of a were not finite 10 factor steps in a row."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
    ],
)
def test_a_step_that_fails_is_no_divergence_unless_it_says_so(
    error: RuntimeError, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(CHECK.task, "adam", {}, 1e-2, 3, 0)

    def breaks(self: Any, closure: Any = None) -> None:
        raise error

    def breaks_on_nan(self: Any, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].grad.fill_(torch.nan)
        raise error

    monkeypatch.setattr(torch.optim.Adam, "step", breaks)
    if lost:
        found = train(run)
        assert found is not None and found["diverged"] and found["error"] == str(error)
    else:
        with pytest.raises(RuntimeError, match=error.args[0][:10]):
            train(run)
    monkeypatch.setattr(torch.optim.Adam, "step", breaks_on_nan)
    found = train(run)
    assert found is not None and found["diverged"], "of what is not finite, libraries make errors"


@pytest.mark.usefixtures("text")
def test_a_full_disk_costs_a_run_its_safety_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run({**RUNGS[0].task, **SMALL}, "adamw", {}, 1e-3, 6, 1)

    def full(kept: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file: file write failed")

    monkeypatch.setattr(torch, "save", full)
    found = train(run, Place(folder=tmp_path, every=0.0))
    assert found is not None and found["curve"] == train(run)["curve"] and not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError, match="write failed"):
        train(run, Place(folder=tmp_path, end=time.monotonic()))


# --- runs side by side -----------------------------------------------------------------------------------------------

ONLY_ADAM = replace(CHECK, contenders=CHECK.contenders[:1], claims=())


class Here:
    """A worker that is no process: runs end when the queue waits for them."""

    closed = 0

    def __init__(self, threads: int) -> None:
        pass

    def begin(self, task: Any, run: Run, place: Place) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(task(run, place))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self, kill: bool = False) -> None:
        Here.closed += 1


def planted(run: Run, place: Place) -> dict[str, Any]:
    return row(run, train_loss=abs(run.lr - 0.02))


def test_runs_side_by_side_are_those_of_one_after_the_other(tmp_path: Path) -> None:
    """In real processes, two at a time."""
    alone, beside = Results(tmp_path / "alone"), Results(tmp_path / "beside")
    list(session.work(ONLY_ADAM, (), alone, time.monotonic() + 60))
    lines = list(work_beside([ONLY_ADAM], beside, Place(folder=tmp_path), 2))
    assert len(lines) == len(alone.rows) and beside.rows.keys() == alone.rows.keys()
    for key, found in alone.rows.items():
        assert all(beside.rows[key][figure] == found[figure] for figure in ("train_loss", "validation_loss", "curve"))
    assert Results(tmp_path / "beside").rows.keys() == alone.rows.keys(), "and written"


def dies(run: Run, place: Place) -> None:
    import os

    os._exit(3)


@pytest.mark.exhaustive
def test_a_process_that_dies_takes_one_run_with_it(tmp_path: Path) -> None:
    lines = list(work_beside([ONLY_ADAM], Results(tmp_path), Place(), 2, task=dies))
    assert len(lines) == 3 and all("no figure, BrokenProcessPool" in line for line in lines)


def hangs(run: Run, place: Place) -> None:
    time.sleep(600)


@pytest.mark.exhaustive
def test_a_process_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_GRACE", 1.0)
    began = time.monotonic()
    lines = list(work_beside([ONLY_ADAM], Results(tmp_path), Place(end=began + 30), 1, task=hangs))
    assert len(lines) == 1 and "no answer 1 s after the end" in lines[0] and time.monotonic() - began < 60


def slow(run: Run, place: Place) -> None:
    (place.folder / f"{os.getpid()}").touch()  # type: ignore[operator]
    time.sleep(60)


@pytest.mark.exhaustive
def test_processes_end_with_the_one_that_began_them(tmp_path: Path) -> None:
    """However it ended: they hold the device, and nobody would write their rows."""
    command = f"""if __name__ == "__main__":
    import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
    import test_ladder as t
    list(t.work_beside([t.ONLY_ADAM], t.Results(t.Path({str(tmp_path)!r})), t.Place(folder=t.Path({str(tmp_path)!r})),
         1, task=t.slow))
"""
    script = tmp_path / "session.py"
    script.write_text(command)
    parent = subprocess.Popen([sys.executable, script])
    wait_for(lambda: any(path.name.isdecimal() for path in tmp_path.iterdir()))
    (worker,) = (int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal())
    parent.kill()
    parent.wait()
    wait_for(lambda: not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split()[2])


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_what_was_put_aside_is_there_until_its_row_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "Worker", Here)
    results, place, seen = Results(tmp_path / "rows"), Place(folder=tmp_path), []

    def leaves(run: Run, place: Place) -> dict[str, Any]:
        place.file(run).write_bytes(b"steps")  # type: ignore[union-attr]
        return row(run, train_loss=abs(run.lr - 0.02), device=place.name)

    def write(name: str, found: dict[str, Any]) -> None:
        seen.append(len(list(tmp_path.glob("*.pt"))))
        results.add([found])
        if len(seen) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(results, "write", write)
    lines = list(work_beside([ONLY_ADAM], results, place, 1, task=leaves))
    assert seen == [1, 1, *[2] * (len(seen) - 2)], "that of the row that could not be written stays"
    (told,) = (line for line in lines if "not written" in line)
    where, _, added = told.partition("add this line to E0.jsonl: ")
    assert "No space left" in where and json.loads(added)["run"]["optimizer"] == "adam"


def test_rows_are_whole_and_once_whoever_writes(tmp_path: Path) -> None:
    """Four processes at once, each of which does a part of what the others do, and one that was killed before."""
    runs = [Run(CHECK.task, "adam", {}, 0.1, 3, seed) for seed in range(24)]
    (tmp_path / "E0.jsonl").write_text(json.dumps(row(runs[0])) + "\n" + json.dumps(row(runs[1]))[:50])
    children = []
    for part in range(4):
        child = os.fork()
        if not child:
            for one in runs[part * 4 : part * 4 + 12]:
                Results(tmp_path).write("E0", row(one, 1.0 + part))
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    lines = [json.loads(line) for line in (tmp_path / "E0.jsonl").read_text().splitlines()]
    assert sorted(line["run"]["seed"] for line in lines) == list(range(24))
    with (tmp_path / "E0.jsonl").open("a") as held, ThreadPoolExecutor(1) as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        written = pool.submit(Results(tmp_path).write, "E0", row(replace(runs[0], lr=0.2)))
        time.sleep(0.1)
        assert not written.done(), "it waits for who writes now"
        fcntl.flock(held, fcntl.LOCK_UN)


def test_a_full_disk_leaves_a_file_as_it_was(tmp_path: Path) -> None:
    run = Run(CHECK.task, "adam", {}, 0.1, 3, 0)
    results = Results(tmp_path)
    results.write("E0", row(run))
    before, limits = (tmp_path / "E0.jsonl").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            results.write("E0", row(replace(run, seed=1)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "E0.jsonl").read_bytes() == before and len(results.rows) == 2


# --- types of devices ------------------------------------------------------------------------------------------------


def test_what_can_end_in_time_comes_before_what_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "Worker", Here)
    monkeypatch.setattr(queue, "time", SimpleNamespace(monotonic=lambda: 0.0))
    results, begun = Results(tmp_path), []

    def task(run: Run, place: Place) -> dict[str, Any]:
        begun.append(run.optimizer)
        return row(run, train_loss=abs(run.lr - 0.02), seconds=9.0 if run.optimizer == "adam" else 1.0)

    list(work_beside([CHECK], results, Place(end=5.0), 1, task=task))
    others = [place for place, name in enumerate(begun) if name != "adam"]
    assert begun[0] == "adam" and others == list(range(1, len(others) + 1)), "all of the others before its second"
    assert begun.count("adam") > 3, "what cannot end is begun all the same, and put aside"


def test_a_gpu_takes_nothing_from_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither rates nor rows, though both write to the same files."""
    monkeypatch.setattr(queue, "Worker", Here)
    recorded, kinds = searched(Results(tmp_path)), {}
    assert experiment_of(RUNGS[2], recorded).contenders and not experiment_of(RUNGS[2], recorded.of("cuda")).contenders
    for kind in ("cpu", "cuda"):
        task = lambda run, _, kind=kind: {**planted(run, _), "device_type": kind}  # noqa: E731
        kinds[kind] = len(list(work_beside([ONLY_ADAM], Results(tmp_path).of(kind), Place(), 1, task=task)))
    assert kinds["cpu"] == kinds["cuda"] > 4
    again = Results(tmp_path)
    assert [len(again.of(kind).rows) for kind in kinds] == list(kinds.values())
    small = CELLS[next(iter(CELLS))]
    again.add([row(small.run(small.contenders[0], small.contenders[0].settings[0], 0, 0))])
    assert session.is_begun_elsewhere(small, "cuda", again) and not session.is_begun_elsewhere(small, "cpu", again)
    assert not session.is_begun_elsewhere(LOWEST["E13-1M"], "cuda", again)


def test_a_run_that_fails_is_left_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "Worker", Here)
    Here.closed = 0

    def task(run: Run, place: Place) -> dict[str, Any] | None:
        if run.optimizer == "sonew":
            raise torch.OutOfMemoryError("full")
        return planted(run, place) if run.optimizer == "adam" else None

    results = Results(tmp_path)
    lines = list(work_beside([CHECK], results, Place(), 3, task=task))
    assert sum("no figure, OutOfMemoryError: full" in line for line in lines) == 3 and Here.closed >= 3
    assert sum("put aside, to go on" in line for line in lines) == 3
    assert {found["run"]["optimizer"] for found in results.rows.values()} == {"adam"} and len(results.rows) == 6
    assert list(work_beside([CHECK], results, Place(end=0.0), 3, task=task)) == [], "the time is over"
    mkor = work_beside([CHECK], results, Place(), 1, task=planted, wanted=lambda one: one.contender == "MKOR on SGD")
    assert {line.split()[1] for line in mkor} == {"mkor"}


class Silent(Here):
    """A worker whose runs never end."""

    def begin(self, task: Any, run: Run, place: Place) -> Future[Any]:
        return Future()


def test_a_run_that_hangs_is_left_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "Worker", Silent)
    monkeypatch.setattr(queue, "_GRACE", 0.1)
    Here.closed = 0
    lines = list(work_beside([CHECK], Results(tmp_path), Place(end=time.monotonic() + 0.1), 2))
    assert len(lines) == 2 and all("no answer 0 s after the end" in line for line in lines) and Here.closed >= 2


def test_the_whole_ladder_in_one_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rate that was found makes possible comes in the same session."""
    monkeypatch.setattr(queue, "Worker", Here)
    results = Results(tmp_path)
    list(work_beside(chosen("E13", results), results, Place(), 4, task=lambda run, _: row(run, abs(run.lr - 4e-3))))
    assert list(missing_rows(Results(tmp_path), "one")) == []
    files = {path.name: len(path.read_text().splitlines()) for path in tmp_path.iterdir()}
    assert files["E13-124M.jsonl"] == 3 and files["E13-16M.jsonl"] == files["E13-16M-5.jsonl"] == 12


@pytest.mark.usefixtures("text")
def test_the_ladder_runs_at_a_small_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real runs on a CPU, of smaller models, from the first trial to the page."""
    monkeypatch.setattr(queue, "Worker", Here)

    def small(run: Run, place: Place) -> dict[str, Any]:
        options = dict(run.options) | ({"rank": 4} if "rank" in run.options else {})
        smaller = replace(run, task={**run.task, **SMALL, "parts": 1}, steps=20, options=options)
        return {**(train(smaller, place) or {}), "run": row(run)["run"]}

    results = Results(tmp_path)
    for contender in ("AdamW", "MARS-M"):
        wanted = lambda entry, name=contender: entry.contender.startswith(name)  # noqa: E731
        list(work_beside(chosen("E13", results), results, Place(), 2, task=small, wanted=wanted))
    page = ladder_section(Results(tmp_path))
    assert page.count("| MARS-M |") == 3 and f"| MARS-M{STEADY} |" in page
    assert not any(found["diverged"] for found in results.rows.values())


# --- forward and backward as a graph ---------------------------------------------------------------------------------


@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_a_replayed_gradient_is_that_of_the_calls(text: Corpus, products: str) -> None:
    """Recorded on a CPU and repeated on its memory, as a graph is."""
    description = {**RUNGS[0].task, **SMALL, "products": products}
    eager, graph = (tasks.make_task(description, 3) for _ in range(2))
    for step in range(2):
        eager.model.zero_grad()
        expected = eager.gradient(step)
        if step == 0:
            graph._forward_and_backward()  # gradients get their memory
            with Recorder() as recorder:
                graph._forward_and_backward()
            graph._passes = recorder.replay
        assert torch.equal(graph.gradient(step), expected)
        for ours, theirs in zip(graph.model.parameters(), eager.model.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
            with torch.no_grad():
                ours.sub_(ours.grad), theirs.sub_(theirs.grad)


def test_a_batch_in_parts_has_the_gradient_of_the_whole(text: Corpus) -> None:
    whole, parts = (
        tasks.make_task({**RUNGS[0].task, **SMALL, "products": "float32", "parts": parts}, 3) for parts in (1, 2)
    )
    torch.testing.assert_close(parts.gradient(0), whole.gradient(0))
    for ours, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    with pytest.raises(ValueError, match="parts is 3: it must divide the batch, which has 2 samples"):
        tasks.make_task({**RUNGS[0].task, **SMALL, "parts": 3}, 0)


def test_a_graph_that_repeats_something_else_is_found(text: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tasks.make_task({**RUNGS[0].task, **SMALL}, 3)
    task._compare(task._forward_and_backward)

    def adds_up() -> None:
        task._last.zero_()
        loss = task._loss(task._samples)
        loss.backward()
        task._last.add_(loss.detach())
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)

    for wrong in (lambda: None, adds_up):
        with pytest.raises(RuntimeError, match="another gradient"):
            task._compare(wrong)
    monkeypatch.setattr(task, "_device", torch.device("cuda"))
    monkeypatch.setattr(task, "_compare", lambda replay: refuses(replay, "another gradient"))
    for graph, reason in ((lambda work: adds_up, "another gradient"), (refuses, "operation not permitted")):
        monkeypatch.setattr(tasks, "captured", graph)
        with pytest.warns(UserWarning, match=f"called, not replayed: .*{reason}"):
            assert not task.capture()
        assert task._passes == task._forward_and_backward and not task.keeps_gradients


def refuses(work: Any, reason: str = "CUDA error: operation not permitted when stream is capturing") -> None:
    raise RuntimeError(reason)


def test_windows_are_those_of_the_sampler_and_losses_fit_into_memory(
    text: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tasks.make_task({**RUNGS[0].task, **SMALL}, 3)
    for step in (0, 63, 64, 1, 200):
        assert torch.equal(task._windows(task._train, task._starts(step)), task._sampler.batch(step, 0, 0))
    whole = task.figures()["validation_loss"]
    monkeypatch.setattr(tasks.Decoder, "_TOKENS_AT_ONCE", 16)
    loss, sizes = task._loss, []
    monkeypatch.setattr(task, "_loss", lambda samples: (sizes.append(len(samples)), loss(samples))[1])
    assert task.figures()["validation_loss"] == pytest.approx(whole, rel=1e-3) and sizes == [2, 2]
    assert all(rung.batch // rung.parts * rung.window * rung.vocabulary < 5e8 for rung in RUNGS), "logits of a part"


def test_a_graph_is_made_after_three_calls_beside_it() -> None:
    done: list[str] = []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            done.append("wait")

        def __enter__(self) -> None:
            done.append("(")

        def __exit__(self, *error: Any) -> None:
            done.append(")")

    cuda = SimpleNamespace(
        Stream=Stream,
        current_stream=Stream,
        stream=lambda side: side,
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: done.append("replay")),
        graph=lambda graph: Stream(),
    )
    tasks.captured(lambda: done.append("work"), cuda)()
    assert done == ["wait", "(", *["work"] * 3, ")", "wait", "(", "work", ")", "replay"]


@pytest.mark.usefixtures("text")
def test_gradients_stay_where_a_graph_has_them_but_for_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, with calls in place of the graph: bits are those of a CPU, and MKOR's hooks get no graph."""
    made: list[int] = []

    def capture(task: Any) -> bool:
        made.append(1)
        task.keeps_gradients = True
        return True

    for optimizer, options, graphs in (("adamw", {}, 1), ("mkor", {"rule": "sketch"}, 1), ("mkor", {}, 0)):
        run = Run({**RUNGS[0].task, **SMALL}, optimizer, options, 1e-3, 5, 1)
        plain = train(run)
        with monkeypatch.context() as patch:
            patch.setattr(tasks.Decoder, "capture", capture)
            made.clear()
            kept = train(run)
        assert len(made) == graphs and plain is not None and kept is not None
        assert kept["validation_loss"] == plain["validation_loss"], optimizer


@pytest.mark.usefixtures("text")
def test_mkor_and_muon_leaves_gradients_where_they_are() -> None:
    task = tasks.make_task({**RUNGS[0].task, **SMALL}, 3)
    optimizer = make_optimizer("mkor and muon", task.model, 1e-2, {"momentum": 0.9, "mkor_rule": "sketch"})
    task.gradient(0)
    before = [parameter.grad for parameter in task.model.parameters()]
    optimizer.step()
    assert all(parameter.grad is one for parameter, one in zip(task.model.parameters(), before, strict=True))


# --- the text --------------------------------------------------------------------------------------------------------

PAGE = (
    b"<head>no</head><p>A &lt;word&gt; of <b>hers</b></p>\n\n\n<script>x < y</script><p>" + b"and more. " * 30 + b"</p>"
)


def wheel(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "some_text-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return path


def source(path: Path, **further: Any) -> Source:
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    fields = {"sha256": checksum, "licence": "MIT", "take": ("*.py", "*.html", "!*secret*"), "language": "code"}
    return Source("wheel", "some-text", "1.0", **{**fields, **further})


def some_files() -> dict[str, bytes]:
    files = {f"a/{number}.py": b"import this  # %d\n" % number * 20 for number in range(100)}
    return files | {
        "p.html": PAGE,
        "copy.py": files["a/3.py"],
        "secret.py": files["a/5.py"] + b"x",
        "short.py": b"x",
        "null.py": b"\0" * 500,
        "long.py": b" ".join(b"%d" % number for number in range(150_000))[:900_000],
    }


def test_text_has_the_same_bytes_everywhere(tmp_path: Path) -> None:
    path = wheel(tmp_path, some_files())
    facts = build(tmp_path / "one", [source(path)], lambda *_: path)
    again = wheel(tmp_path, dict(reversed(some_files().items())))
    assert build(tmp_path / "two", [source(again)], lambda *_: again) == facts
    train, held = ((tmp_path / "one" / f"{part}.txt").read_bytes() for part in ("train", "held-out"))
    documents = [*train.split(b"\0")[:-1], *held.split(b"\0")[:-1]]
    assert len(documents) == len(set(documents)) == facts["sources"][0]["documents"] == 100 + 1 + 3
    assert 0 < len(held) < len(train) and facts["train"]["sha256"] == hashlib.sha256(train).hexdigest()
    (page,) = (one for one in documents if b"hers" in one)
    assert page.startswith(b"A <word> of hers\n\nand more.") and b"no" not in page[:2] and b"x < y" not in page
    assert json.loads((tmp_path / "one" / "corpus.json").read_text()) == facts and "| some-text |" in corpus.licences(
        facts
    )


def test_text_of_other_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheel(tmp_path, some_files())
    with pytest.raises(ValueError, match="has the checksum .* it must be 0123; delete"):
        build(tmp_path, [source(path, sha256="0123")], lambda *_: path)
    with pytest.raises(ValueError, match=r"nothing of some-text 1.0 matches \['\*.rst'\]"):
        build(tmp_path, [source(path, take=("*.rst",))], lambda *_: path)
    monkeypatch.setattr(corpus, "SOURCES", (source(path),))
    with pytest.raises(ValueError, match="the text has other bytes than packages-1 has"):
        build(tmp_path, corpus.SOURCES, lambda *_: path)
    gone = replace(source(path), kind="debian", package="rankwise-none")
    with pytest.raises(ValueError, match="rankwise-none 1.0 could not be had .* needs apt-get"):
        corpus.fetched(gone, tmp_path)
    assert corpus.fetched(source(path), tmp_path) == path, "what is there is not fetched"


def test_sources_are_pinned() -> None:
    assert all(len(one.sha256) == 64 and one.version and one.licence for one in SOURCES)
    assert {one.language for one in SOURCES} == {"natural", "code"}


def test_text_is_read_as_bytes_or_pairs(tmp_path: Path) -> None:
    path = wheel(tmp_path, some_files())
    build(tmp_path, [source(path)], lambda *_: path)
    found = load(tmp_path)
    assert found.train.tobytes() == (tmp_path / "train.txt").read_bytes() and found.vocab_size == 256
    pairs = load(tmp_path, tokens="bpe 300")
    assert pairs.train.max() < 300 == pairs.vocab_size and (pairs.train == 0).sum() == (found.train == 0).sum()
    from tokenizers import Tokenizer

    (learned,) = tmp_path.glob("bpe-300-*.json")
    decode = Tokenizer.from_file(str(learned)).decode
    words = decode(pairs.validation[: int(np.argmax(pairs.validation == 0))].tolist())
    assert words.encode() == (tmp_path / "held-out.txt").read_bytes().split(b"\0")[0]
    for path in tmp_path.glob("bpe-*.bin"):
        path.unlink()
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(corpus, "_learn_pairs", lambda *_: pytest.fail("they are learned once"))
        written: list[Any] = []
        write = corpus._write_pairs
        patch.setattr(corpus, "_write_pairs", lambda *given: (written.append(1), write(*given)))
        again = list(pool.map(lambda _: load(tmp_path, tokens="bpe 300").train.tobytes(), range(3)))
    assert set(again) == {pairs.train.tobytes()} and len(written) == 1, "by one of those that want them at once"
    for tokens, words in (("words", "must be 'bytes' or 'bpe' and a number"), ("bpe 9", "must have 257 to 65536")):
        with pytest.raises(ValueError, match=words):
            load(tmp_path, tokens=tokens)
    with pytest.raises(ValueError, match="is 'packages-1' and must be 'other'"):
        load(tmp_path, "other")
    with pytest.raises(ValueError, match="python -m benchmarks corpus builds it"):
        load(tmp_path / "none")


def test_text_comes_back_from_its_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheel(tmp_path, some_files())
    facts = build(tmp_path / "text", [source(path)], lambda *_: path)
    load(tmp_path / "text", tokens="bpe 300")
    with pytest.raises(ValueError, match="python -m benchmarks corpus builds it"):
        pack(tmp_path / "none", tmp_path / "pack")
    index, *pieces = pack(tmp_path / "text", tmp_path / "pack", 10_000)
    assert len(pieces) > 1 and all(piece.stat().st_size <= 10_000 for piece in pieces)
    (tmp_path / "more").mkdir()
    moved = pieces[1].rename(tmp_path / "more" / pieces[1].name)
    with pytest.raises(ValueError, match=f"{moved.name} is not in .*pack: all pieces are needed"):
        unpack([tmp_path / "pack"], tmp_path / "there")
    monkeypatch.setattr(corpus, "_learn_pairs", lambda *_: pytest.fail("they travel along"))
    assert unpack([tmp_path / "more", tmp_path / "pack"], tmp_path / "there") == facts
    for name in ("train.txt", "held-out.txt", "corpus.json"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "text" / name).read_bytes()
    there, here = (load(tmp_path / folder, tokens="bpe 300").train.tobytes() for folder in ("there", "text"))
    assert there == here
    whole = moved.read_bytes()
    moved.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="has other bytes than were packed: copy it again"):
        unpack([tmp_path / "more", tmp_path / "pack"], tmp_path / "there")
    moved.write_bytes(whole)
    told = json.loads(index.read_text())
    told["facts"]["train"]["sha256"] = "0123"
    index.write_text(json.dumps(told))
    with pytest.raises(ValueError, match="train has the checksum .* it must be 0123"):
        unpack([tmp_path / "more", tmp_path / "pack"], tmp_path / "there")
    with pytest.raises(ValueError, match="train has the checksum"):
        (tmp_path / "text" / "train.txt").write_bytes(b"other")
        pack(tmp_path / "text", tmp_path / "pack")


def test_tokens_of_two_bytes_keep_their_numbers(text: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    high = np.arange(40_000, 40_600).astype(np.uint16)
    monkeypatch.setattr(tasks, "packaged_text", lambda *_: Corpus(high, high, 40_600, 1.0, text.folder))
    task = tasks.make_task({**RUNGS[0].task, **SMALL}, 0)
    assert task._windows(task._train, torch.tensor([0, 500]))[1].tolist() == list(range(40_500, 40_509))


# --- the page and the command ----------------------------------------------------------------------------------------


def test_shares_of_steps_are_read_between_the_points() -> None:
    adamw = [2.0 - 0.05 * (place + 0.5) for place in range(20)]
    twice = [2.0 - 0.10 * (place + 0.5) for place in range(20)]
    assert share_of_steps(adamw, adamw) == pytest.approx(1.0) and share_of_steps(twice, adamw) == pytest.approx(0.5)
    assert share_of_steps([value + 0.01 for value in adamw], adamw) is None
    assert share_of_steps([0.5] * 20, adamw) == pytest.approx(0.5 / 19.5), "from the first point on"


def test_the_page_has_shares_of_steps_and_time(tmp_path: Path) -> None:
    """MARS-M needs half of AdamW's steps, each of which takes 1.2 times as long."""
    results = searched(Results(tmp_path))
    assert "No GPU has run a contender beside AdamW yet" in ladder_section(results)
    speeds = {"AdamW": 1.0, "MARS-M": 2.0, "SOAP": 0.9}
    for rung, names in ((RUNGS[0], speeds), (RUNGS[2], ("AdamW", "MARS-M", "MARS-M" + STEADY))):
        experiment = experiment_of(rung, results)
        for name, seed in itertools.product(names, experiment.seeds):
            contender = experiment.contender(name)
            speed = speeds[name.removesuffix(STEADY)]
            curve = [2.0 + 0.1 * seed - 0.05 * speed * (place + 0.5) for place in range(20)]
            run = experiment.run(contender, contender.settings[0], 0, seed)
            results.add([row(run, 3.0 + seed - 0.1 * (speed == 2.0), curve=curve)])
    page = ladder_section(results)
    assert "| MARS-M | 50 ± 0 % | 50 % |" in page and "| SOAP | not reached by 3 |  |" in page
    assert "| MARS-M | -0.1000 ± 0.0000 | -0.1000 |" in page and f"| MARS-M{STEADY} |  | 50 % |" in page
    assert "|  | 1 M | 4 M by the rule |" in page and "| AdamW | 0.004 | 0.002 |" in page
    assert "| AdamW's trials | 1.00 to 2.00, rates 0.002 to 0.008 |" in page
    assert "Share of AdamW's time" not in page, "nothing was timed"
    assert page.index("No GPU has run") < page.index("### On CPUs") and "### On GPUs" not in page
    times = {"AdamW": 10.0, "MARS-M": 12.0}
    lines = list(
        measure_times(tmp_path, Place(), lambda run, device: times["AdamW" if run.optimizer == "adamw" else "MARS-M"])
    )
    assert len(lines) == 3 * len(CONTENDERS) and list(measure_times(tmp_path, Place(), lambda *_: 0.0)) == []
    assert "| MARS-M | 60 ± 0 % (step 1.20, " in ladder_section(results)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.nice", lambda increment: increment)
    monkeypatch.setattr(queue, "Worker", Here)
    monkeypatch.setenv("RANKWISE_CORPUS", str(tmp_path / "none"))

    def said(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["convergence", "--results", str(tmp_path), *arguments])
        return " ".join(result.output.replace("│", " ").split())

    assert "E13-124M MKOR on AdamW, rule sketch: 1 run of" in said("--missing")
    assert "python -m benchmarks corpus builds it" in said("--only", "E13", "--beside", "2")
    assert "torch finds no such device here" in said("--device", "cuda") or torch.cuda.is_available()
    assert "Invalid value" in said("--device", "banana") and "must be cpu or cuda" in said("--device", "meta")
    assert "builds it" in said("--only", "E13-1M") and "builds it" in said("--times", "--only", "E0")
    assert "leave E13, --device, --beside out" in said("--only", "E13-1M", "--again")
    assert "E13-4M SOAP: 6 runs of" in said("--only", "E13", "--missing", "--contender", "SOAP")
    assert "no contender 'SOPA' in E13-1M" in said("--only", "E13", "--contender", "SOPA")
    assert "no contender 'Adm' in E0" in said("--only", "E0", "--contender", "Adm", "--beside", "2")
    adam = said("--only", "E0", "--contender", "Adam", "--beside", "2")
    assert adam.count("E0 adam") == len(Results(tmp_path).rows) > 5
    assert "nothing was missing" in said("--only", "E0", "--contender", "Adam", "--beside", "2")
