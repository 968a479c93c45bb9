"""Cases of somebody else's suite, each with its time: what hangs is ended, and the rest goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import plugin

__all__ = ["Suite", "collected", "outcomes", "spread"]

ROOT = Path(__file__).resolve().parents[2]
_LOOK = 0.5
"""Seconds between looks at a running process."""


@dataclass(frozen=True)
class Suite:
    """Tests of others, and how pytest is started on them.

    Attributes:
        name: In the results.
        folder: Where pytest runs.
        paths: Files and folders of tests, relative to it.
        hook: Module that puts our optimizer in place where it is imported.
        environment: Further variables, such as the type.
        arguments: Of pytest.
        limit: Seconds that a case may take.
        ranks: Processes that run the cases together; 1 where the tests start theirs.
    """

    name: str
    folder: Path
    paths: Sequence[str]
    hook: str
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    limit: float = 240.0
    ranks: int = 1


def collected(suite: Suite) -> list[str]:
    """Every case of the suite, in pytest's order; files that cannot be imported have none."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "0"
        _start(suite, folder, None).wait()
        return [row["case"] for row in _events(folder / "report") if row["event"] == "found"]


def spread(cases: Sequence[str], most: int) -> list[str]:
    """Of every test function, at most so many of its cases, from the first to the last.

    Args:
        cases: As :func:`collected` has them.
        most: Cases of a function.
    """
    functions: dict[str, list[str]] = {}
    for case in cases:
        functions.setdefault(case.partition("[")[0], []).append(case)
    chosen = []
    for found in functions.values():
        count = min(most, len(found))
        chosen += [found[round(k * (len(found) - 1) / max(count - 1, 1))] for k in range(count)]
    return chosen


def outcomes(suite: Suite, cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run cases, and say of each how it ended as soon as it has.

    Args:
        suite: With the type in its environment.
        cases: As :func:`collected` has them.

    Yields:
        case, outcome (passed, failed, skipped or hung), placed, message, seconds.
    """
    left = list(cases)
    while left:
        before = len(left)
        for row in _until_one_hangs(suite, left):
            left.remove(row["case"])
            yield row
        if len(left) == before:
            return  # nothing of it can be collected


def _until_one_hangs(suite: Suite, cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run cases until all have ended, one takes too long, or ranks disagree on how one ended."""
    with tempfile.TemporaryDirectory() as name:
        ranks = [Path(name) / str(rank) for rank in range(suite.ranks)]
        processes = [_start(suite, folder, cases) for folder in ranks]
        try:
            yield from _watched(suite, ranks, processes, len(cases))
        finally:
            for process in processes:
                _end(process)


def _watched(
    suite: Suite, ranks: Sequence[Path], processes: Sequence[subprocess.Popen[bytes]], cases: int
) -> Iterator[dict[str, Any]]:
    seen, began = 0, time.monotonic()
    while True:
        gone = [process.poll() is not None for process in processes]
        reports = [_events(folder / "report") for folder in ranks]
        ended = [[event for event in events if event["event"] == "ended"] for events in reports]
        for alike in list(zip(*ended, strict=False))[seen:]:
            seen, began = seen + 1, time.monotonic()
            yield _of_all(alike)
            if len({event["outcome"] for event in alike}) > 1:
                return  # the next case would meet ranks that wait for each other
        # Importing and collecting everything takes longer than any case.
        late = time.monotonic() - began > suite.limit * (1 if all(reports) else 10)
        # A rank that has nothing left to run may end before others do.
        broken = any(each and len(events) < cases for each, events in zip(gone, ended, strict=True))
        if broken or late or all(gone):
            begun = [event for event in reports[0] if event["event"] == "begins"][seen:]
            if begun:
                others = [event for events in ended for event in events[seen:] if event["case"] == begun[0]["case"]]
                wrong = [event["message"] for event in others if event["outcome"] == "failed"]
                text = f"no end within {suite.limit:g} s" if late else "a process ended"
                case = begun[0]["case"]
                yield {
                    "case": case,
                    "outcome": "hung",
                    "placed": any(_was_placed(case, *each) for each in zip(ended, ranks, strict=True)),
                    "message": "; ".join([text, *wrong[:1]]),
                    "seconds": round(time.monotonic() - began, 1),
                }
            return
        time.sleep(_LOOK)


def _was_placed(case: str, ended: Sequence[dict[str, Any]], folder: Path) -> bool:
    """Whether a rank's hook changed something in a case that some rank has not ended; others may be cases ahead."""
    said = [bool(event["placed"]) for event in ended if event["case"] == case]
    return said[0] if said else (folder / "marks").exists()


def _of_all(alike: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks say of one case, as one: failed if it failed anywhere."""
    order = ("failed", "passed", "skipped")
    worst = min(alike, key=lambda event: order.index(event["outcome"]))
    placed = any(event["placed"] for event in alike)
    return {**{key: value for key, value in worst.items() if key != "event"}, "placed": placed}


def _start(suite: Suite, folder: Path, cases: Sequence[str] | None) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    names = {plugin.REPORT: "report", plugin.MARKS: "marks"}
    environment = {**os.environ, **suite.environment, "OMP_NUM_THREADS": "1", plugin.HOOK: suite.hook}
    environment |= {variable: str(folder / name) for variable, name in names.items()}
    if suite.ranks > 1:
        environment |= {"RANK": folder.name, "LOCAL_RANK": folder.name, "WORLD_SIZE": str(suite.ranks)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH", "")]))
    paths = list(suite.paths)
    if cases is not None:
        (folder / "wanted").write_text(json.dumps(list(cases)))
        environment[plugin.WANTED] = str(folder / "wanted")
        paths = sorted({case.partition("::")[0] for case in cases})
    options = ["-p", plugin.__name__, "-p", "no:cacheprovider", "-q", "--continue-on-collection-errors"]
    # Beside each other: what Megatron's ranks share is in the folder above.
    temporary = f"--basetemp={folder.parent / f'temporary{folder.name}'}"
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, temporary, *suite.arguments, *paths],
            cwd=suite.folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _events(path: Path) -> list[dict[str, Any]]:
    """Whole lines alone: another process is writing."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what pytest started, its ranks among them."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
