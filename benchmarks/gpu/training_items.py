"""Section "training": whole steps of many tokens, and what of them is the optimizer's."""

from __future__ import annotations

from functools import partial

from benchmarks.contenders import Contender
from benchmarks.gpu.items import Figure, Found, Item, Place
from benchmarks.gpu.step_items import ours
from benchmarks.training import measure_training

__all__ = ["training_items"]

_TOKENS = 1 << 17  # Of one rank: 8 M tokens on 64 of them.
# Of a training step: 1 % for rules of elements, 2 % for those with products.
_ELEMENTWISE = ("MARS-AdamW", "MARS-Lion", "SONew, diagonal", "SONew, tridiagonal")


def training_items(place: Place) -> list[Item]:
    """Each type beside fused AdamW."""
    return [Item(contender.name, 8.0, partial(_training, place, contender)) for contender in ours(place)]


def _training(place: Place, contender: Contender) -> Found:
    tokens = 512 if place.tiny else _TOKENS
    (row,) = measure_training(place.device, tokens, 3, [contender.name], tiny=place.tiny)
    row |= {"model": "gpt2-small training", **place.about}
    goal = 1.0 if contender.name in _ELEMENTWISE else 2.0
    share = 100 * row["optimizer_seconds"] / row["seconds"]
    figures = [
        Figure("training step", row["seconds"], "s"),
        Figure("over AdamW's", row["ratio"], "x", 0.9 if place.on_cuda else None, 1.1 if place.on_cuda else None),
        Figure("optimizer", share, "% of the step", None, 2 * goal if place.on_cuda else None, goal=goal),
        Figure("tokens", row["tokens"] / row["seconds"], "a second"),
    ]
    return Found(figures, [row])
