"""E11: other schedules, a larger batch and other ways of decay, at one size of E9 and with AdamW's own beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.convergence.experiment import Claim, Contender, Experiment
from benchmarks.convergence.language_models import ADAMW
from benchmarks.convergence.sizes import CELLS, Cell

__all__ = ["BASE", "VARIATIONS"]

BASE: Cell = next(cell for cell in CELLS if cell.hidden == 64)
"""What is varied."""

_NAMES = ("AdamW", "Muon", "MARS-AdamW, gamma 0.025", "MARS-M", "MKOR on AdamW", "MKOR on Muon", "SOAP")
_AS_BEFORE = tuple(CELLS[BASE].contender(name) for name in _NAMES)
_INDEPENDENT = (1e-3, 4e-3)
"""Of weights, a step at the peak: about what decoupled decay takes at the rates of AdamW and of Muon."""


def _decaying(settings: Sequence[Mapping[str, Any]]) -> tuple[Contender, ...]:
    """Those that have the option; MARS with nothing corrected and nothing clipped is AdamW."""

    def every(**options: Any) -> tuple[Mapping[str, Any], ...]:
        return tuple({**ADAMW, **options, **setting} for setting in settings)

    return (
        Contender("AdamW", "mars", 8e-3, every(gamma=0.0, clip=None, optimize_1d=True)),
        Contender("MARS-AdamW, gamma 0.025", "mars", 1.6e-2, every(gamma=0.025)),
        Contender("MARS-M", "mars", 2e-2, every(variant="muon", gamma=0.025, ns_dtype="float32")),
        Contender("MKOR on AdamW", "mkor", 8e-3, every()),
    )


def _variation(
    name: str,
    title: str,
    contenders: tuple[Contender, ...] = _AS_BEFORE,
    steps: int = BASE.all_steps,
    **task: Any,
) -> Experiment:
    others = [contender.name for contender in contenders[1:]]
    return Experiment(
        name=f"E11-{name}",
        title=title,
        about=f"As {BASE.name}, but for this. {steps:,} steps.",
        task={**BASE.task, **task},
        steps=steps,
        metric="validation_loss",
        counts=0.01,
        relative=False,
        contenders=contenders,
        claims=tuple(Claim("", f"{other} is lower than AdamW", other, "AdamW") for other in others),
        trials=3,
        seeds=(1, 2, 3),
    )


VARIATIONS = (
    _variation("WSD", "warm-up, stable, and a linear decay over the last fifth", schedule="wsd"),
    _variation("batch", "four times the batch", steps=BASE.all_steps // 4, batch=4 * BASE.task["batch"]),
    _variation("cautious", "cautious weight decay", _decaying([{"weight_decay_method": "cautious"}])),
    _variation(
        "independent",
        "weight decay that is independent of the learning rate",
        _decaying([{"weight_decay_method": "independent", "weight_decay": decay} for decay in _INDEPENDENT]),
    ),
)
"""In the order of the page."""
