"""Plans who computes which matrix, in which batches, and who keeps its states: pure Python, equal on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import prod
from typing import Any

from rankwise.layout.equal_slices import SlicedMatrix
from rankwise.layout.layout import Layout

__all__ = [
    "Batch",
    "MatrixPlan",
    "MatrixTask",
    "Reply",
    "added",
    "assign_owners",
    "keepers_of",
    "own_pieces",
    "plan_matrices",
    "slice_tasks",
]

# A rank keeps what it holds whole until its load exceeds the mean by this factor: moving a matrix costs two
# messages a step, a small imbalance costs little.
IMBALANCE_TOLERANCE = 1.1
# Elements an owner gathers per pipelined batch: enough to fill a link, and few enough to bound the scratch memory.
BATCH_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class MatrixTask:
    """One matrix to be updated by one owner.

    Attributes:
        key: Name under which the owner keeps the matrix's states.
        parts: Parameter keys whose flattened values, one after the other, make up the task (a weight, or a weight
            and its bias).
        signature: Tasks of equal signature (shape, options) are computed together in one batched call.
        cost: Estimated floating-point operations per step, the unit of load balance.
        whole: The matrix of which this is a slice, computed together with its other slices; None for a matrix.
    """

    key: str
    parts: tuple[str, ...]
    signature: Any
    cost: float
    whole: str | None = None


@dataclass(frozen=True)
class Batch:
    """Tasks of one signature that travel and are computed together.

    Attributes:
        signature: Signature of every task.
        tasks: The matrices.
        partners: Where the tasks are slices, the ranks that own them. Each has the same number of slices of every
            matrix, matrix by matrix in one order.
    """

    signature: Any
    tasks: tuple[MatrixTask, ...]
    partners: tuple[int, ...] = ()

    @property
    def sliced(self) -> int:
        """Number of the matrices of which the tasks are slices."""
        return len({task.whole for task in self.tasks})


def slice_tasks(matrix: SlicedMatrix, signature: Any, cost: float) -> list[MatrixTask]:
    """Return the tasks of a matrix's slices.

    Args:
        matrix: The matrix.
        signature: Signature of each slice.
        cost: Cost of the whole matrix.
    """
    return [MatrixTask(part, (part,), signature, cost / matrix.count, matrix.key) for part in matrix.parts]


@dataclass(frozen=True)
class Reply:
    """The result of one matrix, and what each holder of the matrix gets of it.

    Attributes:
        values: Values that the result has for every element, one whole matrix of them after the other; each holder
            gets those of its own elements.
        whole: Length of a result that every rank gets whole if it holds anything; None: ``values`` counts.
    """

    values: int = 1
    whole: int | None = None


def own_pieces(batch: Batch) -> Reply:
    """Return one value per element to its holder."""
    return Reply()


@dataclass(frozen=True)
class MatrixPlan:
    """Owners and batches of all matrices of one layout.

    Attributes:
        owners: Rank by task key.
        batches: Batches in the order of their messages.
        keepers: Rank that keeps a state between steps in the owner's place, by task key and name of the state.
    """

    owners: Mapping[str, int]
    batches: tuple[Batch, ...]
    keepers: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def digest(self) -> str:
        """A hash of the whole plan, compared across ranks before the first collective."""
        text = repr((sorted(self.owners.items()), self.batches, sorted(self.keepers.items())))
        return hashlib.sha256(text.encode()).hexdigest()


def assign_owners(
    tasks: Sequence[MatrixTask],
    held: Mapping[str, Mapping[int, int]],
    loads: Sequence[float],
    tolerance: float = IMBALANCE_TOLERANCE,
    kept: Mapping[str, int] | None = None,
) -> tuple[dict[str, int], list[float]]:
    """Give every matrix an owner: longest processing time first, preferring the rank that holds most of it.

    Args:
        tasks: The matrices to place.
        held: Elements that each rank holds, for each task key. Equal shares express no preference.
        loads: Load each rank already carries from other groups of the same optimizer.
        tolerance: A preferred rank is used while its load stays below this multiple of the mean load.
        kept: Owners of matrices that have states already, by task key.

    Returns:
        Owner by task key, and the updated loads.
    """
    loads = list(loads)
    limit = tolerance * (sum(loads) + sum(task.cost for task in tasks)) / len(loads)
    owners = {task.key: kept[task.key] for task in tasks if task.key in kept} if kept else {}
    for task in tasks:
        if task.key in owners:
            loads[owners[task.key]] += task.cost
    lightest = [(load, rank) for rank, load in enumerate(loads)]
    heapify(lightest)
    for task in sorted(tasks, key=lambda task: (-task.cost, repr(task.signature), task.key)):
        if task.key in owners:
            continue
        shares = held[task.key]
        fitting = [rank for rank in shares if loads[rank] + task.cost <= limit]
        if fitting:
            owner = min(fitting, key=lambda rank: (-shares[rank], loads[rank], rank))
        else:
            owner = _lightest(lightest, loads)
        owners[task.key] = owner
        loads[owner] += task.cost
        heappush(lightest, (loads[owner], owner))
    return owners, loads


def _lightest(heap: list[tuple[float, int]], loads: Sequence[float]) -> int:
    """The rank with the least load, the first of several; outdated entries of the heap are dropped."""
    while heap[0][0] != loads[heap[0][1]]:
        heappop(heap)
    return heap[0][1]


def plan_matrices(
    layout: Layout,
    tasks: Sequence[MatrixTask],
    loads: Sequence[float],
    batch_elements: int = BATCH_ELEMENTS,
    kept: Mapping[Any, int] | None = None,
    slices: Mapping[str, SlicedMatrix] | None = None,
) -> tuple[MatrixPlan, list[float]]:
    """Choose owners and batches for ``tasks`` on ``layout``.

    Args:
        layout: The common layout; for slices the one that :func:`rankwise.layout.equal_slices.in_slices` returns.
        tasks: The matrices, in any order, and all slices of those that are computed in slices.
        loads: Load each rank already carries.
        batch_elements: Elements an owner stacks per batch; a larger matrix is a batch entry of its own.
        kept: Owners of matrices that have states already, by task key, the same on every rank; other keys are ignored.
        slices: The matrices that tasks name as their ``whole``.

    Returns:
        The plan and the loads after it, to be passed on when the next group is planned.
    """
    parts = [task for task in tasks if task.whole is not None]
    partners, loads = _assign_partners(parts, slices or {}, loads, kept)
    whole = [task for task in tasks if task.whole is None]
    sliced = (prod(matrix.shape) * matrix.count for matrix in (slices or {}).values())
    batch_elements = max([batch_elements, *(_elements(layout, task) for task in whole), *sliced])
    owners, loads = assign_owners(whole, _held(layout, whole), loads, kept=kept)
    batches = [
        *_joint_batches(layout, parts, partners, batch_elements),
        *_batches(layout, whole, owners, batch_elements),
    ]
    return MatrixPlan({**partners, **owners}, tuple(batches)), loads


def _held(layout: Layout, tasks: Sequence[MatrixTask]) -> dict[str, Mapping[int, int]]:
    """Elements of each task by rank."""
    held: dict[str, Mapping[int, int]] = {}
    for task in tasks:
        held[task.key] = added([layout.elements(part) for part in task.parts])
    return held


def added(parts: Sequence[Mapping[int, int]]) -> Mapping[int, int]:
    """Sum the elements by rank of several parts, at least one."""
    first, *rest = parts
    if not rest:
        return first
    shares = dict(first)
    for part in rest:
        for rank, elements in part.items():
            shares[rank] = shares.get(rank, 0) + elements
    return shares


def _assign_partners(
    parts: Sequence[MatrixTask],
    slices: Mapping[str, SlicedMatrix],
    loads: Sequence[float],
    kept: Mapping[str, int] | None,
) -> tuple[dict[str, int], list[float]]:
    """Give every slice an owner: matrix by matrix, the ranks with the least load are chosen."""
    loads, owners = list(loads), {}
    costs = {task.key: task.cost for task in parts}
    wholes = {task.whole: task.cost for task in parts if task.whole is not None}
    for key in sorted(wholes, key=lambda key: (-wholes[key], key)):
        names, choices = slices[key].parts, slices[key].owners
        given = tuple((kept or {}).get(name, -1) for name in names)
        chosen = (
            given
            if given in choices
            else min(choices, key=lambda ranks: (max(loads[rank] for rank in ranks), choices.index(ranks)))
        )
        for name, rank in zip(names, chosen, strict=True):
            owners[name] = rank
            loads[rank] += costs[name]
    return owners, loads


def _chunk(layout: Layout, task: MatrixTask, batch_elements: int, together: int = 1) -> int:
    """Number of tasks like this one, or of groups of them, that an owner stacks in a batch."""
    return max(1, batch_elements // max(1, together * _elements(layout, task)))


def _elements(layout: Layout, task: MatrixTask) -> int:
    return sum(prod(layout.shapes[part]) for part in task.parts)


def _batches(
    layout: Layout, tasks: Sequence[MatrixTask], owners: Mapping[str, int], batch_elements: int
) -> Iterator[Batch]:
    for members in _grouped(tasks, lambda task: repr(task.signature)):
        queues: dict[int, list[MatrixTask]] = {}
        for task in members:
            queues.setdefault(owners[task.key], []).append(task)
        # Every owner has the same number of tasks in a batch, so all are busy and none stacks more than it must.
        chunk = _chunk(layout, members[0], batch_elements)
        for first in range(0, max(map(len, queues.values())), chunk):
            chosen = [task for owner in sorted(queues) for task in queues[owner][first : first + chunk]]
            yield Batch(members[0].signature, tuple(chosen))


def _joint_batches(
    layout: Layout, parts: Sequence[MatrixTask], owners: Mapping[str, int], batch_elements: int
) -> Iterator[Batch]:
    matrices: dict[str | None, list[MatrixTask]] = {}
    for task in parts:
        matrices.setdefault(task.whole, []).append(task)
    partners = {key: tuple(sorted({owners[task.key] for task in tasks})) for key, tasks in matrices.items()}
    for members in _grouped(
        parts, lambda task: (repr(task.signature), partners[task.whole], len(matrices[task.whole]))
    ):
        ranks = partners[members[0].whole]
        keys = list(dict.fromkeys(task.whole for task in members))
        chunk = _chunk(layout, members[0], batch_elements, len(matrices[keys[0]]) // len(ranks))
        for first in range(0, len(keys), chunk):
            together = [task for key in keys[first : first + chunk] for task in matrices[key]]
            chosen = sorted(together, key=lambda task: owners[task.key])
            yield Batch(members[0].signature, tuple(chosen), ranks)


def _grouped(tasks: Sequence[MatrixTask], key: Callable[[MatrixTask], Any]) -> list[list[MatrixTask]]:
    """Group tasks by key, in an order that does not depend on theirs."""
    groups: dict[Any, list[MatrixTask]] = {}
    for task in sorted(tasks, key=lambda task: (repr(task.signature), task.key)):
        groups.setdefault(key(task), []).append(task)
    return list(groups.values())


BALANCE = 1.1
"""Memory of the fullest rank over the mean, up to which owners keep all of their states."""
LEAST_KEPT_ELSEWHERE = 1 << 22
"""Bytes that a state must have for keeping it elsewhere to be worth a message in every step."""


def keepers_of(
    owners: Mapping[str, int],
    states: Mapping[str, Mapping[str, int]],
    held: Sequence[int],
    given: Mapping[Any, int],
) -> dict[tuple[str, str], int]:
    """Let the emptiest ranks keep states of the fullest, until these are full no more or nothing is gained.

    Args:
        owners: Owner rank of each matrix.
        states: Bytes of each state that may lie elsewhere, by matrix and name.
        held: Other bytes that each rank holds.
        given: Ranks that keep states already, by (matrix, state).

    Returns:
        The rank that keeps a state in its owner's place, by (matrix, state).
    """
    keepers: dict[tuple[str, str], int] = {}
    totals = list(held)
    lendable: list[list[tuple[int, str, str]]] = [[] for _ in held]
    for key, sizes in states.items():
        for name, size in sizes.items():
            keeper = given.get((key, name))
            totals[owners[key] if keeper is None else keeper] += size
            if keeper is not None:
                keepers[key, name] = keeper
            elif size >= LEAST_KEPT_ELSEWHERE:
                lendable[owners[key]].append((size, key, name))
    limit = BALANCE * sum(totals) / len(totals)
    while max(totals) > limit:
        rank, keeper = totals.index(max(totals)), totals.index(min(totals))
        lent = [state for state in lendable[rank] if totals[keeper] + state[0] < totals[rank]]
        if not lent:
            break
        # The smallest state that is enough is lent.
        enough = [state for state in lent if totals[rank] - state[0] <= limit]
        chosen = min(enough) if enough else max(lent)
        lendable[rank].remove(chosen)
        size, key, name = chosen
        keepers[key, name] = keeper
        totals[rank] -= size
        totals[keeper] += size
    return keepers
