"""What is expected to fail, each with its reason, and how what came compares with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.peers.deepspeed_hook import CONTROL
from benchmarks.peers.results import Row

__all__ = ["EXPECTED", "VERDICTS", "counted", "expectations", "fits", "verdict"]

EXPECTED = Path(__file__).with_name("expected.json")
"""Objects with ``suite``, ``types``, ``cases`` (names; ``*`` stands for anything), ``message`` and ``reason``."""

VERDICTS = ("passed", "skipped", "expected failure", "unexpected failure", "unexpected pass")
"""What may be said of a case."""


@cache
def expectations() -> Sequence[Mapping[str, Any]]:
    """The list."""
    found: Sequence[Mapping[str, Any]] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return found


def fits(expectation: Mapping[str, Any], row: Row) -> bool:
    """Whether an expectation is about a row's suite, type and case, however that ended."""
    if expectation["suite"] != row["suite"] or row["type"] not in expectation["types"]:
        return False
    return any(_pattern(case).fullmatch(row["case"]) for case in expectation["cases"])


def verdict(row: Row, expected: Iterable[Mapping[str, Any]] | None = None) -> tuple[str, str]:
    """One of :data:`VERDICTS`, and the reason of an expected failure or what speaks against a pass.

    Args:
        row: As the suites leave them.
        expected: In the place of the list.
    """
    fitting = [each for each in (expectations() if expected is None else expected) if fits(each, row)]
    if row["outcome"] == "skipped":
        return "skipped", ""
    if row["outcome"] == "passed":
        return ("unexpected pass", fitting[0]["reason"]) if fitting else ("passed", "")
    for each in fitting:
        if re.search(each["message"], row["message"]):
            return "expected failure", each["reason"]
    return "unexpected failure", ""


def counted(row: Row) -> bool:
    """Whether a row says anything: of the control's, those where it took Adam's place."""
    return row["type"] != CONTROL or bool(row.get("placed", True))


@cache
def _pattern(case: str) -> re.Pattern[str]:
    return re.compile(re.escape(case).replace(r"\*", ".*"))
