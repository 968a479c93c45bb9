"""docs/rates.md: AdamW's learning rate and ours, from the results of the searches."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.convergence.experiment import Contender
from benchmarks.convergence.rates import ADAMW, RATES
from benchmarks.convergence.results import Results
from benchmarks.convergence.search import best_trial, tried

__all__ = ["rates_page"]

_HEAD = """# AdamW's learning rate and ours

Made by `python -m benchmarks rates` from `docs/data/convergence/LR.jsonl`, which
`python -m benchmarks convergence --only LR` goes on with. {about}
Every type with weight decay 0.1 and its default options (AdamW and MKOR: betas 0.9 and 0.95; LDAdam: rank 16), one
seed; rates in factors of two until the best is inside. **One small model: a place to begin a search, no result.**

| type | best lr | over AdamW's | loss there | losses by lr |
| --- | --- | --- | --- | --- |
"""


def rates_page(results: Results) -> str:
    """The page; a search that is not over is said to be none.

    Args:
        results: As recorded.
    """
    rows = [" | ".join(_row(contender, results)) for contender in RATES.contenders]
    return _HEAD.format(about=RATES.about) + "".join(f"| {row} |\n" for row in rows)


def _row(contender: Contender, results: Results) -> Iterator[str]:
    figures = tried(RATES, contender, contender.settings[0], results)
    best, base = (best_trial(RATES, one, results) for one in (contender, RATES.contender(ADAMW)))
    yield contender.name
    if best is None or base is None:
        yield from ("not measured yet", "-", "-")
    else:
        rate = _rate(contender, best.exponent)
        yield from (f"{rate:g}", f"{rate / _rate(RATES.contender(ADAMW), base.exponent):g}", f"{best.figure:.3f}")
    yield ", ".join(f"{_rate(contender, each):g}: {figures[each]:.3f}" for each in sorted(figures)) or "-"


def _rate(contender: Contender, exponent: int) -> float:
    return contender.guess * 2.0**exponent
