"""Optimizers that are built, captured and stepped in threads: none sees what another one does."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from surrounded_runs import FORMS, TYPES, network, plain_run, run, same_bits
from surrounding_kinds import in_another_thread
from torch import nn

import rankwise
from rankwise.options.validation import OptionError
from rankwise.routing.patterns import are_checked_later, checked_later
from rankwise.routing.roles import annotate
from rankwise.states.parameter_table import idle_allowed
from rankwise.step.optimizer import living_optimizers
from rankwise.step.working_tensors import are_deferred, deferred_steps


@pytest.mark.parametrize("kind", TYPES)
def test_in_another_thread(kind: str) -> None:
    found = in_another_thread(lambda: run(TYPES[kind], FORMS["compiled"]))
    assert same_bits(found, plain_run(kind, "compiled")) == []


@pytest.mark.parametrize("form", ["compiled", "int8 states"])
def test_two_optimizers_in_two_threads(form: str) -> None:
    """Of each type one, all at once: compiled functions let go of the interpreter while they work."""
    annotate(network())  # then each looks for copies of what it has annotated among all that there is
    found: dict[str, Any] = {}
    start = threading.Barrier(len(TYPES))

    def work(kind: str) -> None:
        start.wait()
        try:
            found[kind] = run(TYPES[kind], FORMS[form])
        except BaseException as error:
            found[kind] = {"raised": repr(error)}

    threads = [threading.Thread(target=work, args=(kind,)) for kind in TYPES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = {kind: same_bits(found[kind], plain_run(kind, form))[:3] for kind in TYPES}
    assert not any(wrong.values()), (wrong, {kind: left.get("raised") for kind, left in found.items()})


@contextmanager
def meanwhile(work: Callable[[], Any]) -> Iterator[list[BaseException]]:
    """Let another thread do something again and again, which takes its turn very often; what it raised."""
    raised: list[BaseException] = []
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            try:
                work()
            except BaseException as error:
                raised.append(error)

    thread = threading.Thread(target=repeat)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield raised
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)


def test_modules_are_sought_without_holding_what_other_threads_make() -> None:
    """Python fails to lengthen a tuple that another thread has a reference to, were it for a moment."""
    with meanwhile(lambda: tuple(number for number in range(1000))) as raised:
        for _ in range(10):
            model = network()
            annotate(model)
            copied = copy.deepcopy(model)
            optimizer = rankwise.MARS(copied.named_parameters())
            assert set(optimizer.table.routes) == {name for name, _ in model.named_parameters()}
    assert raised == []


def test_steps_are_deferred_in_their_own_thread_alone() -> None:
    with deferred_steps(), deferred_steps():
        assert are_deferred() and not in_another_thread(are_deferred)
    assert not are_deferred()


def test_optimizers_are_sought_while_other_threads_build_some() -> None:
    kept = [rankwise.SONew(network().parameters()) for _ in range(3)]
    with meanwhile(lambda: rankwise.SONew(nn.Linear(4, 4).parameters())) as raised:
        for _ in range(1000):
            assert {id(each) for each in living_optimizers()} >= set(map(id, kept))
    assert raised == []
    gone = id(kept.pop())
    gc.collect()
    assert gone not in {id(each) for each in living_optimizers()}


def test_what_is_allowed_to_one_thread_is_not_to_others() -> None:
    """A pipeline's stage may have no matrix; an optimizer that another thread builds meanwhile may not."""

    def build() -> None:
        rankwise.LDAdam(nn.LayerNorm(4).parameters())

    with idle_allowed(), checked_later():
        build()
        assert are_checked_later() and not in_another_thread(are_checked_later)
        with pytest.raises(OptionError, match="would update none"):
            in_another_thread(build)
    with pytest.raises(OptionError, match="would update none"):
        build()
