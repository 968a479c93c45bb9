"""Plugin of pytest for the suites of others: runs the wanted cases alone, and says at once how each ended."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["HOOK", "MARKS", "REPORT", "WANTED"]

HOOK = "RANKWISE_PEER_HOOK"
"""Environment variable with the module that puts our optimizer in place when it is imported."""
WANTED = "RANKWISE_PEER_CASES"
"""Environment variable with a JSON file of the cases to run; without it none is run, and all are listed."""
REPORT = "RANKWISE_PEER_REPORT"
"""Environment variable with the file that gets a line of JSON as each case begins and ends."""
MARKS = "RANKWISE_PEER_MARKS"
"""Environment variable with the file that the hook writes where it changed something."""
_LONGEST = 300


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Load the hook before any file of theirs is, and in the server from which tests fork their ranks."""
    hook = os.environ.get(HOOK)
    if hook:
        importlib.import_module(hook)
        multiprocessing.set_forkserver_preload([hook])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what is wanted; list everything where nothing is said."""
    if WANTED not in os.environ:
        for item in items:
            _write(event="found", case=item.nodeid)
        items.clear()
        return
    wanted = set(json.loads(Path(os.environ[WANTED]).read_text()))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = [item for item in items if item.nodeid in wanted]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Say which case begins, so that one that never ends is known, and how it ended."""
    marks = Path(os.environ[MARKS])
    marks.unlink(missing_ok=True)
    _write(event="begins", case=item.nodeid)
    item.stash[_REPORTS] = []
    began = time.monotonic()
    yield
    reports = item.stash[_REPORTS]
    failed = next((report for report in reports if report.failed), None)
    skipped = next((report for report in reports if report.skipped), None)
    outcome = "failed" if failed else "skipped" if skipped else "passed"
    _write(
        event="ended",
        case=item.nodeid,
        outcome=outcome,
        placed=marks.exists(),
        message=_message(failed or skipped),
        seconds=round(time.monotonic() - began, 1),
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Keep the reports of a case's three phases."""
    outcome: Any = yield
    item.stash[_REPORTS].append(outcome.get_result())


_REPORTS = pytest.StashKey[list[pytest.TestReport]]()


def _message(report: pytest.TestReport | None) -> str:
    """What was raised, in one line: the type and the beginning of the text."""
    if report is None:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:_LONGEST]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    return " ".join(text.split())[:_LONGEST]


def _write(**row: Any) -> None:
    with open(os.environ[REPORT], "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
