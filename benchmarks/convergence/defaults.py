"""Which default rests on which row: values read from the options themselves, verdicts from the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.convergence.experiment import Claim
from benchmarks.convergence.experiments import EXPERIMENTS
from benchmarks.convergence.page import anchor, decided, shown_value
from benchmarks.convergence.results import Results
from benchmarks.performance import markdown
from rankwise.names import BY_SPELLING

__all__ = ["DEFAULTS", "Default", "defaults_section"]


@dataclass(frozen=True)
class Default:
    """A default and the comparisons it rests on.

    Attributes:
        type: Spelling of the type.
        option: Its key.
        experiment: Whose claims they are.
        rows: Contenders of the claims, ours and the other.
    """

    type: str
    option: str
    experiment: str
    rows: tuple[tuple[str, str], ...]

    @property
    def value(self) -> Any:
        """What it is today."""
        return BY_SPELLING[self.type].optimizer.options_type.table()[self.option].default

    def claims(self) -> list[Claim]:
        """Those of its rows.

        Raises:
            ValueError: A row is no claim.
        """
        known = {(claim.ours, claim.than): claim for claim in EXPERIMENTS[self.experiment].claims}
        if absent := [row for row in self.rows if row not in known]:
            raise ValueError(f"{self.experiment} has no claim about {absent}")
        return [known[row] for row in self.rows]


def _against(ours: str, *others: str) -> tuple[tuple[str, str], ...]:
    return tuple((ours, f"{ours}, {other}") for other in others)


_SONEW, _MARS, _AS_ADAMW = "SONew, band 1", "MARS-AdamW", "MARS-AdamW, AdamW's betas"
_LDADAM, _SGD, _ADAMW = "LDAdam, rank d/4", "MKOR on SGD", "MKOR on AdamW"

DEFAULTS: Sequence[Default] = (
    Default("SONew", "band", "E1", ((_SONEW, "SONew, band 0"), ("SONew, band 4", _SONEW))),
    Default("SONew", "graft", "E1", _against(_SONEW, "no graft", "graft rmsprop")),
    Default("SONew", "chain", "E1", _against(_SONEW, "one chain")),
    Default("SONew", "gamma", "E1", _against(_SONEW, "no edge dropped")),
    Default("MARS-AdamW", "betas", "E4", ((_MARS, "AdamW"), (_AS_ADAMW, "AdamW"))),
    Default(
        "MARS-AdamW",
        "gamma",
        "E4",
        (
            *_against(_MARS, "gamma 0", "gamma 0.05"),
            (_AS_ADAMW, f"{_MARS}, gamma 0"),
            (_AS_ADAMW, f"{_MARS}, gamma 0.05"),
        ),
    ),
    Default("MARS-AdamW", "clip", "E4", (*_against(_MARS, "no clip"), (_AS_ADAMW, f"{_MARS}, no clip"))),
    Default("MARS-AdamW", "exact", "E4", _against(_MARS, "exact")),
    Default("MARS-M", "gamma", "E4", _against("MARS-M", "gamma 0")),
    Default("LDAdam", "error_feedback", "E5", _against(_LDADAM, "no error feedback")),
    Default(
        "LDAdam", "error_dtype", "E5", ((f"{_LDADAM}, buffer bfloat16", _LDADAM), (f"{_LDADAM}, buffer int8", _LDADAM))
    ),
    Default("MKOR", "backend", "E2", ((_ADAMW, "AdamW"), ("MKOR on LAMB", "LAMB"), (_SGD, "SGD"))),
    Default("MKOR", "backend", "E3", ((_ADAMW, "AdamW"), ("MKOR on LAMB", "LAMB"))),
    Default("MKOR", "update_interval", "E2", ((f"{_SGD}, every step", _SGD), (f"{_ADAMW}, every step", _ADAMW))),
    Default("MKOR", "update_interval", "E3", ((f"{_ADAMW}, every step", _ADAMW),)),
    Default("MKOR", "rule", "E2", _against(_SGD, "rule ema")),
    Default("MKOR", "rule", "E3", _against(_ADAMW, "rule ema")),
    Default(
        "MKOR",
        "factor_dtype",
        "E2",
        ((f"{_ADAMW}, factors in bfloat16", _ADAMW), (f"{_SGD}, factors in bfloat16", _SGD)),
    ),
    Default("MKOR", "factor_decay", "E2", _against(_SGD, "decay 0.5")),
    Default("MKOR", "stabilizer", "E2", _against(_SGD, "no stabilizer")),
    Default("MKOR", "rescale", "E2", _against(_SGD, "no rescaling")),
    Default("MKOR", "output_gain", "E2", _against(_SGD, "output gain 10")),
    Default("MKOR", "exclude", "E2", _against(_SGD, "first layer left out")),
    Default("MKOR-H", "hybrid", "E3", (("MKOR-H on AdamW", _ADAMW),)),
)
"""In the order of the page."""

_HEAD = """
## What the defaults rest on

Values are those of the options today; rows are decided as the claims above are. Where nothing is settled a default is
what the paper or its code has.

"""


def defaults_section(results: Results) -> str:
    """Part of the page.

    Args:
        results: What has been run.
    """
    headings = ("type", "option", "default", "row", "difference, 95 % interval", "verdict")
    return _HEAD + markdown(headings, [row for default in DEFAULTS for row in _rows(default, results)])


def _rows(default: Default, results: Results) -> Iterator[Sequence[str]]:
    experiment = EXPERIMENTS[default.experiment]
    for claim in default.claims():
        difference, _, verdict = decided(experiment, claim, results)
        row = f"[{experiment.name}](#{anchor(experiment)}): {claim.text}"
        yield default.type, f"`{default.option}`", f"`{shown_value(default.value)}`", row, difference, verdict
