"""What ran against which megatron-core: its tests by version, kept as JSON, and the columns of the page's table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

__all__ = ["RECORDS", "load", "ran", "with_versions"]

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs/data/megatron-versions.json"
"""By version of megatron-core: the environment, and by test how many of its cases passed, failed and were skipped."""

Records = dict[str, dict[str, Any]]
_FOLDER = "megatron_engine"
_HEADING = "## megatron-core"
_OWN_CELLS = 4
"""Cells of a row that are written by hand: what, state, note, shown by."""


def load() -> Records:
    """The records kept so far."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}


def ran(checkout: Path | None, arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Run the tests of Megatron against one version.

    Args:
        checkout: The folder that holds ``megatron``; None for the installed one.
        arguments: For pytest: files, ``-m``, ``-k``, ``-n``.

    Returns:
        The version, and its record.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if checkout is not None:
        before = [environment["PYTHONPATH"]] if "PYTHONPATH" in environment else []
        environment["PYTHONPATH"] = os.pathsep.join([str(checkout.resolve()), *before])
        if (checkout / "pretrain_gpt.py").exists():
            environment["RANKWISE_MEGATRON_LM"] = str(checkout.resolve())
    name = subprocess.run(
        [sys.executable, "-c", "from megatron.core import package_info as p; print(p.__version__)"],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()[-1]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", f"--junitxml={report}", *(arguments or [f"tests/{_FOLDER}"])],
            cwd=ROOT,
            env=environment,
            check=False,
        )
        tests = _outcomes(report)
    # A build of one commit is the release that it came of.
    release = re.match(r"[\d.]+", name)
    python = ".".join(map(str, sys.version_info[:2]))
    return (release[0] if release else name), {"python": python, "torch": version("torch"), "tests": tests}


def _outcomes(report: Path) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = defaultdict(lambda: {"passed": 0, "failed": 0, "skipped": 0})
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        file = case.get("classname", "").replace(".", "/").removeprefix("tests/")
        found[f"{file}.py::{case.get('name', '').partition('[')[0]}"][outcome] += 1
    return dict(sorted(found.items()))


def merged(records: Records, name: str, record: Mapping[str, Any]) -> Records:
    """Records with what ran last in the place of what ran before.

    Args:
        records: Those kept.
        name: The version.
        record: As :func:`ran` gave it.
    """
    before = records.get(name, {}).get("tests", {})
    tests = dict(sorted({**before, **record["tests"]}.items()))
    everything = {**records, name: {**record, "tests": tests}}
    return dict(sorted(everything.items(), key=lambda item: [int(part) for part in item[0].split(".")]))


def with_versions(page: str, records: Records) -> str:
    """A page whose table of Megatron has a column of each version.

    Args:
        page: Its text; columns that it has already are written anew.
        records: As :func:`load` gives them.
    """
    head, found, rest = page.partition(_HEADING)
    section, more, tail = rest.partition("\n## ")
    lines = [_row(line, records) if line.startswith("|") else line for line in section.split("\n")]
    return head + found + "\n".join(lines) + more + tail


def _row(line: str, records: Records) -> str:
    cells = [cell.strip() for cell in line.strip("|").split("|")][:_OWN_CELLS]
    if cells[0] == "what":
        added = list(records)
    elif cells[0] == "---":
        added = ["---"] * len(records)
    else:
        added = [_cell(record["tests"].get(cells[-1])) for record in records.values()]
    return f"| {' | '.join([*cells, *added])} |".replace("|  |", "| |").replace("|  |", "| |")


def _cell(outcome: Mapping[str, int] | None) -> str:
    """Cases that passed; a failure wins over all else, and what was not there to be run is a dash."""
    if outcome is None or not (outcome["passed"] or outcome["failed"]):
        return "–"
    return f"**{outcome['failed']} failed**" if outcome["failed"] else f"{outcome['passed']}"
