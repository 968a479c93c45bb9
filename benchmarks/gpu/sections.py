"""The sections by name, what each is worth, and which code its figures are of."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.gpu.items import Item, Place
from benchmarks.gpu.revisions import fingerprint

__all__ = ["SECTIONS", "code_of", "items_of", "sections_of", "worth_of"]

_STEP = ("rankwise/step", "rankwise/plan", "rankwise/states", "rankwise/kernels", "rankwise/updates")
_KERNELS = ("rankwise/kernels", "rankwise/updates")
_ROOMS = {
    "mars": ("MARS", "mars", "adamw", "lion", "newton", "products"),
    "sonew": ("SONew", "sonew"),
    "ldadam": ("LDAdam", "low-rank", "low_rank", "cholesky", "first basis"),
    "mkor": ("MKOR", "mkor", "factors", "preconditioning"),
}
"""Words in an item's name that say of which paper it is."""


class Section(NamedTuple):
    """Items of one kind.

    Attributes:
        module: Of :mod:`benchmarks.gpu`.
        function: Makes the items.
        worth: Of its items: those of more worth are measured first.
        code: Where the code is that it measures, beside the rooms that an item names.
    """

    module: str
    function: str
    worth: float
    code: tuple[str, ...]


SECTIONS = {
    "kernels-correct": Section("kernel_items", "correct_items", 6.0, (*_KERNELS, "tests/kernels")),
    "whole-steps": Section("whole_items", "whole_items", 8.0, (*_STEP, "benchmarks/gpu/whole_steps.py")),
    "kernels": Section("kernel_items", "kernel_items", 3.0, (*_KERNELS, "benchmarks/gpu/kernel_cases.py")),
    "algebra": Section("algebra_items", "algebra_items", 3.0, (*_KERNELS, "benchmarks/gpu/algebra_items.py")),
    "step": Section("step_items", "step_items", 5.0, _STEP),
    "training": Section("training_items", "training_items", 2.0, (*_STEP, "benchmarks/training.py")),
    "memory": Section("step_items", "memory_items", 3.0, _STEP),
    "steady": Section("steady_items", "steady_items", 4.0, (*_STEP, "benchmarks/gpu/steady_items.py")),
    # A failed capture can leave a device unusable for its process.
    "graphs": Section("graph_items", "graph_items", 4.5, (*_STEP, "rankwise/comm", "rankwise/fsdp")),
    "races": Section("race_items", "race_items", 3.5, (*_KERNELS, "tests/kernels")),
    "multi": Section("step_items", "multi_items", 1.0, (*_STEP, "rankwise/comm")),
}


def items_of(section: str, place: Place) -> list[Item]:
    """The items of a section."""
    found = SECTIONS[section]
    make: Callable[[Place], list[Item]] = getattr(
        importlib.import_module(f"benchmarks.gpu.{found.module}"), found.function
    )
    return make(place)


def sections_of(place: Place) -> dict[str, list[Item]]:
    """All of them."""
    return {section: items_of(section, place) for section in SECTIONS}


def worth_of(section: str, item: Item) -> float:
    """What it is worth to measure an item before others."""
    if item.worth is not None:
        return item.worth
    return SECTIONS[section].worth if section in SECTIONS else 0.0


def code_of(section: str, name: str) -> str:
    """Fingerprint of what an item measures: the section's code, and the rooms of the papers that its name names.

    Args:
        section: The section.
        name: Of the item; where it names no paper, all of them count that the section's code does not contain.
    """
    rooms = [room for room, words in _ROOMS.items() if any(word in name for word in words)]
    places = SECTIONS[section].code if section in SECTIONS else ()
    return fingerprint((*places, *(f"rankwise/{room}" for room in rooms)))
