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
        contender: The one that has the default.
        rows: Contenders of the claims, ours and the other.
    """

    type: str
    option: str
    experiment: str
    contender: str
    rows: tuple[tuple[str, str], ...]

    @property
    def value(self) -> Any:
        """What it is today."""
        named = BY_SPELLING[self.type]
        return named.optimizer.options_type(**named.preset).value_of(self.option)

    def side(self, claim: Claim, verdict: str) -> str:
        """What a decided claim says of the default: "for it", "against it", or "neither"."""
        if self.contender not in (claim.ours, claim.than) or verdict not in ("holds", "does not hold"):
            return "neither"
        if (verdict == "holds") == (self.contender == claim.ours):
            return "for it"
        # Not lower is no worse, and no worse is not lower.
        beaten = claim.kind == ("less" if verdict == "holds" else "no worse")
        return "against it" if beaten else "neither"

    def claims(self) -> list[Claim]:
        """Claims of its rows.

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
_LDADAM, _SGD, _ADAMW = "LDAdam, rank d/4", "MKOR on SGD, a quarter of the best rate", "MKOR on AdamW"


def _sgd(option: str, other: str) -> Default:
    return Default("MKOR", option, "E2", _SGD, ((_SGD, f"MKOR on SGD, {other}"),))


DEFAULTS: Sequence[Default] = (
    Default("SONew", "band", "E1", _SONEW, ((_SONEW, "SONew, band 0"), ("SONew, band 4", _SONEW))),
    Default("SONew", "graft", "E1", _SONEW, _against(_SONEW, "no graft", "graft rmsprop")),
    Default("SONew", "chain", "E1", _SONEW, _against(_SONEW, "one chain")),
    Default("SONew", "gamma", "E1", _SONEW, _against(_SONEW, "no edge dropped")),
    Default("MARS-AdamW", "betas", "E4", _MARS, ((_MARS, "AdamW"), (_MARS, _AS_ADAMW))),
    Default("MARS-AdamW", "gamma", "E4", _MARS, _against(_MARS, "gamma 0", "gamma 0.05")),
    Default(
        *("MARS-AdamW", "gamma", "E4", _AS_ADAMW),
        ((_AS_ADAMW, f"{_MARS}, gamma 0"), (_AS_ADAMW, f"{_MARS}, gamma 0.05")),
    ),
    Default("MARS-AdamW", "clip", "E4", _MARS, _against(_MARS, "no clip")),
    Default("MARS-AdamW", "clip", "E4", _AS_ADAMW, ((_AS_ADAMW, f"{_MARS}, no clip"),)),
    Default("MARS-AdamW", "exact", "E4", _MARS, _against(_MARS, "exact")),
    Default("MARS-M", "gamma", "E4", "MARS-M", _against("MARS-M", "gamma 0")),
    Default("LDAdam", "error_feedback", "E5", _LDADAM, _against(_LDADAM, "no error feedback")),
    Default(
        *("LDAdam", "error_dtype", "E5", _LDADAM),
        ((f"{_LDADAM}, buffer bfloat16", _LDADAM), (f"{_LDADAM}, buffer int8", _LDADAM)),
    ),
    Default("MKOR", "backend", "E2", _ADAMW, ((_ADAMW, "MKOR on LAMB"), (_ADAMW, "MKOR on SGD"))),
    Default("MKOR", "backend", "E3", _ADAMW, ((_ADAMW, "MKOR on LAMB"),)),
    Default("MKOR", "update_interval", "E2", "MKOR on SGD", (("MKOR on SGD, every step", "MKOR on SGD"),)),
    Default("MKOR", "update_interval", "E2", _ADAMW, ((f"{_ADAMW}, every step", _ADAMW),)),
    Default(
        *("MKOR", "update_interval", "E3", _ADAMW),
        ((f"{_ADAMW}, every step", _ADAMW), (f"{_ADAMW}, every step, decay 0.995", _ADAMW)),
    ),
    _sgd("rule", "rule ema"),
    Default("MKOR", "rule", "E3", _ADAMW, _against(_ADAMW, "rule ema")),
    *(
        Default(
            "MKOR", "factor_dtype", "E2", f"{start}, factors in bfloat16", ((f"{start}, factors in bfloat16", base),)
        )
        for start, base in ((_ADAMW, _ADAMW), ("MKOR on SGD", _SGD))
    ),
    _sgd("factor_decay", "decay 0.5"),
    _sgd("stabilizer", "no stabilizer"),
    _sgd("rescale", "no rescaling"),
    _sgd("output_gain", "output gain 10"),
    _sgd("exclude", "first layer left out"),
    Default("MKOR-H", "hybrid", "E3", "MKOR-H on AdamW", (("MKOR-H on AdamW", _ADAMW),)),
)
"""In the order of the page."""

_HEAD = """
## What the defaults rest on

Values are those of the options today; rows are decided as the claims above are, and the last column says what each says
of the default. Where nothing is settled a default is what the paper or its code has, or ours with a reason
([deviations](deviations.md)). SONew's rows have an `eps` of 1e-4, the best there, where the default is 1e-8. Options
that are not here were not compared.

"""


def defaults_section(results: Results) -> str:
    """Part of the page.

    Args:
        results: What has been run.
    """
    headings = ("type", "option", "default", "row", "difference, 95 % interval", "verdict", "speaks")
    return _HEAD + markdown(headings, [row for default in DEFAULTS for row in _rows(default, results)])


def _rows(default: Default, results: Results) -> Iterator[Sequence[str]]:
    experiment = EXPERIMENTS[default.experiment]
    for claim in default.claims():
        difference, _, verdict = decided(experiment, claim, results)
        row = f"[{experiment.name}](#{anchor(experiment)}): {claim.text}"
        side = default.side(claim, verdict.strip("*"))
        yield default.type, f"`{default.option}`", f"`{shown_value(default.value)}`", row, difference, verdict, side
