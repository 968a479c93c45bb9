"""Goes through the items in the order of their worth, within a budget of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from benchmarks.gpu.items import Figure, Item
from benchmarks.gpu.records import STATES, Records
from benchmarks.gpu.sections import code_of, worth_of

__all__ = ["Entry", "Outcome", "Worker", "measure", "queued"]

_LEAST_LIMIT = 60.0
_LIMIT = 3.0  # Times what an item should take: then it hangs.


class Outcome(NamedTuple):
    """What became of an item.

    Attributes:
        status: "done"; "failed", for good; "skipped", not for this machine; "cut", by the end of its time.
        figures: What was found.
        rows: For the page.
        reason: Why it is not done.
    """

    status: str
    figures: list[Figure]
    rows: list[dict[str, Any]]
    reason: str = ""


class Worker(Protocol):
    """Measures items, in a process of its own or not."""

    def about(self) -> dict[str, Any]:
        """Device and versions."""

    def run(self, section: str, item: Item, limit: float) -> Outcome:
        """Measure one within a time, or give up."""


class Entry(NamedTuple):
    """An item in the queue.

    Attributes:
        section: Its section.
        item: The item.
        state: See :data:`.records.STATES`.
        code: Fingerprint of the code that it measures.
    """

    section: str
    item: Item
    state: str
    code: str

    @property
    def key(self) -> str:
        """Its name in records."""
        return f"{self.section}/{self.item.name}"


def queued(sections: Mapping[str, Sequence[Item]], records: Records) -> list[Entry]:
    """The items in the order in which they are wanted.

    Args:
        sections: Items by section.
        records: What is there.

    Returns:
        What has no result comes first, then what is of other code than today's, then the rest; in each of these the
        items of most worth.
    """
    entries = []
    for section, items in sections.items():
        for item in items:
            code = code_of(section, item.name)
            entries.append(Entry(section, item, records.state(f"{section}/{item.name}", code), code))
    return sorted(entries, key=lambda entry: (STATES.index(entry.state), -worth_of(entry.section, entry.item)))


def measure(
    queue: Sequence[Entry],
    worker: Worker,
    records: Records,
    budget: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Measure what is not there yet and fits; the file is written after every item.

    Args:
        queue: The items, in the order in which they are wanted.
        worker: Measures.
        records: What is there; :meth:`Records.open` has been called.
        budget: Seconds for all of it.
        say: Prints a line.
        clock: Seconds.

    Returns:
        How many items are left for the next call.
    """
    end = clock() + budget
    left = 0
    waiting = [entry for entry in queue if entry.state != "measured"]
    say(f"{len(queue) - len(waiting)} of {len(queue)} items are there")
    for entry in waiting:
        item = entry.item
        cost, remaining = records.cost(entry.key, item.seconds), end - clock()
        if cost > remaining:
            # A shorter one may still fit.
            left += 1
            if cost > budget:
                say(f"{entry.key} needs {cost:.0f} s: give it a larger budget")
            continue
        start = clock()
        hangs = max(_LEAST_LIMIT, _LIMIT * item.seconds)
        outcome = worker.run(entry.section, item, min(remaining, hangs))
        if outcome.status == "cut" and remaining > hangs:
            outcome = Outcome("failed", [], [], f"took more than {hangs:.0f} s")
        left += outcome.status == "cut"
        records.write(entry.key, _row(outcome, clock() - start, entry))
        _tell(entry, outcome, clock() - start, say)
    say(f"{left} items are left: run it again" if left else "nothing is left")
    return left


def _row(outcome: Outcome, seconds: float, entry: Entry) -> dict[str, Any]:
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds": round(seconds, 3),
        "planned": entry.item.seconds,
        "figures": [figure.row() for figure in outcome.figures],
        "rows": outcome.rows,
        "code": entry.code,
    }


def _tell(entry: Entry, outcome: Outcome, seconds: float, say: Callable[[str], None]) -> None:
    mark = "SURPRISE " if outcome.status == "failed" else ""
    said = {"done": "", "skipped": f" skipped: {outcome.reason}"}.get(
        outcome.status, f" {outcome.status}: {outcome.reason}"
    )
    say(f"{mark}{entry.key}{said} ({seconds:.1f} s)")
    for figure in outcome.figures:
        say(f"    {figure.line()}")
