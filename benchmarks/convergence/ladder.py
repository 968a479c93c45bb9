"""E13: the same contenders at 1, 4, 16 and 124 M parameters, on a device; rates are searched below and carried up.

A rung below these, of 0.3 M parameters, is what CPUs reach: it has E9's largest model with the ladder's batch and text.

All rules were stated before the first run:

- *Batch*: tokens of a step grow with the square root of the parameters, from 64 windows of 256 bytes at 1 M, in
  multiples of 16 windows.
- *Rates* are searched up to 4 M. Above, each contender has its best rate of 4 M times 256 over the width: E9's best
  rates halved or more where the width doubled, and hardly moved where only the run was longer.
- *Decay*: the share of a weight that decays in a step at the peak is the rate times the coefficient. With a coefficient
  of 0.1 everywhere that share goes with 1 / width, as arXiv 2512.05620 advises. Beside it, for three contenders, the
  share stays as it was at 4 M: the coefficient grows with the width.
- *Seeds*: one for trials, three fresh ones to 4 M, one above.
- *Order*: AdamW, Muon, MARS-M and MKOR's sketch come first, one size after the other: rates at 1 M and all seeds there,
  then rates and seeds at 4 M, so that a short session ends with verdicts on few and not with trials of everybody. Then
  come the trials of the others, one run of everybody at each size, the others' further seeds, and the longest last.
- *Devices*: runs of a CPU and of a GPU are two experiments; neither uses the other's rates or runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.convergence.corpus import NAME
from benchmarks.convergence.experiment import Claim, Contender, Experiment
from benchmarks.convergence.language_models import ADAMW, SKETCHED
from benchmarks.convergence.results import Results
from benchmarks.convergence.search import best_trial

__all__ = ["ANCHOR", "CONTENDERS", "FIRST", "LARGEST", "RUNGS", "STEADY", "Rung", "experiment_of", "ladder"]

_FIRST_BATCH, _FIRST_WINDOW, _MULTIPLE = 64, 256, 16
LARGEST = ("AdamW", "MARS-M", SKETCHED.name)
"""Who is run at 124 M."""
FIRST = ("AdamW", "Muon", "MARS-M", SKETCHED.name)
"""Whose verdicts come before the trials of the others."""
STEADY = ", share of decay kept"
"""Suffix of those whose share of decay stays the same as the width grows."""


@dataclass(frozen=True)
class Rung:
    """A size and a length.

    Attributes:
        size: Size in words.
        layers: Layers of the model.
        hidden: Its width.
        heads: Heads of attention.
        each: Tokens of text per parameter.
        window: Tokens of a sample.
        tokens: See :class:`benchmarks.convergence.tasks.Decoder`.
        vocabulary: Rows of the embedding.
        searched: Whether rates are searched here, with three fresh seeds; else they are carried up, with one.
        names: Who is run; empty for everybody.
        parts: Parts of a batch that go through the model one after the other.
    """

    size: str
    layers: int
    hidden: int
    heads: int
    each: int = 20
    window: int = 256
    tokens: str = "bytes"
    vocabulary: int = 256
    searched: bool = False
    names: tuple[str, ...] = ()
    parts: int = 1

    @property
    def name(self) -> str:
        """Name of its experiment."""
        return f"E13-{self.size}" + ("-5" if self.each == 5 else "")

    @property
    def parameters(self) -> int:
        """Parameters of its model."""
        blocks = self.layers * (12 * self.hidden**2 + 13 * self.hidden)
        return blocks + (self.vocabulary + self.window + 2) * self.hidden

    @property
    def batch(self) -> int:
        """Windows of a step, by the rule."""
        grown = _FIRST_BATCH * _FIRST_WINDOW * (self.parameters / RUNGS[0].parameters) ** 0.5
        return max(1, round(grown / self.window / _MULTIPLE)) * _MULTIPLE

    @property
    def steps(self) -> int:
        """Steps of a run."""
        return round(self.each * self.parameters / (self.batch * self.window))

    @property
    def task(self) -> Mapping[str, Any]:
        """Task of its runs."""
        model = {"kind": "decoder", "layers": self.layers, "hidden": self.hidden, "heads": self.heads}
        data = {"window": self.window, "batch": self.batch, "corpus": NAME, "tokens": self.tokens}
        return {**model, **data, "clip": 1.0, "products": "bfloat16", "parts": self.parts}


RUNGS = (
    Rung("1M", 5, 128, 4, searched=True),
    Rung("4M", 5, 256, 4, searched=True),
    Rung("16M", 5, 512, 8, each=5),
    Rung("124M", 12, 768, 12, 1, 1024, "bpe 50257", 50304, names=LARGEST, parts=22),
    Rung("16M", 5, 512, 8),
    Rung("0.3M", 5, 64, 2, searched=True),
)
"""The rule's first, then the cheapest, but for the longest; last the one for CPUs."""
ANCHOR = RUNGS[1]
"""Where rates are searched last."""


def _contenders(width: int) -> tuple[Contender, ...]:
    """All of them, with the rates at which the search begins at the smallest size.

    Args:
        width: Width of the model: LDAdam's rank is a quarter of it.
    """
    ldadam = {"rank": width // 4, "weight_decay": 0.1, "error_dtype": "int8"}
    return (
        Contender("AdamW", "adamw", 4e-3, ({**ADAMW, "fused": True},)),
        Contender("Muon", "muon", 1.6e-2, ({"momentum": 0.9, "weight_decay": 0.1},)),
        Contender("MARS-M", "mars", 3.2e-2, ({**ADAMW, "variant": "muon", "gamma": 0.025},)),
        Contender(SKETCHED.name, "mkor", 1.6e-2, SKETCHED.settings),
        Contender("MKOR on AdamW", "mkor", 8e-3, (ADAMW,)),
        Contender("SOAP", "soap", 8e-3, (ADAMW,)),
        Contender("SONew", "sonew", 8e-3, ({**ADAMW, "eps": 1e-8},)),
        Contender("LDAdam, rank d/4, buffer int8", "ldadam", 3.2e-2, (ldadam,)),
        Contender("MARS-AdamW, gamma 0.025", "mars", 8e-3, ({**ADAMW, "gamma": 0.025},)),
    )


CONTENDERS = tuple(one.name for one in _contenders(128))
"""Their names, AdamW first."""


def ladder(results: Results) -> dict[str, Experiment]:
    """The experiments by name, as far as the results determine them.

    Args:
        results: What has been run: above 4 M a contender is there once its search at 4 M is over.
    """
    return {rung.name: experiment_of(rung, results) for rung in RUNGS}


def experiment_of(rung: Rung, results: Results) -> Experiment:
    """A rung's experiment.

    Args:
        rung: Which.
        results: What has been run, see :func:`ladder`.
    """
    contenders = _contenders(rung.hidden)
    if rung.searched:
        narrower = RUNGS[0].hidden / rung.hidden
        contenders = tuple(_at(one, one.guess * narrower) for one in contenders)
    else:
        contenders = _carried(rung, contenders, results)
    names = [one.name for one in contenders]
    return Experiment(
        name=rung.name,
        title=f"{rung.parameters / 1e6:.3g} M parameters, {rung.each} {_unit(rung)} each",
        about=(
            f"{rung.layers} layers of width {rung.hidden}, {rung.steps:,} steps of {rung.batch} windows of "
            f"{rung.window} {_unit(rung)}."
        ),
        task=rung.task,
        steps=rung.steps,
        metric="validation_loss",
        counts=0.01,
        relative=False,
        contenders=contenders,
        claims=tuple(Claim("", f"{name} is lower than AdamW", name, "AdamW") for name in names if name != "AdamW"),
        trials=3 if rung.searched else 1,
        trial_seeds=(0,) if rung.searched else (1,),
        seeds=(1, 2, 3) if rung.searched else (1,),
    )


def _unit(rung: Rung) -> str:
    return "bytes" if rung.tokens == "bytes" else "tokens"


def _carried(rung: Rung, contenders: tuple[Contender, ...], results: Results) -> tuple[Contender, ...]:
    """Those whose best rate is known where it was searched last, each with what the rule makes of it."""
    below, wider = experiment_of(ANCHOR, results), rung.hidden / ANCHOR.hidden
    found = []
    for one in contenders:
        best = best_trial(below, below.contender(one.name), results)
        if best is None or (rung.names and one.name not in rung.names):
            continue
        rate = below.contender(one.name).rate(best.exponent) / wider
        found.append(_at(one, rate))
        if one.name in LARGEST and not rung.names:
            (setting,) = one.settings
            steady = {**setting, "weight_decay": setting["weight_decay"] * wider}
            found.append(Contender(one.name + STEADY, one.optimizer, rate, (steady,)))
    return tuple(found)


def _at(contender: Contender, rate: float) -> Contender:
    return Contender(contender.name, contender.optimizer, rate, contender.settings)
