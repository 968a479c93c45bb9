"""Memory of every rank's messages, from a layout and a plan alone: no tensors, no processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from .layout import Layout
from .owner_plan import Batch, MatrixPlan, MatrixTask, Reply

__all__ = ["BatchBuffers", "RankBuffers", "batch_buffers"]


@dataclass
class RankBuffers:
    """Elements that one rank has of one batch.

    Attributes:
        tasks: The matrices that it gathers.
        alone: Those that lie whole on it.
        stack: Of what is gathered.
        gathers: Sent and received on the way to the owners.
        result: Of what is computed.
        returns: Sent and received on the way back.
    """

    tasks: list[MatrixTask] = field(default_factory=list)
    alone: list[MatrixTask] = field(default_factory=list)
    stack: int = 0
    gathers: int = 0
    result: int = 0
    returns: int = 0


BatchBuffers = dict[int, RankBuffers]
"""By rank."""


def batch_buffers(layout: Layout, plan: MatrixPlan, reply: Callable[[Batch], Reply]) -> Iterator[BatchBuffers]:
    """What ranks have of each batch, in order.

    Args:
        layout: The common layout.
        plan: Owners and batches.
        reply: What the holders get of the results.
    """
    for batch in plan.batches:
        found: BatchBuffers = {}
        alike: dict[tuple[int, int], _Alike] = {}
        for task in batch.tasks:
            owner = plan.owners[task.key]
            if all(layout.elements(part).keys() == {owner} for part in task.parts):
                found.setdefault(owner, RankBuffers()).alone.append(task)
                continue
            for part in task.parts:
                held, gathered = layout.elements(part), layout.gathered(part, owner)
                # Kept in the entry, so that no other has the same numbers.
                entry = alike.setdefault((id(held), id(gathered)), _Alike(held, gathered, []))
                entry.owners.append(owner)
            _own(found.setdefault(owner, RankBuffers()), task, layout, reply(batch))
        for entry in alike.values():
            _add(found, entry, reply(batch))
        yield found


class _Alike(NamedTuple):
    """Parts of matrices that ranks hold alike: the millions of shares of a large run are a few numbers."""

    held: Mapping[int, int]
    gathered: Mapping[int, int]
    owners: list[int]


def _own(mine: RankBuffers, task: MatrixTask, layout: Layout, answer: Reply) -> None:
    elements = sum(prod(layout.shapes[part]) for part in task.parts)
    mine.tasks.append(task)
    mine.stack += elements
    mine.result += answer.whole or answer.values * elements


def _add(found: BatchBuffers, alike: _Alike, answer: Reply) -> None:
    """What every rank sends to the owners, and gets of them: as if they were others, and then not of itself."""
    count, total = len(alike.owners), sum(alike.gathered.values())
    back = {holder: answer.whole or answer.values * held for holder, held in alike.held.items()}
    all_back = sum(back.values())
    for holder, share in alike.gathered.items():
        found.setdefault(holder, RankBuffers()).gathers += count * share
    for holder, share in back.items():
        found.setdefault(holder, RankBuffers()).returns += count * share
    for owner in alike.owners:
        found[owner].gathers += total - 2 * alike.gathered.get(owner, 0)
        found[owner].returns += all_back - 2 * back.get(owner, 0)
