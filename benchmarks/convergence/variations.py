"""E11: other schedules, a larger batch and other ways of decay, at one size of E9 and with AdamW's own beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.convergence.experiment import Claim, Contender, Experiment, Options
from benchmarks.convergence.language_models import ADAMW
from benchmarks.convergence.sizes import CELLS, Cell

__all__ = ["BASE", "VARIATIONS"]

BASE: Cell = next(cell for cell in CELLS if cell.hidden == 64)
"""What is varied."""

_NAMES = ("AdamW", "Muon", "MARS-AdamW, gamma 0.025", "MARS-M", "MKOR on AdamW", "MKOR on Muon", "SOAP")
_AS_BEFORE = tuple(CELLS[BASE].contender(name) for name in _NAMES)
_INDEPENDENT = (1e-3, 4e-3)
"""Share of the weights that decays in a step at the peak: about that of decoupled decay at AdamW's and Muon's rates."""


_ADAMW = Contender("AdamW", "mars", 8e-3, ({**ADAMW, "gamma": 0.0, "clip": None, "optimize_1d": True},))
"""MARS with nothing corrected and nothing clipped: it has the option."""


def _decaying(*decays: Options) -> tuple[Contender, ...]:
    """Contenders that have the option."""
    others = [one for one in _AS_BEFORE if one.optimizer in ("mars", "mkor")]
    return tuple(
        replace(one, settings=tuple({**setting, **decay} for setting in one.settings for decay in decays))
        for one in (_ADAMW, *others)
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
    _variation("cautious", "cautious weight decay", _decaying({"weight_decay_method": "cautious"})),
    _variation(
        "independent",
        "weight decay that is independent of the learning rate",
        _decaying(*({"weight_decay_method": "independent", "weight_decay": decay} for decay in _INDEPENDENT)),
    ),
)
"""In the order of the page."""
