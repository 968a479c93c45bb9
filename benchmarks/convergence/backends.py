"""MKOR beside its own backends: what the rows say where it is not lower."""

from __future__ import annotations

from benchmarks.convergence.experiment import Claim, Experiment
from benchmarks.convergence.experiments import EXPERIMENTS
from benchmarks.convergence.page import decided, seeds_loss
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
### MKOR on SGD and on LAMB

- On SGD, with factors renewed every ten steps, MKOR differs from SGD by {sgd.of("MKOR on SGD", "SGD")} at the rate that
  the trials picked, where fresh seeds lie far apart, and by {sgd.of(ten, "SGD")} at a quarter of it.
- With factors renewed at every step it differs by {sgd.of("MKOR on SGD, every step", "SGD")}, with a narrow spread;
  every hundred steps by {sgd.of("MKOR on SGD, every 100 steps", "SGD")}. K-FAC with dense factors, renewed
  every ten steps, differs by {sgd.of("K-FAC on SGD", "SGD")}.
- Other choices, each at its own best rate, against MKOR every ten steps at that quarter: {choices}; without the
  first layer's factors {sgd.of("MKOR on SGD, first layer left out", ten)}.
- On AdamW, factors renewed at every step differ from factors renewed every ten by
  {sgd.of("MKOR on AdamW, every step", "MKOR on AdamW")}.
- LAMB alone ends at one and the same loss whatever the seed ({sgd.loss("LAMB")}): it gives the mean image and has not
  trained. The rows against it say that MKOR on LAMB trains, and not by how much it is better.
"""


def on_text(results: Results) -> str:
    """Part of E3's section.

    Args:
        results: What has been run.
    """
    text = _Rows(EXPERIMENTS["E3"], results)
    return f"""
### MKOR beside its backends on text

- MKOR on AdamW differs from AdamW by {text.of("MKOR on AdamW", "AdamW")}, at a multiple of its
  rate ([rates](rates.md)). On LAMB, where the norm of the weights gives every step its length, the difference is
  {text.of("MKOR on LAMB", "LAMB")}, with seeds far apart. The reason was not measured.
- Updates at every step differ from updates every ten steps by
  {text.of("MKOR on AdamW, every step", "MKOR on AdamW")}. With one decay for
  each update (0.95) factors then remember 20 steps instead of 200. A decay of 0.995 makes it 200 again:
  {text.of("MKOR on AdamW, every step, decay 0.995", "MKOR on AdamW")}.
- The rule `official` differs from `ema` by {text.of("MKOR on AdamW", "MKOR on AdamW, rule ema")}.
"""


class _Rows:
    """Differences between contenders of an experiment, in words."""

    def __init__(self, experiment: Experiment, results: Results) -> None:
        self._experiment, self._results = experiment, results

    def of(self, ours: str, than: str) -> str:
        """The mean difference and its interval."""
        words, _, _ = decided(self._experiment, Claim("", "", ours, than), self._results)
        return words or "(not run yet)"

    def loss(self, name: str) -> str:
        """A contender's mean over fresh seeds, and its interval."""
        return seeds_loss(self._experiment, self._experiment.contender(name), self._results) or "(not run yet)"
