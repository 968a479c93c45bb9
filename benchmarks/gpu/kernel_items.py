"""Sections "kernels-correct" and "kernels": results, then each kernel against its bytes and its products."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu.items import Figure, Found, Item, Place
from benchmarks.gpu.kernel_cases import Case, cases
from benchmarks.gpu.predictions import MEMORY, PRODUCTS
from benchmarks.launches import Counts, recorded_launches

__all__ = ["correct_items", "kernel_items"]

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = "tests/kernels/test_triton_device.py"
_PARTS = ("triton and MARS", "triton and SONew", "triton and LDAdam", "foreach")


def correct_items(place: Place) -> list[Item]:
    """The tests of compiled kernels."""
    tree = ast.parse((_ROOT / _TESTS).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    items = []
    for name in names:
        # Each type compiles kernels of its own.
        for part in _PARTS if "replays" in name else ("",):
            label = f"{name}, {part}" if part else name
            items.append(Item(label, 45.0 if part else 25.0, partial(_test, place, name, part)))
    return items


def _test(place: Place, name: str, part: str) -> Found:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{_TESTS}::{name}"]
    words += ["-k", part] if part else []
    done = subprocess.run(words, cwd=_ROOT, capture_output=True, text=True, timeout=600.0, check=False)
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    wrong = counts.get("failed", 0) + counts.get("error", 0)
    if wrong or done.returncode not in (0, 5):
        lines = (done.stdout + done.stderr).splitlines()
        print("\n".join(line[:200] for line in lines if re.search(r"^E  |^FAILED|=========", line))[-3000:])
    return Found(
        [
            Figure(f"{name}: exit status", float(done.returncode), "", 0, 0),
            Figure(f"{name}: passed", float(counts.get("passed", 0)), "tests", 1 if place.on_cuda else None, None),
        ]
    )


def kernel_items(place: Place) -> list[Item]:
    """Bytes and FLOP a second of every kernel, of many elements."""
    return [Item(name, 6.0, partial(_kernel, place, case)) for name, case in cases(place)]


def _kernel(place: Place, case: Case) -> Found:
    call = case.make()
    counts = Counts()
    with recorded_launches() as records:
        records.to = counts
        call()
        records.to = None
        if not place.on_cuda:
            # There is nothing to launch on: all but the launches is tried.
            return Found(list(_figures(place, case, counts, place.seconds(call))))
    return Found(list(_figures(place, case, counts, place.seconds(call))))


def _figures(place: Place, case: Case, counts: Counts, seconds: float) -> Iterator[Figure]:
    peaks = place.peaks
    moved = counts.bytes if case.bytes is None else case.bytes
    bound = case.bound
    if peaks is not None and bound is None:
        times = {kind: flops / peaks.rate(kind) for kind, flops in counts.flops.items()}
        bound = max(times, key=lambda kind: times[kind]) if sum(times.values()) > moved / peaks.bandwidth else "memory"
    yield Figure("time", seconds * 1e3, "ms")
    rate, share = moved / seconds / 1e9, MEMORY
    expected: list[float | None] = [None, None]
    if peaks is not None and bound == "memory":
        expected = [end * peaks.bandwidth / 1e9 for end in (share[0] * case.slack, share[1])]
    yield Figure("memory", rate, "GB/s", *expected)
    if peaks is not None:
        yield Figure("memory", 100 * moved / seconds / peaks.bandwidth, "% of peak", None, 100)
    for kind, flops in counts.flops.items():
        ends: list[float | None] = [None, None]
        if peaks is not None and bound == kind:
            ends = [end * peaks.rate(kind) / 1e12 for end in (PRODUCTS[kind][0] * case.slack, PRODUCTS[kind][1])]
        yield Figure(f"products, {kind}", flops / seconds / 1e12, "TFLOP/s", *ends)
        if peaks is not None:
            yield Figure(f"products, {kind}", 100 * flops / seconds / peaks.rate(kind), "% of peak", None, 100)
