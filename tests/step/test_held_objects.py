"""The objects an optimizer holds: none of them names it, and those of a copy are its own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

from cases import Case, advance, cases, setup


@cases(names=["mars-m", "sonew-tridiagonal", "ldadam"])
def test_an_optimizer_is_gone_when_nobody_names_it(case: Case) -> None:
    """No part of it names it: its states are not left to the collector of cycles."""
    model, optimizer = setup(case)
    advance(model, optimizer, range(2))
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


def _settles_its_own(twin: Any, optimizer: Any) -> None:
    """Plans are forgotten when the counts of the copy are known, not those of the original."""
    settled = []
    for each in (twin, optimizer):
        each.undo.unsettled["unit"] = SimpleNamespace(settle=lambda each=each: settled.append(each))
    twin.planner.forget()
    assert settled == [twin]
    optimizer.undo.unsettled.clear()


@cases(exact=False)
def test_copies_share_nothing_and_have_nothing_planned(case: Case) -> None:
    model, optimizer = setup(case)
    advance(model, optimizer, range(2))
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert set(vars(twin)) >= set(twin.held)
        own = [name for name in twin.held if getattr(twin, name) is getattr(optimizer, name)]
        assert all(isinstance(getattr(twin, name), bool | str) for name in own), own
        assert not twin.planned_units and not twin.planner.owner_of and not twin.undo.unsettled
        assert twin.table.parameters.keys() == optimizer.table.parameters.keys()
        assert twin.reports is not optimizer.reports and twin.saved is not optimizer.saved
        _settles_its_own(twin, optimizer)
