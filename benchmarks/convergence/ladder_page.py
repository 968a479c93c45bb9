"""E13's part of docs/sizes.md: shares of AdamW's steps and time, then losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any

from benchmarks.convergence.corpus import NAME, SOURCES
from benchmarks.convergence.experiment import Experiment
from benchmarks.convergence.ladder import CONTENDERS, LARGEST, RUNGS, STEADY, Rung, experiment_of
from benchmarks.convergence.page import interval_words, recorded_rows
from benchmarks.convergence.results import Results, Row, device_type
from benchmarks.convergence.search import best_trial, final_runs, tried
from benchmarks.convergence.step_times import known_times
from benchmarks.convergence.verdicts import Difference, mean_interval
from benchmarks.performance import markdown

__all__ = ["ladder_section", "share_of_steps"]

_BASE = CONTENDERS[0]
_NAMES = (*CONTENDERS[1:], *(name + STEADY for name in LARGEST))

_HEAD = """
## E13: the ladder

All contenders at 0.3, 1 and 4 M parameters with rates searched and three seeds, at 16 M with rates carried up and one
seed, and three of them at GPT-2 small's size; 20 bytes a parameter (16 M also 5; 124 M one token of 50,257 byte pairs).
The [text](#the-text) has 418 MB, or 109 M such tokens. `python -m benchmarks convergence --device cuda --beside 7
--minutes 14` goes on with it, after `python -m benchmarks corpus`. Rows are written as they come; what the end of the
minutes cuts is put aside within seconds. `--times` measures steps; `--missing` lists what is left. 0.3 M is for CPUs
(`--only E13-0.3M --beside 2`): the largest size above with four times the bytes a step and the ladder's text. The rules
were stated beforehand:

- *Batch*: tokens of a step grow with the square root of the parameters.
- *Rates*: searched up to 4 M; above, the best of 4 M times 256 / width.
- *Decay*: a coefficient of 0.1, so that the share of a weight that decays in a step (rate times coefficient) goes with
  1 / width ([2512.05620](https://arxiv.org/abs/2512.05620)). *{steady}*: that share as it was at 4 M.
- *Order*: AdamW, Muon, MARS-M and MKOR's sketch have all of their runs at 1 M, then at 4 M. Then come the rates of the
  others, one run of everybody at each size, more seeds, and the longest last.
- *Devices*: GPUs and CPUs are two experiments, each with rates of its own.

"""
_TEXT = """
### The text

It is named {name}. Of each file of these packages the checksum of its name decides whether it is trained on or held out
(one in fifty). `python -m benchmarks corpus` fetches the packages with apt-get and pip, and refuses other bytes. For a
machine that reaches no registry, `python -m benchmarks corpus --pack FOLDER` writes the text in pieces of 24 MB, which
`python -m benchmarks corpus --unpack FOLDER` turns into the same bytes there.

"""
_NOTHING = "**No GPU has run a contender beside AdamW yet.** From 1 M on it needs one.\n"
_KINDS = {"cuda": "\n### On GPUs\n", "cpu": "\n### On CPUs\n"}
"""Headings of what types of devices gave."""
_STEPS = """
**Share of AdamW's steps** after which a contender's training loss is down to AdamW's last, on its own schedule, whose
rate is still high there. Losses are means of twentieths of a run, interpolated between their middles; paired by seed.

"""
_TIME = """
**Share of AdamW's time**: that share, times the time of a step beside AdamW's, each measured with the device to itself.

"""
_LOSSES = """
**Held-out loss less AdamW's**, nats per byte (124 M: per token), and AdamW's own, with those of its trials. Where these
hardly differ over so many rates, AdamW has not left its plateau, and differences say how early the others leave it.

"""
_RATES = """
**Rates**: the best of each search, and what the rule makes of the one at 1 M for 4 M (half).

"""


def share_of_steps(ours: Sequence[float], base: Sequence[float]) -> float | None:
    """The share of a run after which its losses are down to the last of another, both with points equally far apart.

    Args:
        ours: Losses, the mean of each of equally many parts of the run.
        base: Losses of the other run, of as many steps.

    Returns:
        1.0 for the same run; None if the losses never come down so far.
    """
    goal, last = base[-1], len(base) - 0.5
    for place, loss in enumerate(ours):
        if loss <= goal:
            before = ours[place - 1] if place else loss
            back = (goal - loss) / (before - loss) if before > loss else 0.0
            return (place + 0.5 - back) / last
    return None


def ladder_section(results: Results) -> str:
    """The section.

    Args:
        results: What has been run.
    """
    head = _HEAD.format(steady=STEADY.removeprefix(", "))
    text = _TEXT.format(name=NAME) + markdown(
        ("package", "version", "language", "licence"),
        [(one.package, one.version, one.language, one.licence) for one in SOURCES],
    )
    return head + (_of_devices("cuda", results) or _NOTHING) + _of_devices("cpu", results) + text


def _of_devices(kind: str, recorded: Results) -> str:
    """What one type of device gave; empty for nothing that stands beside AdamW."""
    results = recorded.of(kind)
    by_size = sorted(RUNGS, key=lambda rung: (rung.parameters, rung.each))
    experiments = [(rung, experiment_of(rung, results)) for rung in by_size]
    rungs = [(rung, one) for rung, one in experiments if _rows(one, _BASE, results)]
    names = [name for name in _NAMES if any(_rows(one, name, results) for _, one in rungs)]
    if not names:
        return ""
    times = [row for row in known_times(results.folder) if device_type(row) == kind]
    heading = ("", *(f"{one.title}, {one.steps:,} steps" for _, one in rungs))
    parts = [_KINDS[kind], _STEPS, _table(heading, names, rungs, lambda _, one, name: _steps(one, name, results))]
    if times:
        parts += [_TIME, _table(heading, names, rungs, lambda rung, one, name: _time(rung, one, name, results, times))]
    own = ("AdamW's loss", *(interval_words(_mean(_rows(one, _BASE, results).values())) for _, one in rungs))
    losses = [(name, *(_loss(one, name, results) for _, one in rungs)) for name in names]
    own_trials = ("AdamW's trials", *(_trials(one, _BASE, results) for _, one in rungs))
    parts += [_LOSSES, markdown(heading, [own, own_trials, *losses]), _rates(rungs, results), _devices(rungs, results)]
    return "".join(parts)


def _table(
    heading: Sequence[str],
    names: Sequence[str],
    rungs: Sequence[tuple[Rung, Experiment]],
    cell: Callable[[Rung, Experiment, str], str],
) -> str:
    return markdown(heading, [(name, *(cell(rung, one, name) for rung, one in rungs)) for name in names])


def _rows(experiment: Experiment, name: str, results: Results) -> Mapping[int, Row]:
    """A contender's rows by seed, without those that diverged."""
    there = {contender.name: contender for contender in experiment.contenders}
    runs = (final_runs(experiment, there[name], results) or []) if name in there else []
    rows = {run.seed: results.row(run) for run in runs}
    return {seed: row for seed, row in rows.items() if row is not None and not row["diverged"]}


def _pairs(experiment: Experiment, name: str, results: Results) -> Iterator[tuple[Row, Row]]:
    ours, base = (_rows(experiment, one, results) for one in (name, _BASE))
    return ((ours[seed], base[seed]) for seed in sorted(ours.keys() & base.keys()))


def _shares(experiment: Experiment, name: str, results: Results) -> Difference | str | None:
    """Mean and interval of the shares of steps, or a word where a seed has none."""
    shares = [share_of_steps(ours["curve"], base["curve"]) for ours, base in _pairs(experiment, name, results)]
    if not shares:
        return None
    known = [share for share in shares if share is not None]
    return mean_interval(known) if len(known) == len(shares) else f"not reached by {len(shares) - len(known)}"


def _percent(share: Difference, factor: float = 1.0) -> str:
    width = f" ± {100 * factor * share.half:.0f}" if share.count > 1 else ""
    return f"{100 * factor * share.mean:.0f}{width} %"


def _steps(experiment: Experiment, name: str, results: Results) -> str:
    share = _shares(experiment, name, results)
    return share or "" if not isinstance(share, Difference) else _percent(share)


def _time(rung: Rung, experiment: Experiment, name: str, results: Results, times: Sequence[Mapping[str, Any]]) -> str:
    share = _shares(experiment, name, results)
    same = {other.name for other in RUNGS if other.hidden == rung.hidden}
    taken: dict[tuple[str, str], float] = {
        (row["device"], row["contender"]): row["milliseconds"] for row in times if row["experiment"] in same
    }
    for device in sorted({device for device, _ in taken}):
        ours, base = taken.get((device, name.removesuffix(STEADY))), taken.get((device, _BASE))
        if isinstance(share, Difference) and ours and base:
            return f"{_percent(share, ours / base)} (step {ours / base:.2f}, {device})"
    return ""


def _loss(experiment: Experiment, name: str, results: Results) -> str:
    metric = experiment.metric
    differences = [ours[metric] - base[metric] for ours, base in _pairs(experiment, name, results)]
    return interval_words(mean_interval(differences), "+") if differences else ""


def _trials(experiment: Experiment, name: str, results: Results) -> str:
    """The range of the losses of a contender's trials, and that of their rates."""
    contender = experiment.contender(name)
    found = tried(experiment, contender, contender.settings[0], results) if experiment.trials > 1 else {}
    losses = [loss for loss in found.values() if isfinite(loss)]
    if not losses:
        return ""
    rates = [contender.rate(exponent) for exponent in found]
    return f"{min(losses):.2f} to {max(losses):.2f}, rates {min(rates):.2g} to {max(rates):.2g}"


def _mean(rows: Any) -> Difference:
    return mean_interval([row["validation_loss"] for row in rows])


def _rates(rungs: Sequence[tuple[Rung, Experiment]], results: Results) -> str:
    there = {rung: one for rung, one in rungs if rung.searched}
    rows = []
    for name in CONTENDERS:
        best = {rung: best_trial(one, one.contender(name), results) for rung, one in there.items()}
        rates = {rung: there[rung].contender(name).rate(found.exponent) for rung, found in best.items() if found}
        by_the_rule = f"{rates[RUNGS[0]] / 2:.3g}" if RUNGS[0] in rates else ""
        rows.append((name, *(f"{rates[rung]:.3g}" if rung in rates else "" for rung in there), by_the_rule))
    heading = ("", *(rung.size.replace("M", " M") for rung in there), "4 M by the rule")
    return _RATES + markdown(heading, rows)


def _devices(rungs: Sequence[tuple[Rung, Experiment]], results: Results) -> str:
    rows = [row for _, one in rungs for row in recorded_rows(one, one.contenders, results)]
    names = " / ".join(sorted({str(row["device"]) for row in rows}))
    seconds = fmean(row["seconds"] for row in rows)
    return f"\n{len(rows)} runs on {names}, {seconds:.0f} s each on average, some of them side by side.\n"
