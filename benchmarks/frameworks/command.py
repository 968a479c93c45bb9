"""``python -m benchmarks gpu-frameworks``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.frameworks.queue import Entry, entries, measure
from benchmarks.frameworks.running import Place
from benchmarks.gpu.command import file_of
from benchmarks.gpu.records import Records
from benchmarks.gpu.revisions import revision
from benchmarks.step import environment

__all__ = ["about", "run"]

_FRAMEWORKS = ("deepspeed", "megatron-core", "torchtitan")


def about(device: str) -> dict[str, Any]:
    """Machine, versions of torch and the frameworks, revision of the code."""
    versions = {}
    for package in _FRAMEWORKS:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {**environment(torch.device(device)), **versions, "revision": revision()}


def version_of(folder: Path) -> str:
    """Version of the Megatron that lies in a folder."""
    words = [sys.executable, "-c", "from megatron.core import package_info as p; print(p.__version__)"]
    done = subprocess.run(words, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{folder} has no megatron.core: {done.stderr.strip()[-200:]}")
    return done.stdout.split()[-1]


def run(
    seconds: float,
    fronts: Sequence[str],
    words: Sequence[str],
    device: str,
    jobs: int,
    limit: float,
    megatron: Path | None,
    again: bool,
    shown: bool,
    output: Path,
) -> int:
    """Run the cells that are not in the file yet, or of other code.

    Args:
        seconds: Time for this call.
        fronts: "deepspeed", "fsdp", "megatron", "torchtitan"; empty for all.
        words: See :func:`.queue.entries`.
        device: "cuda": all ranks share the first card; "cpu": over gloo.
        jobs: Cells at once.
        limit: Seconds that a cell may take.
        megatron: Folder that holds another version's ``megatron``: only its cells run.
        again: Whether cells with results of today's code run, too.
        shown: Whether the items are listed, and nothing runs.
        output: JSON file.

    Returns:
        Exit status: 1 if a cell that ran does not follow one process.

    Raises:
        ValueError: There is no such device or front, or the file is of another machine.
    """
    known = ("deepspeed", "fsdp", "megatron", "torchtitan")
    if unknown := [front for front in fronts if front not in known]:
        raise ValueError(f"there is no front {unknown[0]!r}; there are: {', '.join(known)}")
    records = Records(output)
    version = "" if megatron is None else version_of(megatron)
    found = entries(records, version, fronts, words)
    if not found:
        raise ValueError(f"no item has {' or '.join(words)} in its name; --list without --cell shows the names")
    if shown:
        print("\n".join(_line(entry, records) for entry in found))
        return 0
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no device 'cuda' here; --device cpu runs the same cells over gloo")
    told = about(device)
    records = Records(file_of(output, told["device"]))
    records.open(told)
    found = entries(records, version, fronts, words)
    waiting = [entry for entry in found if again or entry.state != "measured"]
    with tempfile.TemporaryDirectory() as store:
        place = Place(device, store, None if megatron is None else str(megatron.resolve()))
        measure(waiting, place, records, seconds, jobs, limit, lambda line: print(line, flush=True))
    ran = [records.rows[entry.key] for entry in waiting if entry.key in records.rows]
    red = [row for row in ran if row["status"] == "failed" or any(figure["surprising"] for figure in row["figures"])]
    judged = sum(len(row["figures"]) for row in ran)
    follow = sum(not figure["surprising"] for row in ran for figure in row["figures"])
    print(f"{follow} of {judged} figures are within their bounds")
    return int(bool(red))


def _line(entry: Entry, records: Records) -> str:
    row = records.rows.get(entry.key, {})
    when = f", {row['about']['date']}, {row['about']['revision']}" if row.get("about") else ""
    wrong = " RED" if row.get("status") == "failed" or any(f["surprising"] for f in row.get("figures", ())) else ""
    return f"{entry.state:10} {entry.cell.seconds:3.0f} s  {entry.key}{when}{wrong}"
