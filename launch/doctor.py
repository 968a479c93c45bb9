"""``rankwise doctor`` looks at these things, in this order."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rankwise.launch.environment import rank_environment
from rankwise.launch.findings import Finding
from rankwise.launch.installed import look_at_packages
from rankwise.launch.machine import look_at_frameworks, look_at_kernels, look_at_locks, look_at_machine
from rankwise.launch.self_test import TOLERANCE, differences
from rankwise.launch.spawn import started_ranks

__all__ = ["as_json", "examine", "run_self_test"]

_RANKS = 2


def examine(self_test: bool = True, timeout: float = 300.0) -> Iterator[Finding]:
    """Look at this environment, and change nothing but the cache of compiled kernels.

    Args:
        self_test: Whether to run two ranks, too.
        timeout: Seconds after which the two ranks count as failed.
    """
    looks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("packages", look_at_packages),
        ("machine", look_at_machine),
        ("kernels", look_at_kernels),
        ("frameworks", look_at_frameworks),
        ("locks", look_at_locks),
    ]
    for topic, look in looks:
        try:
            with _quiet():
                findings = list(look())
        except Exception as error:  # a check that fails must not hide the others
            findings = [Finding(topic, "look", f"{type(error).__name__}: {error}", "fail", "report this")]
        yield from findings
    if self_test:
        yield run_self_test(timeout)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what frameworks print while they are imported, so that only the answer is printed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def run_self_test(timeout: float) -> Finding:
    """Compare two ranks on the CPU with recorded trajectories.

    Args:
        timeout: Seconds that the ranks may take.
    """
    begin = time.monotonic()
    name = f"{_RANKS} ranks against recorded trajectories"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "weights.json"
        environment = {**rank_environment(_RANKS, cpu=True), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with started_ranks("self_test", [str(target)], _RANKS, environment, **streams) as process:
            try:
                said, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                return Finding(
                    *("self-test", name, f"no end after {timeout:.0f} s", "fail"),
                    "the ranks cannot reach each other: look at GLOO_SOCKET_IFNAME and at firewalls on localhost",
                )
        if process.returncode or not target.exists():
            return Finding("self-test", name, f"status {process.returncode}", "fail", _end_of(said))
        far = differences(json.loads(target.read_text(encoding="utf-8")))
    seconds = time.monotonic() - begin
    worst = max(far, key=lambda key: far[key])
    value = f"{len(far)} optimizers follow, {worst} least ({far[worst]:.1e}), in {seconds:.0f} s"
    if far[worst] <= TOLERANCE:
        return Finding("self-test", name, value)
    off = ", ".join(f"{key} {value:.1e}" for key, value in far.items() if not value <= TOLERANCE)
    advice = "set RANKWISE_NATIVE=0 and run it again: if that helps, the compiler is at fault; report either"
    return Finding("self-test", name, f"off by more than {TOLERANCE:.0e}: {off}", "fail", advice)


def _end_of(said: bytes) -> str:
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    # The launcher ends with an error, too, which says only that a rank has failed.
    errors = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    signals = [line.strip() for line in lines if " (SIG" in line and "SIGTERM" not in line]
    return (errors or signals or lines or [f"{sys.executable} -m torch.distributed.run said nothing"])[-1][-500:]


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Return the findings, and whether any is a failure, for programs."""
    failed = any(finding.status == "fail" for finding in findings)
    return {"healthy": not failed, "findings": [asdict(finding) for finding in findings]}
