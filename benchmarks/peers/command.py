"""What ``python -m benchmarks peers`` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.peers.results import Row, merge
from benchmarks.peers.suites import run_suite

__all__ = ["run", "torch_rows"]


def torch_rows(types: Sequence[str] = (), checks: Sequence[str] = ()) -> Iterator[Row]:
    """Run the checks of torch's records.

    Args:
        types: Those of ours, or AdamW; none: all.
        checks: Names; none: all.

    Yields:
        A row of every type and check.
    """
    import torch

    from benchmarks.peers.torch_checks import CHECKS, check_errors, failures
    from benchmarks.peers.torch_records import RECORDS, record_of

    version = torch.__version__.partition("+")[0]
    for name in types or RECORDS:
        info = record_of(name)
        for check in checks or (*CHECKS, "wrong_options"):
            found = list(check_errors(info) if check == "wrong_options" else failures(info, CHECKS[check]))
            message = " ".join("; ".join(f"{given}: {text}" for given, text in found).split())[:400]
            yield {
                "suite": "torch",
                "tests": version,
                "against": version,
                "type": name,
                "case": check,
                "outcome": "failed" if found else "passed",
                "placed": True,
                "message": message,
            }


def run(
    suites: Sequence[tuple[str, Path | None]],
    results: Path,
    types: Sequence[str],
    most: int,
    limit: float,
    only: str,
    again: bool,
) -> Iterator[Row]:
    """Run suites, and keep what came.

    Args:
        suites: Name and checkout of each; torch has none.
        results: File of the rows.
        types: Of ours.
        most: Cases of a test function.
        limit: Seconds that a case may take.
        only: Cases with this in their names.
        again: Run what is known, too.

    Yields:
        The rows as they come.
    """
    for suite, checkout in suites:
        if checkout is None:
            rows = list(torch_rows())
            merge(results, rows)
            yield from rows
        else:
            yield from run_suite(suite, checkout, results, types, most, limit, only, again)
