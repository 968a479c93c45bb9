"""Memory of states by rank; the ranks need not exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rankwise.comm.owner_plan import MatrixTask, keepers_of
from rankwise.kernels.low_precision_runs import BLOCK, is_coded
from rankwise.plan.step_unit import StepUnit

__all__ = ["element_states", "keepers_in"]


def element_states(unit: StepUnit) -> Iterator[tuple[Mapping[int, int], int, Mapping[int, int]]]:
    """Bytes of the element states, for each set of keys that are distributed alike.

    Yields:
        Elements of one key by rank, number of keys, and bytes of the states of all these keys by rank.
    """
    by_elements: dict[int, tuple[Mapping[int, int], int, int, int]] = {}
    for key in unit.layout.shapes:
        types = unit.parameters[key].states.values()
        coded = sum(map(is_coded, types))
        width = sum((dtype or unit.dtype).itemsize for dtype in types)
        elements = unit.layout.elements(key)
        # `by_elements` keeps the objects alive, so that no other gets the same id.
        _, count, total, coded_total = by_elements.get(id(elements), (elements, 0, 0, 0))
        by_elements[id(elements)] = (elements, count + 1, total + width, coded_total + coded)
    for elements, count, width, coded in by_elements.values():
        # Every block of codes has an exponent of one byte.
        yield elements, count, {rank: held * width + -(-held // BLOCK) * coded for rank, held in elements.items()}


def keepers_in(
    unit: StepUnit, tasks: Sequence[MatrixTask], owners: Mapping[str, int], given: Mapping[Any, int]
) -> dict[tuple[str, str], int]:
    """Choose keepers by :func:`rankwise.comm.owner_plan.keepers_of`, counting the element states that ranks hold."""
    sizes = {}
    for task in tasks:
        if task.whole is not None:
            continue  # slices are with all ranks alike
        stored = unit.stored_states(task).items()
        sizes[task.key] = {name: state.nbytes(unit.dtype) for name, state in stored if state.state.lendable}
    held = [0] * unit.layout.world_size
    for *_, shares in element_states(unit):
        for rank, size in shares.items():
            held[rank] += size
    return keepers_of(owners, sizes, held, given)
