"""A framework in which things go wrong, for the test of what notices."""

from __future__ import annotations

import os
from typing import Any

import book_ranks
import torch
import torch.distributed as dist
from book_cells import STEP
from book_events import event
from book_kinds import ADAMW, DECAY, RATE, Kind
from book_runs import DDP

__all__ = ["Broken", "Careless"]


class Broken(DDP):
    """As DDP, impatient."""

    offers = DDP.offers | {"broken"}

    @classmethod
    def start(cls) -> None:
        book_ranks.PATIENCE = 4.0

    @staticmethod
    def jobs() -> list[Any]:
        events = ("nothing", "one rank waits", "one rank ends", "a step")
        return [(ADAMW, (name, STEP)) for name in events]


class _Forgetful(torch.optim.AdamW):
    """Loads nothing, and refuses to be copied without a way out."""

    def load_state_dict(self, state_dict: Any) -> None:
        pass

    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("no")


class Careless(Kind):
    """A type with faults."""

    def build(self, groups: Any) -> Any:
        return _Forgetful(groups, lr=RATE, weight_decay=DECAY)


@event("one rank waits", "broken")
def _waits(run: Any) -> None:
    if run.rank == 0:
        dist.barrier()
    else:
        raise ValueError("alone")


@event("one rank ends", "broken")
def _ends(run: Any) -> None:
    if run.rank == 1:
        os._exit(3)
    dist.barrier()
