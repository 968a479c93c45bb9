"""Goes through sections within a budget of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from benchmarks.gpu.items import Figure, Item
from benchmarks.gpu.records import Records

__all__ = ["Outcome", "Worker", "measure_sections"]

_LEAST_LIMIT = 60.0
_LIMIT = 10.0  # Times what an item should take: then it hangs.


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


def measure_sections(
    sections: Mapping[str, Sequence[Item]],
    worker: Worker,
    records: Records,
    budget: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Measure what is not there yet and fits; the file is written after every item.

    Args:
        sections: Their items, in the order in which they are wanted.
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
    for section, items in sections.items():
        say(f"--- {section}")
        waiting = [item for item in items if not records.is_done(f"{section}/{item.name}")]
        if not waiting:
            say(f"    all {len(items)} items are there")
        for item in waiting:
            key = f"{section}/{item.name}"
            cost, remaining = records.cost(key, item), end - clock()
            if cost > remaining:
                # A shorter one may still fit.
                left += 1
                if cost > budget:
                    say(f"{item.name} needs {cost:.0f} s: give it a larger budget")
                continue
            start = clock()
            hangs = max(_LEAST_LIMIT, _LIMIT * item.seconds)
            outcome = worker.run(section, item, min(remaining, hangs))
            if outcome.status == "cut" and remaining > hangs:
                outcome = Outcome("failed", [], [], f"took more than {hangs:.0f} s")
            left += outcome.status == "cut"
            records.write(key, _row(outcome, clock() - start, item.seconds))
            _tell(item, outcome, clock() - start, say)
    say(f"{left} items are left: run it again" if left else "nothing is left")
    return left


def _row(outcome: Outcome, seconds: float, planned: float) -> dict[str, Any]:
    return {
        "status": outcome.status,
        "reason": outcome.reason,
        "seconds": round(seconds, 3),
        "planned": planned,
        "figures": [figure.row() for figure in outcome.figures],
        "rows": outcome.rows,
    }


def _tell(item: Item, outcome: Outcome, seconds: float, say: Callable[[str], None]) -> None:
    mark = "SURPRISE " if outcome.status == "failed" else ""
    said = {"done": "", "skipped": f" skipped: {outcome.reason}"}.get(
        outcome.status, f" {outcome.status}: {outcome.reason}"
    )
    say(f"{mark}{item.name}{said} ({seconds:.1f} s)")
    for figure in outcome.figures:
        say(f"    {figure.line()}")
