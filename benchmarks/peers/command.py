"""What ``python -m benchmarks peers`` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.peers.results import Row, merge
from benchmarks.peers.suites import Run, run_suite

__all__ = ["WRONG", "run", "torch_rows"]

WRONG = "wrong_options"
"""Beside the checks: each wrong input of a record is a case of its own."""


def torch_rows(types: Sequence[str] = (), checks: Sequence[str] = ()) -> Iterator[Row]:
    """Run the checks of torch's records.

    Args:
        types: Those of ours, or AdamW; none: all.
        checks: Names; none: all.

    Yields:
        A row of every type and check, and of every wrong input.
    """
    import torch

    from benchmarks.peers.torch_checks import CHECKS, check_errors, failures
    from benchmarks.peers.torch_records import RECORDS, record_of

    version = torch.__version__.partition("+")[0]
    for name in types or RECORDS:
        info = record_of(name)
        for check in checks or (*CHECKS, WRONG):
            if check == WRONG:
                found = [(f"{WRONG}[{given}]", text) for given, text in check_errors(info)]
            else:
                failed = "; ".join(f"{given}: {text}" for given, text in failures(info, CHECKS[check]))
                found = [(check, failed)]
            for case, text in found:
                outcome = "failed" if text else "passed"
                row = {"suite": "torch", "tests": version, "against": version, "type": name, "case": case}
                yield {**row, "outcome": outcome, "placed": True, "message": " ".join(text.split())[:300]}


def run(suites: Sequence[tuple[str, Path | None]], asked: Run) -> Iterator[Row]:
    """Run suites, and keep what came.

    Args:
        suites: Name and checkout of each; torch has none.
        asked: What is asked of them.

    Yields:
        The rows as they come.
    """
    for suite, checkout in suites:
        if checkout is None:
            rows = list(torch_rows())
            merge(asked.results, rows)
            yield from rows
        else:
            yield from run_suite(suite, checkout, asked)
