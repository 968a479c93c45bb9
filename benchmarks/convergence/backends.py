"""MKOR beside its own backends: what the rows say where it is not lower."""

from __future__ import annotations

from benchmarks.convergence.experiment import Claim, Experiment
from benchmarks.convergence.experiments import EXPERIMENTS
from benchmarks.convergence.page import decided
from benchmarks.convergence.results import Results

__all__ = ["on_digits", "on_text"]


def on_digits(results: Results) -> str:
    """Part of E2's section.

    Args:
        results: What has been run.
    """
    sgd, ten = _Rows(EXPERIMENTS["E2"], results), "MKOR on SGD, a quarter of the best rate"
    without = ("rule ema", "no stabilizer", "no rescaling", "decay 0.5", "factors in bfloat16", "output gain 10")
    choices = "; ".join(f"{name} {sgd.of(f'MKOR on SGD, {name}', ten)}" for name in without)
    return f"""
### MKOR on SGD, which is not below SGD

- Factors renewed every ten steps: the trials pick a rate at the edge of what is stable, {sgd.of("MKOR on SGD", "SGD")}
  against SGD; at a quarter of it MKOR is level with SGD, {sgd.of(ten, "SGD")}.
- At every step: {sgd.of("MKOR on SGD, every step", "SGD")}, and seeds differ by a fraction. Every hundred:
  {sgd.of("MKOR on SGD, every 100 steps", "SGD")}. K-FAC with dense factors, every ten: {sgd.of("K-FAC on SGD", "SGD")}.
- Other choices, each at its own best rate, against MKOR every ten steps at that quarter: {choices}; without the
  first layer's factors {sgd.of("MKOR on SGD, first layer left out", ten)}. None does what updates at every step do.
- On AdamW every step brings {sgd.of("MKOR on AdamW, every step", "MKOR on AdamW")} more than every ten.
"""


def on_text(results: Results) -> str:
    """Part of E3's section.

    Args:
        results: What has been run.
    """
    text = _Rows(EXPERIMENTS["E3"], results)
    return f"""
### MKOR beside its backends on text

- On AdamW it is lower, {text.of("MKOR on AdamW", "AdamW")}, at a multiple of AdamW's rate ([rates](rates.md)). On LAMB,
  where the norm of the weights gives every step its length, it is not told from LAMB,
  {text.of("MKOR on LAMB", "LAMB")}, and its seeds differ by far more than LAMB's; why is not measured.
- Updates at every step are no help here: {text.of("MKOR on AdamW, every step", "MKOR on AdamW")}. With one decay for
  each update (0.95) factors then remember 20 steps instead of 200; with 0.995, which makes it 200 again,
  {text.of("MKOR on AdamW, every step, decay 0.995", "MKOR on AdamW")}.
- The rule: official against ema {text.of("MKOR on AdamW", "MKOR on AdamW, rule ema")}.
"""


class _Rows:
    """Differences between contenders of an experiment, in words."""

    def __init__(self, experiment: Experiment, results: Results) -> None:
        self._experiment, self._results = experiment, results

    def of(self, ours: str, than: str) -> str:
        """The mean difference and its interval."""
        words, _, _ = decided(self._experiment, Claim("", "", ours, than), self._results)
        return words or "(not run yet)"
