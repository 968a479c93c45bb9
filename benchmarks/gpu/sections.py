"""The sections by name, in the order in which a first session on a device should take them."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from benchmarks.gpu.items import Item, Place

__all__ = ["SECTIONS", "items_of", "sections_of"]

SECTIONS = {
    "kernels-correct": ("kernel_items", "correct_items"),
    "kernels": ("kernel_items", "kernel_items"),
    "algebra": ("algebra_items", "algebra_items"),
    "step": ("step_items", "step_items"),
    "training": ("training_items", "training_items"),
    "memory": ("step_items", "memory_items"),
    # A failed capture can leave a device unusable for its process.
    "graphs": ("step_items", "graph_items"),
    "multi": ("step_items", "multi_items"),
}
"""The module and the function that makes the items."""


def items_of(section: str, place: Place) -> list[Item]:
    """The items of a section."""
    module, name = SECTIONS[section]
    make: Callable[[Place], list[Item]] = getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)
    return make(place)


def sections_of(place: Place) -> dict[str, list[Item]]:
    """All of them."""
    return {section: items_of(section, place) for section in SECTIONS}
