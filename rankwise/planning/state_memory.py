"""Memory of states by rank, of ranks that need not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rankwise.kernels.quantization import QUANTIZED, quantized_length
from rankwise.planning.declared import Declared
from rankwise.planning.unit import StepUnit
from rankwise.sharding import MatrixTask, keepers_of

__all__ = ["Lendable", "element_states", "keepers_in"]

Lendable = Callable[[MatrixTask], Mapping[str, int]]
"""Bytes of those states of a matrix that another rank than its owner may keep between steps, by name."""


def element_states(declared: Declared, unit: StepUnit) -> Iterable[tuple[Mapping[int, int], int, int, int]]:
    """What keys keep that are held alike.

    Args:
        declared: The optimizer's states.
        unit: Whose keys.

    Returns:
        Their elements by rank, how many keys those are, bytes of state for each element, and states in 8 bits.
    """
    found: dict[int, tuple[Mapping[int, int], int, int, int]] = {}
    for key in unit.layout.shapes:
        group = unit.planned_groups[unit.group_position[key]]
        states = declared.element_states(unit.infos[key], unit.routes[key].rule, group)
        quantized = sum(dtype == QUANTIZED for dtype in states.values())
        width = sum((dtype or unit.dtype).itemsize for dtype in states.values() if dtype != QUANTIZED)
        elements = unit.layout.elements(key)
        # They are kept here, so that no other has the same number.
        _, count, total, others = found.get(id(elements), (elements, 0, 0, 0))
        found[id(elements)] = (elements, count + 1, total + width, others + quantized)
    return found.values()


def keepers_in(
    declared: Declared,
    unit: StepUnit,
    tasks: Sequence[MatrixTask],
    lendable: Lendable,
    owners: Mapping[str, int],
    given: Mapping[Any, int],
) -> dict[tuple[str, str], int]:
    """See :func:`rankwise.sharding.keepers_of`; beside matrices, ranks hold the states of elements.

    Args:
        declared: The optimizer's states.
        unit: Of the matrices.
        tasks: Of one rank each.
        lendable: Their states.
        owners: Theirs.
        given: Who keeps which state already.
    """
    known = {task.signature: lendable(task) for task in tasks}
    held = [0] * unit.layout.world_size
    for shares, _, width, quantized in element_states(declared, unit):
        for rank, elements in shares.items():
            held[rank] += elements * width + quantized_length(elements) * quantized
    return keepers_of(owners, {task.key: known[task.signature] for task in tasks}, held, given)
