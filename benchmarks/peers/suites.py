"""Where the tests of DeepSpeed and Megatron lie in a checkout, and what runs of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.deepspeed_hook import CONTROL, TYPE
from benchmarks.peers.results import Row, merge, read
from benchmarks.peers.runner import Suite, collected, outcomes, spread

__all__ = ["Run", "run_suite"]

_CHUNK = 72
"""Cases of one type in a row; then comes the next type, so that a run that is ended has something of each."""


def deepspeed_suite(checkout: Path, name: str, limit: float) -> Suite:
    """DeepSpeed's unit tests that configure an optimizer, with a type in Adam's place.

    Args:
        checkout: Of DeepSpeed, near the installed version.
        name: The type.
        limit: Seconds that a case may take.
    """
    tests = checkout / "tests"
    files = [path for path in sorted((tests / "unit").rglob("test_*.py")) if '"optimizer"' in path.read_text()]
    paths = [str(path.relative_to(tests)) for path in files]
    # The CPU accelerator has as many devices as a host says that it has ranks.
    environment = {TYPE: name, "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4", "DS_UNITTEST_TIMEOUT": f"{limit * 2:.0f}"}
    return Suite("deepspeed", tests, paths, "benchmarks.peers.deepspeed_hook", environment, (), limit)


_MEGATRON = (
    "tests/unit_tests/test_optimizer.py",
    "tests/unit_tests/test_layer_wise_optimizer.py",
    "tests/unit_tests/test_optimizer_cpu_offloading.py",
    "tests/unit_tests/optimizer",
    "tests/unit_tests/dist_checkpointing",
    "tests/unit_tests/distributed",
)


def megatron_suite(checkout: Path, name: str, limit: float, ranks: int = 1) -> Suite:
    """Megatron's unit tests of optimizers, of data parallelism and of their checkpoints, in CPU processes.

    Args:
        checkout: Of Megatron-LM at the installed version of megatron-core, with its ``tests``.
        name: The type in Adam's place.
        limit: Seconds that a case may take.
        ranks: Processes; the tests are written for eight GPUs, and skip or fail what needs more than there are.
    """
    paths = [path for path in _MEGATRON if (checkout / path).exists()]
    environment = {
        TYPE: name,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29771",
    }
    hook, arguments = "benchmarks.peers.megatron_hook", ("-o", "addopts=", "-W", "ignore")
    return Suite("megatron", checkout, paths, hook, environment, arguments, limit, ranks)


_SUITES: Mapping[str, Callable[[Path, str, float], Suite]] = {"deepspeed": deepspeed_suite, "megatron": megatron_suite}


@dataclass(frozen=True)
class Run:
    """What is asked of the suites.

    Attributes:
        results: File of the rows, to which is added.
        types: Of ours.
        most: Cases of a test function.
        limit: Seconds that a case may take.
        only: Cases with this in their names.
        again: Whether what is known is run, too.
    """

    results: Path
    types: Sequence[str]
    most: int
    limit: float
    only: str
    again: bool


def run_suite(name: str, checkout: Path, asked: Run) -> Iterator[Row]:
    """Run what is not known yet: the control first, then our types where it was put in place and passed.

    Args:
        name: "deepspeed" or "megatron".
        checkout: Of the tests.
        asked: What is asked.

    Yields:
        The rows as they come.
    """
    suites = {each: _SUITES[name](checkout, each, asked.limit) for each in (CONTROL, *asked.types)}
    tests = _version_of(name, checkout)
    # A checkout of Megatron has the core that its tests import; DeepSpeed's tests import the installed package.
    common: dict[str, Any] = {"suite": name, "tests": tests, "against": version(name) if name == "deepspeed" else tests}
    everything = _by_turns(spread(collected(suites[CONTROL]), asked.most))
    common["of"] = len(everything)
    chosen = [case for case in everything if asked.only in case]
    for start in range(0, len(chosen), _CHUNK):
        for each, suite in suites.items():
            rows = {(row["type"], row["case"]): row for row in read(asked.results) if row["suite"] == name}
            pending = [case for case in chosen[start : start + _CHUNK] if asked.again or (each, case) not in rows]
            if each != CONTROL:
                pending = [case for case in pending if _worth(rows.get((CONTROL, case)))]
            for outcome in outcomes(suite, pending):
                row = {**common, "type": each, **outcome}
                merge(asked.results, [row])
                yield row


def _version_of(name: str, checkout: Path) -> str:
    if name == "deepspeed":
        return (checkout / "version.txt").read_text().strip()
    text = (checkout / "megatron/core/package_info.py").read_text()
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))


def _worth(control: Row | None) -> bool:
    """Whether a case says anything of an optimizer: the control was in Adam's place, and passed."""
    return control is not None and control["placed"] and control["outcome"] == "passed"


def _by_turns(cases: Sequence[str]) -> list[str]:
    """One case of every file, then the next of every file: a run that is ended has seen something of each."""
    files: dict[str, list[str]] = {}
    for case in cases:
        files.setdefault(case.partition("::")[0], []).append(case)
    turns = [(turn, case) for found in files.values() for turn, case in enumerate(found)]
    return [case for _, case in sorted(turns, key=lambda item: item[0])]
