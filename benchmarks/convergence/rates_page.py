"""docs/rates.md: AdamW's learning rate and ours, from the results of the searches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from benchmarks.convergence.autoencoders import E1, E2
from benchmarks.convergence.experiment import Contender, Experiment
from benchmarks.convergence.factor_sources import E12
from benchmarks.convergence.language_models import E3, E4, E5, SKETCHED
from benchmarks.convergence.page import setting_words
from benchmarks.convergence.rates import RATES
from benchmarks.convergence.results import Results
from benchmarks.convergence.search import Best, best_trial, tried
from benchmarks.convergence.sizes import CELLS, CONTENDERS
from benchmarks.performance import markdown
from rankwise.configs import deepspeed_config

__all__ = ["measured_ratios", "rates_by_size", "rates_page"]

_HEAD = """# AdamW's learning rate and ours

This page says which learning rate of each type corresponds to AdamW's best one. The short answer is the column *over
AdamW's*: multiply AdamW's rate by it, and begin a search there. **The first table is one small model and one seed: a
place to begin, no result.** The searches of the [evidence](evidence.md) are longer; their rates are
[below](#in-longer-runs).

{about} Every type has weight decay 0.1 and its default options: betas 0.9 and 0.95 for AdamW and MKOR, rank 16 for
LDAdam, float32 for MKOR's factors and for the products of Shampoo and M. Rates go in factors of two until the best is
inside. `python -m benchmarks rates` writes this page from `docs/data/convergence/LR.jsonl`, and
`python -m benchmarks convergence --only LR` continues that file.

| type | best lr | over AdamW's | loss there | losses by lr |
| --- | --- | --- | --- | --- |
"""

_LONGER = """
## In longer runs

These are the best trials of experiments of the [evidence](evidence.md), with their setting, beside Adam's or AdamW's in
the same experiment. E1 and E2 are autoencoders. *Ready file* is the rate in `configs/deepspeed` over AdamW's there.

| type | experiment | contender | setting | best lr | AdamW's | over AdamW's | ready file |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
_BY_SIZE = """
## By width and length

The best rates of [sizes](sizes.md), where the whole model grows. The grid is of factors of two, and a trial is one
run: one step on it may be chance. In brackets: over AdamW's in the same column.

"""
_TRANSFER = """
Width and length change together there. Taken apart, each as the factor on the best rate:

"""
_FOUND = """
Of {widths} types {at_most} have half the rate or less at twice the width, and {kept} of {lengths} keep it in the
longer run. So lower the rate as a model gets wider, by about as much, and leave it where a run gets longer.

"""
_RULES = """\
- *Same size*: updates keep their size per element as the model widens, as AdamW's and those of `scale="rms"` do (the
  default of MARS-M and of the benchmarks' Muon). The rate would stay as it is.
- *MuP*: updates keep their spectral norm ([2310.17813](https://arxiv.org/abs/2310.17813)). AdamW's rate would go with
  1 / width, that of orthogonalised updates of `scale="rms"` with 1 / sqrt(width).
"""
_SEARCHES = (
    ("MARS-AdamW", E4, "MARS-AdamW"),
    ("MARS-AdamW", E4, "MARS-AdamW, AdamW's betas"),
    ("MARS-Lion", E4, "MARS-Lion"),
    ("MARS-M", E4, "MARS-M"),
    ("SONew", E1, "SONew, band 1"),
    ("LDAdam", E5, "LDAdam, rank d/4"),
    ("MKOR", E2, "MKOR on AdamW"),
    ("MKOR", E3, "MKOR on AdamW"),
    ("MKOR-H", E3, "MKOR-H on AdamW"),
    ("MKOR-Sketch", E12, SKETCHED.name),
)


_BY_LENGTH = sorted(CELLS, key=lambda cell: (cell.hidden, cell.all_steps))
_NARROW = _BY_LENGTH[0]
_WIDE, _LONG, _ = (cell for cell in _BY_LENGTH if cell.parameters == 260_736)


def rates_page(results: Results) -> str:
    """The page; a search that is not over is said to be none.

    Args:
        results: As recorded.
    """
    rows = [" | ".join(_row(contender, results)) for contender in RATES.contenders]
    first = _HEAD.format(about=RATES.about) + _table(rows)
    return first + _LONGER + _table(_longer(results)) + _BY_SIZE + rates_by_size(results) + _transfer(results)


def rates_by_size(results: Results) -> str:
    """A table of the best learning rate of each contender of E9 by width and steps, as far as searches are over.

    Args:
        results: What has been run.
    """
    rows = []
    for name in CONTENDERS:
        found = [_searched(CELLS[cell], name, results) for cell in _BY_LENGTH]
        rows.append((name, *(f"{each.rate:.3g} ({each.rate / each.adamw:.3g})" if each else "" for each in found)))
    return markdown(("", *(f"width {cell.hidden}, {cell.all_steps:,} steps" for cell in _BY_LENGTH)), rows)


def _transfer(results: Results) -> str:
    """What a wider model and a longer run each do to the best rates."""
    factors = {}
    for name in CONTENDERS:
        narrow, wide, long = (_searched(CELLS[cell], name, results) for cell in (_NARROW, _WIDE, _LONG))
        by_width = wide.rate / narrow.rate if wide and narrow else None
        by_length = long.rate / wide.rate if long and wide else None
        if by_width or by_length:
            factors[name] = by_width, by_length
    rows = [(name, *(f"{each:.3g}" if each else "" for each in both)) for name, both in factors.items()]
    widths, lengths = ([each[index] for each in factors.values() if each[index]] for index in (0, 1))
    grown, longer = _WIDE.hidden / _NARROW.hidden, _LONG.all_steps / _WIDE.all_steps
    heading = ("", f"width × {grown:g}, about {_WIDE.all_steps} steps", f"steps × {longer:.2g}, width {_WIDE.hidden}")
    mup = (("*MuP*, AdamW", f"{1 / grown:g}", ""), ("*MuP*, Muon", f"{grown**-0.5:.2g}", ""))
    found = _FOUND.format(
        at_most=sum(each <= 1 / grown for each in widths),
        widths=len(widths),
        kept=sum(each == 1 for each in lengths),
        lengths=len(lengths),
    )
    return _TRANSFER + markdown(heading, [*rows, ("*same size*", "1", ""), *mup]) + found + _RULES if rows else ""


def measured_ratios(results: Results) -> dict[str, set[str]]:
    """Every type's best rates over AdamW's: those of the longer runs where there are any, else of the search above.

    Args:
        results: As recorded.
    """
    short = ((contender.name, RATES, contender.name) for contender in RATES.contenders)
    found: dict[str, set[str]] = {}
    for searches in (short, _SEARCHES):
        ratios: dict[str, set[str]] = {}
        for spelling, experiment, name in searches:
            if (search := _searched(experiment, name, results)) is not None:
                ratios.setdefault(spelling, set()).add(search.ratio)
        found |= ratios
    return found | {"MARS": found["MARS-AdamW"]} if "MARS-AdamW" in found else found


class _Searched(NamedTuple):
    """A search that is over, beside AdamW's (Adam's where there is no AdamW) in the same experiment."""

    best: Best
    rate: float
    adamw: float

    @property
    def ratio(self) -> str:
        return f"{self.rate / self.adamw:g}"


def _searched(experiment: Experiment, name: str, results: Results) -> _Searched | None:
    adam = next(one for one in experiment.contenders if one.optimizer in ("adam", "adamw"))
    contender = experiment.contender(name)
    best, base = (best_trial(experiment, one, results) for one in (contender, adam))
    if best is None or base is None:
        return None
    return _Searched(best, contender.rate(best.exponent), adam.rate(base.exponent))


def _table(rows: Iterable[str]) -> str:
    return "".join(f"| {row} |\n" for row in rows)


def _longer(results: Results) -> Iterator[str]:
    baseline = deepspeed_config("adamw")["optimizer"]["params"]["lr"]
    for spelling, experiment, name in _SEARCHES:
        found = _searched(experiment, name, results)
        cells = ("-",) * 4
        if found is not None:
            cells = (setting_words(found.best.setting), f"{found.rate:g}", f"{found.adamw:g}", found.ratio)
        ready = f"{deepspeed_config(spelling)['optimizer']['params']['lr'] / baseline:.2g}"
        yield " | ".join((spelling, experiment.name, name, *cells, ready))


def _row(contender: Contender, results: Results) -> Iterator[str]:
    figures = tried(RATES, contender, contender.settings[0], results)
    found = _searched(RATES, contender.name, results)
    yield contender.name
    if found is None:
        yield from ("not measured yet", "-", "-")
    else:
        yield from (f"{found.rate:g}", found.ratio, f"{found.best.figure:.3f}")
    yield ", ".join(f"{contender.rate(each):g}: {figures[each]:.3f}" for each in sorted(figures)) or "-"
