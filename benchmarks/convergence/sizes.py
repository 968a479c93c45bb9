"""E9: the same comparison at several sizes and lengths, to see what remains of a difference as models grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.convergence.experiment import Claim, Contender, Experiment
from benchmarks.convergence.language_models import ADAMW, LONG_MEMORY, SKETCHED, SMALL_MODEL

__all__ = ["CELLS", "CONTENDERS", "Cell"]

_PUBLISHED = {"betas": (0.95, 0.99), "weight_decay": 0.1, "gamma": 0.025}
_BYTES_OF_A_STEP = SMALL_MODEL["batch"] * SMALL_MODEL["window"]


@dataclass(frozen=True)
class Cell:
    """A size and a length.

    Attributes:
        layers: Layers of the model.
        hidden: Its width.
        parameters: Its parameters.
        bytes_each: Bytes of training text per parameter.
        steps: Optimizer steps; by default as many as that takes.
    """

    layers: int
    hidden: int
    parameters: int
    bytes_each: int = 20
    steps: int = 0

    @property
    def size(self) -> str:
        """Size in millions of parameters, for names."""
        return f"{self.parameters / 1e6:.2g}M"

    @property
    def name(self) -> str:
        """Name of its experiment."""
        return f"E9-{self.size}" + ("" if self.bytes_each == 20 else f"-{self.bytes_each}")

    @property
    def all_steps(self) -> int:
        """Steps of a run."""
        return self.steps or round(self.bytes_each * self.parameters / _BYTES_OF_A_STEP)

    @property
    def task(self) -> Mapping[str, Any]:
        """Task of its runs."""
        return {**SMALL_MODEL, "layers": self.layers, "hidden": self.hidden}


def _mars(name: str, guess: float, **options: Any) -> Contender:
    return Contender(name, "mars", guess, ({**ADAMW, **options},))


def _contenders(width: int) -> tuple[Contender, ...]:
    """All of them.

    Args:
        width: Width of the model: LDAdam's rank is a quarter of it.
    """
    # With the settings of E3 to E5: a run that is the same is done once.
    return (
        Contender("AdamW", "adamw", 8e-3, (ADAMW,)),
        Contender("Muon", "muon", 2e-2, ({"momentum": 0.9, "weight_decay": 0.1},)),
        _mars("MARS-AdamW, gamma 0.025", 1.6e-2, gamma=0.025),
        _mars("MARS-AdamW, gamma 0.05", 1.6e-2, gamma=0.05),
        Contender("MARS-AdamW, published betas", "mars", 3.2e-2, (_PUBLISHED,), afterwards=True),
        _mars("MARS-M", 2e-2, variant="muon", gamma=0.025, ns_dtype="float32"),
        Contender("MKOR on AdamW", "mkor", 8e-3, (ADAMW,)),
        Contender(LONG_MEMORY, "mkor", 1.6e-2, ({**ADAMW, "update_interval": 1, "factor_decay": 0.995},)),
        SKETCHED,
        Contender("MKOR on Muon", "mkor and muon", 2e-2, ({"momentum": 0.9, "weight_decay": 0.1},)),
        Contender("SOAP", "soap", 8e-3, (ADAMW,)),
        Contender("LDAdam, rank d/4, buffer int8", "ldadam", 1.6e-2, (_ldadam(width // 4),)),
        Contender("SONew", "sonew", 8e-3, tuple({**ADAMW, "eps": eps} for eps in (1e-8, 1e-6, 1e-4))),
    )


def _ldadam(rank: int) -> Mapping[str, Any]:
    return {"rank": rank, "weight_decay": 0.1, "error_dtype": "int8"}


CONTENDERS = tuple(contender.name for contender in _contenders(64))
"""Their names, AdamW first."""

CELLS = {
    cell: Experiment(
        name=cell.name,
        title=f"{cell.size} parameters, {cell.bytes_each} bytes each",
        about=f"{cell.layers} layers of width {cell.hidden} in GPT-2's shape, {cell.all_steps:,} steps.",
        task=cell.task,
        steps=cell.all_steps,
        metric="validation_loss",
        counts=0.01,
        relative=False,
        contenders=_contenders(cell.hidden),
        claims=tuple(Claim("", f"{name} is lower than AdamW", name, "AdamW") for name in CONTENDERS[1:])
        + tuple(Claim("", f"{ours} is lower than Muon", ours, "Muon") for ours in ("MARS-M", "MKOR on Muon")),
        trials=3,
        seeds=(1, 2, 3),
    )
    for cell in (
        Cell(2, 48, 75_072),
        Cell(2, 64, 124_672, steps=1220),
        Cell(2, 96, 260_736, 5),
        Cell(2, 96, 260_736, steps=2550),
        Cell(4, 144, 1_058_400),
        Cell(2, 96, 260_736, 80),
    )
}
"""Experiments by size and length, the cheapest first."""
