"""E12: what MKOR's factors could follow instead of the mean input and the mean output gradient."""

from __future__ import annotations

from typing import Any

from benchmarks.convergence.experiment import Claim, Contender, Experiment
from benchmarks.convergence.language_models import ADAMW, E3, SKETCHED

__all__ = ["E12"]

_OURS = "tried here"
_EVERY_STEP = "gradient's factors, every step"
_FOUR = "gradient's factors, four vectors"


def _factors(name: str, **options: Any) -> Contender:
    return Contender(name, "gradient factors", 1.6e-2, ({**ADAMW, **options},))


E12 = Experiment(
    name="E12",
    title="What the factors follow",
    about=(
        "The task is E3's. MKOR's factors follow the mean input and the mean output gradient of a layer, one vector a "
        "side. Here they follow random combinations of the rows and columns of the gradient itself, which its owner "
        "has anyway: nothing is captured and nothing is sent. They take one vector a side at every step with a "
        "decay of 0.995 and a gain of 0.1, or four every ten steps with 0.95 and 1, found on E9's smallest model. "
        "The last row is what became of it: MKOR's own option, with factors in bfloat16 and a longer memory, 0.998 "
        "and 0.04, which was better there."
    ),
    task=E3.task,
    steps=E3.steps,
    metric=E3.metric,
    counts=E3.counts,
    relative=E3.relative,
    contenders=(
        E3.contender("AdamW"),
        E3.contender("MKOR on AdamW"),
        _factors(_EVERY_STEP),
        _factors(_FOUR, vectors=4, interval=10, decay=0.95, gain=1.0),
        SKETCHED,
    ),
    claims=(
        Claim(_OURS, "factors of the gradient are better than MKOR's", _EVERY_STEP, "MKOR on AdamW"),
        Claim(_OURS, "factors of the gradient are better than MKOR's, at its interval", _FOUR, "MKOR on AdamW"),
        Claim(_OURS, "factors of the gradient are better than none", _EVERY_STEP, "AdamW"),
        Claim(_OURS, "factors of the gradient are better than none, at MKOR's interval", _FOUR, "AdamW"),
        Claim(_OURS, "rule sketch is better than the official one (asked afterwards)", SKETCHED.name, "MKOR on AdamW"),
        Claim(_OURS, "rule sketch is better than AdamW (asked afterwards)", SKETCHED.name, "AdamW"),
    ),
    trials=3,
)
