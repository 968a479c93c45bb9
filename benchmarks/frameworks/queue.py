"""Goes through the cells within a budget of time, several at once; what is left is for the next call."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.frameworks.cells import REFERENCES, Cell, items_of
from benchmarks.frameworks.problem import CONTROL, KINDS, SECOND_KINDS
from benchmarks.frameworks.running import Place, Reference, Run
from benchmarks.gpu.records import Records
from benchmarks.gpu.revisions import fingerprint

__all__ = ["Entry", "entries", "measure"]

_PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron.core", "torchtitan": "torchtitan"}
_CODE = {
    "deepspeed": ("deepspeed_plugin",),
    "megatron": ("megatron_patches",),
    "torchtitan": ("rankwise/torchtitan.py",),
}
_PAUSE = 0.1
Say = Callable[[str], None]


class Entry(NamedTuple):
    """An item of the queue: a cell with half of the optimizers.

    Attributes:
        cell: The cell.
        kinds: The optimizers.
        version: Of the framework, where several are tried.
        state: See :data:`benchmarks.gpu.records.STATES`.
    """

    cell: Cell
    kinds: tuple[str, ...]
    version: str
    state: str

    @property
    def key(self) -> str:
        """Its name in records."""
        return key_of(self.cell, self.kinds, self.version)

    @property
    def code(self) -> str:
        """Fingerprint of what it tries."""
        return code_of(self.cell)


def key_of(cell: Cell, kinds: Sequence[str], version: str) -> str:
    """The name of a cell and its optimizers in records."""
    half = "more types" if set(kinds) & set(SECOND_KINDS[1:]) else "types"
    front, _, rest = cell.key.partition("/")
    return f"{front}{' ' * bool(version)}{version}/{rest}: {half}"


def code_of(cell: Cell) -> str:
    """Fingerprint of the code that a cell tries."""
    return fingerprint(("rankwise", "benchmarks/frameworks", *_CODE.get(cell.front, ())))


def entries(records: Records, version: str = "", fronts: Sequence[str] = (), words: Sequence[str] = ()) -> list[Entry]:
    """The items, those without a result first, each kind of item in the order of worth.

    Args:
        records: What is there.
        version: Version of Megatron, if another one than the installed is tried: there are only its items then.
        fronts: Only these; empty for all.
        words: Only items whose keys contain one of them; empty for all.
    """
    found = []
    for cell, kinds in items_of():
        if (version and cell.front != "megatron") or (fronts and cell.front not in fronts):
            continue
        key = key_of(cell, kinds, version)
        if not words or any(word in key for word in words):
            # What was not installed there may be here.
            skipped = records.rows.get(key, {}).get("status") == "skipped"
            state = "unmeasured" if skipped else records.state(key, code_of(cell))
            found.append(Entry(cell, kinds, version, state))
    return sorted(found, key=lambda entry: ("unmeasured", "stale", "measured").index(entry.state))


class _Queue:
    """Cells that wait and cells that run."""

    def __init__(self, place: Place, records: Records, limit: float, say: Say) -> None:
        self._place, self._records, self._limit, self._say = place, records, limit, say
        self._begun = time.monotonic()
        self._expected: dict[str, Mapping[str, Reference]] = {}
        self._learning: dict[str, Run] = {}
        self.running: list[tuple[Entry, Run]] = []
        self.cut = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def learn(self, names: Sequence[str], kinds: Sequence[str], jobs: int, end: float) -> None:
        """Train one process of each kind that cells are compared with.

        Cells of a front that has no result of one process say so.
        """
        waiting = list(names)
        while waiting or self._learning:
            while waiting and len(self._learning) < jobs:
                cell = REFERENCES[name := waiting.pop(0)]
                self._learning[name] = Run(cell, ("start", *cell.chosen(kinds)), self._place)
            time.sleep(_PAUSE)
            for name, run in list(self._learning.items()):
                if run.is_over() or self.seconds > end:
                    run.stop()
                    del self._learning[name]
                    results = run.results()[0]
                    self._expected[name] = {kind: found for kind, found in results.items() if "weights" in found}
                    missing = [kind for kind in run.kinds if kind not in self._expected[name]]
                    said = f", without {', '.join(missing)}: {run.ranks.last_words()}" if missing else ""
                    self._say(f"[{self.seconds:4.0f} s] one process, {name} ({run.seconds:.0f} s){said}")

    def stop(self) -> None:
        """End all processes, as where the user interrupts."""
        for run in (*self._learning.values(), *(run for _, run in self.running)):
            run.stop()

    def start(self, entry: Entry) -> None:
        """Begin a cell, with those of its optimizers that it was cut off before."""
        known = self._records.rows.get(entry.key, {})
        had = [figure["name"] for figure in known.get("figures", ())] if known.get("status") == "cut" else []
        self.running.append((entry, Run(entry.cell, [kind for kind in entry.kinds if kind not in had], self._place)))

    def settle(self, is_late: bool) -> None:
        """Judge what has ended, or taken too long."""
        for entry, run in list(self.running):
            over = run.is_over()
            if not over and not is_late and run.seconds < self._limit:
                continue
            run.stop()
            self.running.remove((entry, run))
            found = run.found(self._expected.get(entry.cell.reference, {}))
            known = self._records.rows.get(entry.key, {})
            before = known.get("figures", []) if known.get("status") == "cut" else []
            # Ranks that have ended will not do better the next time.
            status = "failed" if found.problems or (found.left and over) else "cut" if found.left else "done"
            reason = "; ".join(f"{kind}: {text}" for kind, text in found.problems.items())
            if found.left:
                why = "ended" if over else f"not done after {run.seconds:.0f} s"
                reason = "; ".join(filter(None, (reason, f"{', '.join(found.left)}: {why}: {run.ranks.last_words()}")))
            self.cut += status == "cut"
            row = {"status": status, "reason": reason, "seconds": round(run.seconds, 1), "planned": entry.cell.seconds}
            row |= {"figures": [*before, *(figure.row() for figure in found.figures)], "rows": [], "code": entry.code}
            self._records.write(entry.key, row)
            self._tell(entry, run, row)

    def _tell(self, entry: Entry, run: Run, row: Mapping[str, Any]) -> None:
        figures = [
            f"{figure['name']} {figure['value']:.1e}{' OFF' if figure['surprising'] else ''}"
            for figure in row["figures"]
            if figure["value"] is not None
        ]
        said = "" if row["status"] == "done" else f" {row['status']}: {row['reason']}"
        self._say(f"[{self.seconds:4.0f} s] {entry.key} ({run.seconds:.0f} s){said}: {', '.join(figures)}")


def _why_not(entry: Entry, device: str) -> str:
    package = _PACKAGES.get(entry.cell.front)
    try:
        missing = package is not None and not entry.version and importlib.util.find_spec(package) is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        return f"{package} is not installed"
    if entry.cell.settings.get("captured") and device != "cuda":
        return "there are no graphs without a CUDA device"
    return ""


def measure(
    waiting: Sequence[Entry], place: Place, records: Records, budget: float, jobs: int, limit: float, say: Say
) -> int:
    """Run cells until the budget ends; the file is written after every one.

    Args:
        waiting: In this order.
        place: Where.
        records: What is there; :meth:`.Records.open` has been called.
        budget: Seconds.
        jobs: Cells at once.
        limit: Seconds that a cell may take; the optimizers that it has not come to wait for the next call.
        say: Prints a line.

    Returns:
        How many items are left.
    """
    queue = _Queue(place, records, limit, say)
    todo = []
    for entry in waiting:
        if why := _why_not(entry, place.device):
            empty = {"seconds": 0.0, "planned": entry.cell.seconds, "figures": [], "rows": [], "code": entry.code}
            records.write(entry.key, {"status": "skipped", "reason": why, **empty})
        else:
            todo.append(entry)
    needed = list(dict.fromkeys(entry.cell.reference for entry in todo if not entry.cell.is_killed))
    wanted = {kind for entry in todo for kind in entry.kinds} | {CONTROL}
    try:
        queue.learn(needed, [kind for kind in KINDS if kind in wanted], jobs, budget)
        while todo or queue.running:
            is_late = queue.seconds > budget
            # A cell that would be stopped at once is not begun.
            while todo and len(queue.running) < jobs and queue.seconds + min(limit, todo[0].cell.seconds) < budget:
                queue.start(todo.pop(0))
            if not queue.running:
                break
            time.sleep(_PAUSE)
            queue.settle(is_late)
    finally:
        queue.stop()
    left = len(todo) + queue.cut
    say(f"{left} items are left: run it again" if left else "nothing is left")
    return left
