"""Plays the cells of one framework and type, and says how each relates to other runs of the same type.

Nothing here knows what is right. A cell's *relation* says how near it ends to reference runs, in the same bits (of
weights and of torch's generator), within rounding, or elsewhere: to a run without the event, one with a plain step in
its place, one without the entry point, one whose optimizer is built anew after the event, one that a new process makes
of its checkpoint. Whoever judges compares the relation with the one that torch.optim.AdamW has in the same cell.
"""

from __future__ import annotations

import hashlib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from book_entries import ENTRIES
from book_events import HOMES, Event, events_of
from book_kinds import Kind
from book_runs import Run

__all__ = ["Cell", "Outcome", "Player", "cells_of"]

Cell = tuple[str, str]
"""An event and an entry point."""
NOTHING, STEP, FIRST = "nothing", "step()", "the first step()"
AFTER = (2, 3)
NEARNESS = ("same bits", "rounded otherwise", "elsewhere")
ROUNDING = 1e-6
"""What AdamW's own compiled step is off by, at most; what an event does to a run shows as a thousandth or more."""


class Outcome(NamedTuple):
    """What a cell has shown.

    Attributes:
        relation: By a reference's name, one of `NEARNESS`; references that raised something are left out, being cells
            of their own.
        error: What was raised, and where: "event", "entry", "next step"; empty if nothing was.
        harm: What an exception left changed, or "the next good step fails"; empty if nothing.
        lacks: Why the cell does not apply; nothing was run then.
        known: How far the ends are apart, for whoever looks for a cause.
    """

    relation: Mapping[str, str] = {}
    error: str = ""
    harm: str = ""
    lacks: str = ""
    known: Mapping[str, float] = {}


class _Played(NamedTuple):
    middle: str = ""
    end: str = ""
    weights: Mapping[str, torch.Tensor] = {}
    error: str = ""
    harm: str = ""
    trace: str = ""


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256(torch.random.get_rng_state().numpy().tobytes())
    for name, value in sorted(weights.items()):
        found.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _fingerprint(run: Run) -> dict[str, str]:
    """Hashes of what a refusal must leave alone."""

    def of(value: Any) -> bytes:
        if isinstance(value, torch.Tensor):
            local = value.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            # A copy: FSDP2 could not free memory that numpy has seen.
            return local.clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if isinstance(value, Mapping):
            return b"".join(str(key).encode() + of(value[key]) for key in sorted(value, key=str))
        return repr(value).encode()

    inner = run.inner
    found = {"generator": torch.random.get_rng_state().numpy().tobytes()}
    found["weights"] = b"".join(of(value) for value in run.module.parameters())
    states = list(inner.state.values())
    found["states"] = b"".join(of(state) for state in states if state)
    everything = getattr(getattr(inner, "matrix_states", None), "everything", dict)()
    found["matrix states"] = of({key: dict(value) for key, value in everything.items()})
    found["groups"] = repr(
        [[(k, v) for k, v in sorted(group.items()) if k not in ("params", "param_names")] for group in run.groups]
    ).encode()
    return {key: hashlib.sha256(value).hexdigest() for key, value in found.items()}


class Player:
    """Plays cells of a framework and a type, each run once.

    Args:
        framework: How models are held.
        kind: The type.
        thorough: Whether a cell is compared with all of its references; else until one has the same bits, which the
            next ones cannot add to.
    """

    def __init__(self, framework: type[Run], kind: Kind, thorough: bool = False) -> None:
        self.framework, self.kind, self.thorough = framework, kind, thorough
        self._played: dict[tuple[str, str, str], _Played] = {}
        run = framework(kind)
        self.events = events_of(run)
        run.close()

    def outcome(self, cell: Cell) -> Outcome:
        """Play a cell and its references."""
        event, entry = cell
        lacks = self.events[event].lacks(self.framework) or ENTRIES[entry].lacks(self.framework)
        if lacks:
            return Outcome(lacks=lacks)
        found = self._play(event, entry)
        if found.error:
            return Outcome(error=found.error, harm=found.harm)
        relation, known = {}, {}
        for name, key in self._references(event, entry):
            if NEARNESS[0] in relation.values() and not self.thorough:
                break
            other = self._play(*key)
            if not other.error:
                known[name] = _apart(found.weights, other.weights)
                relation[name] = NEARNESS[0 if found.end == other.end else 1 if known[name] <= ROUNDING else 2]
        relation["the weights stay"] = NEARNESS[0 if found.end == found.middle else 2]
        return Outcome(relation, known=known)

    def trace(self, cell: Cell) -> str:
        """The traceback of what a cell raised."""
        return self._play(*cell).trace

    def _references(self, event: str, entry: str) -> Iterator[tuple[str, tuple[str, str, str]]]:
        if event != NOTHING:
            yield "as without the event", (NOTHING, entry, "")
            if event != "a step":
                yield "as a plain step", ("a step", entry, "")
        if entry not in (STEP, FIRST):
            yield "as without the entry point", (event, STEP, "")
            yield "as another step", (event, "another step", "")
        yield "as a fresh optimizer", (event, FIRST if entry == FIRST else STEP, "fresh")
        if entry in (STEP, FIRST):
            yield "as loaded into new objects", (event, entry, "rebuilt")

    def _play(self, event: str, entry: str, ending: str = "") -> _Played:
        key = (event, entry, ending)
        if key not in self._played:
            self._played[key] = self._run(*key)
        return self._played[key]

    def _run(self, event: str, entry: str, ending: str) -> _Played:
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = self.framework(self.kind)
            for index in () if entry == FIRST else self.framework.before:
                run.train(index)
            phases: list[tuple[str, Callable[[Run], Any]]] = [
                ("event", self.events[event].act),
                ("entry", ENTRIES[entry].act),
            ]
            if ending:
                phases.append(("ending", lambda run: getattr(run, ending)()))
            for phase, act in phases:
                before = _fingerprint(run)
                try:
                    result = act(run)
                    run = result if isinstance(result, Run) else run
                except Exception as error:  # noqa: BLE001 - what is raised is what is looked for
                    return self._raised(run, phase, error, before)
            before = _fingerprint(run)
            try:
                middle = _digest(run.weights())
                for index in AFTER:
                    before = _fingerprint(run)
                    run.train(index)
            except Exception as error:  # noqa: BLE001
                return self._raised(run, "next step", error, before)
            weights = run.weights()
            end = _digest(weights)
            run.close()
        return _Played(middle, end, weights)

    def _raised(self, run: Run, phase: str, error: Exception, before: Mapping[str, str]) -> _Played:
        after = _fingerprint(run)
        changed = [key for key in before if before[key] != after[key]]
        text = f"{phase}: {type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        if not self.kind.is_adamw and phase == "next step" and not changed:
            changed = self._goes_on(run)
        return _Played(error=text, harm=", ".join(changed), trace=trace)

    def _goes_on(self, run: Run) -> list[str]:
        """What keeps the next good step from working, once what refusals advise is done: capture, or build anew."""
        told = ""
        for advice in (run.capture, run.fresh):
            try:
                run.clear()
                advice()
                run.train(AFTER[0])
            except Exception as error:  # noqa: BLE001
                told = f"the next good step fails: {error}"
            else:
                return []
        return [told]


def _apart(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    if one.keys() != other.keys():
        return float("inf")
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one if one[name].numel())


def _own(rows: Mapping[str, Event], framework: type[Run]) -> list[str]:
    """Without what there is under another framework alone, whose module happens to be imported."""
    return [name for name, row in rows.items() if not (HOMES & set(row.needs)) - framework.offers]


def cells_of(framework: type[Run], kind: Kind, whole: bool) -> list[Cell]:
    """The cells of a framework: each event before a step and each entry point after nothing; the product if whole.

    In one process each event before the first step, too.
    """
    run = framework(kind)
    events = _own(events_of(run), framework)
    run.close()
    entries = _own(ENTRIES, framework)
    if whole:
        return [(event, entry) for event in events for entry in entries]
    firsts = [(event, FIRST) for event in events] if framework.world == 1 else []
    others = [(NOTHING, entry) for entry in entries if entry not in (STEP, FIRST)]
    return [*((event, STEP) for event in events), *firsts, *others]
