"""Which learning rate of ours stands for one of AdamW's: a search of each, on one task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.convergence.experiment import Contender, Experiment

__all__ = ["RATES"]

_GUESS = 4e-3
_DECAY = {"weight_decay": 0.1}


def _contender(name: str, optimizer: str, doublings: int = 0, **options: Any) -> Contender:
    # Every guess is AdamW's times a power of two: so are the quotients of the best rates, on one grid.
    settings: Mapping[str, Any] = {**_DECAY, **options}
    return Contender(name, optimizer, _GUESS * 2.0**doublings, (settings,))


def _mars(name: str, doublings: int, **options: Any) -> Contender:
    products = {"ns_dtype": "float32"} if options["variant"] in ("shampoo", "muon") else {}
    return _contender(name, "mars", doublings, **options, **products)


RATES = Experiment(
    name="LR",
    title="AdamW's learning rate and ours",
    about="0.1 M parameters in GPT-2's shape, bytes of the Python standard library; 300 steps of 16 windows of 64 "
    "bytes; gradients clipped to a norm of 1; warm-up of a twentieth, cosine to zero.",
    task={
        "kind": "language model",
        "heads": 4,
        "window": 64,
        "batch": 16,
        "clip": 1.0,
        "layers": 2,
        "hidden": 64,
    },
    steps=300,
    metric="validation_loss",
    trials=3,
    counts=0.02,
    relative=False,
    contenders=(
        _contender("AdamW", "adamw", betas=(0.9, 0.95)),
        _mars("MARS-AdamW", 1, variant="adamw"),
        _mars("MARS-Lion", -3, variant="lion"),
        _mars("MARS-Shampoo", 3, variant="shampoo"),
        _mars('MARS-Shampoo, scale="rms"', 1, variant="shampoo", scale="rms"),
        _mars("MARS-M", 1, variant="muon"),
        _contender("SONew", "sonew", betas=(0.9, 0.99)),
        _contender("LDAdam", "ldadam", 1, rank=16),
        _contender("MKOR", "mkor", 1, betas=(0.9, 0.95)),
    ),
    claims=(),
    seeds=(),
)
"""Not on the page of the papers' claims: the table is that of docs/rates.md."""
