"""Section "races": compute-sanitizer over every kernel at odd sizes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.gpu.items import Figure, Found, Item, Place, Skipped
from benchmarks.gpu.race_cases import PAPERS

__all__ = ["TOOLS", "errors_in", "race_items"]

TOOLS = ("memcheck", "racecheck", "initcheck")
_ROOT = Path(__file__).resolve().parents[2]
_LIMIT = 110.0  # Seconds: every access takes up to a hundred times as long.


def race_items(place: Place) -> list[Item]:
    """Each tool over the kernels of each paper; without the tool the kernels run alone, which is recorded."""
    return [Item(f"{tool}, {paper}", 45.0, partial(_checked, place, tool, paper)) for tool in TOOLS for paper in PAPERS]


def _checked(place: Place, tool: str, paper: str) -> Found:
    sanitizer = shutil.which("compute-sanitizer")
    own = [sys.executable, "-m", "benchmarks.gpu.race_cases", paper, place.device.type]
    # PyTorch's allocator hides what lies beyond a tensor unless every one has memory of its own.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    watched = sanitizer is not None and place.on_cuda
    words = [str(sanitizer), "--tool", tool, "--error-exitcode", "86", *own] if watched else own
    done = subprocess.run(
        words, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT, check=False
    )
    if done.returncode not in (0, 86):
        raise RuntimeError(f"exit status {done.returncode}: {(done.stdout + done.stderr).strip()[-400:]}")
    ran = sum(line.split()[0] in ("MARS", "SONew", "LDAdam", "MKOR") for line in done.stdout.splitlines() if line)
    if not watched:
        why = "there is no compute-sanitizer" if place.on_cuda else "the checker watches a CUDA device"
        raise Skipped(f"{why}; {ran} settings ran without it")
    found = errors_in(done.stdout + done.stderr)
    for line in re.findall(r"^=========.*(?:Error|hazard|Uninitialized|Invalid).*$", done.stdout, re.MULTILINE)[:6]:
        print(f"    {line[:200]}")
    return Found(
        [
            Figure("errors", None if found is None else float(found), "", 0, 0),
            Figure("settings", float(ran), "", len(PAPERS[paper]), len(PAPERS[paper])),
        ]
    )


def errors_in(text: str) -> int | None:
    """Errors or hazards that the tool counted; None where it did not come to its summary."""
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    return None if found is None else int(found[1])
