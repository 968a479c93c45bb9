"""``python -m benchmarks gpu``."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.items import Place
from benchmarks.gpu.records import Records
from benchmarks.gpu.revisions import revision
from benchmarks.gpu.sections import SECTIONS, items_of, sections_of, worth_of
from benchmarks.gpu.session import Entry, measure, queued
from benchmarks.gpu.worker import OwnProcess

__all__ = ["everything", "file_of", "run", "seconds_of"]

_MARGIN = 5.0  # Seconds of the budget for the end of the process.
_FIRST, _FRAMEWORKS = 0.45, 0.4  # Shares of the time for everything; the rest is for the items that are left.


def seconds_of(text: str) -> float:
    """Seconds that "540", "540s" or "9m" stand for.

    Raises:
        ValueError: It is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([sm]?)", text)
    if found is None:
        raise ValueError(f"a budget is seconds or minutes, as 540, 540s or 9m, not {text!r}")
    return float(found[1]) * (60.0 if found[2] == "m" else 1.0)


def file_of(path: Path, device: str) -> Path:
    """The file of a device's figures: this one, or one beside it that names the device, if this is another's.

    Args:
        path: JSON file.
        device: Name of the device.
    """
    known = Records(path).about
    if known is None or known.get("device") == device:
        return path
    return path.with_name(f"{path.stem}-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}{path.suffix}")


def run(
    budget: str,
    sections: Sequence[str],
    words: Sequence[str],
    device: str,
    model: str | None,
    again: bool,
    shown: bool,
    output: Path,
) -> int:
    """Measure what is not in the file yet, or of other code.

    Args:
        budget: See :func:`seconds_of`.
        sections: Some of :data:`.sections.SECTIONS`; empty for all.
        words: Only items whose names contain one of them; empty for all.
        device: "cuda" or "cpu".
        model: See :class:`.items.Place`.
        again: Whether the sections are measured anew.
        shown: Whether the items are listed with their states and predictions, and nothing is measured.
        output: JSON file; see :func:`file_of`.

    Returns:
        Exit status: 0, also where something is left for a further call.

    Raises:
        ValueError: An unknown section or budget, or no such device.
    """
    unknown = [section for section in sections if section not in SECTIONS]
    if unknown:
        raise ValueError(f"there is no section {unknown[0]!r}; there are: {', '.join(SECTIONS)}")
    seconds = seconds_of(budget)
    place = Place(torch.device(device), model)
    if shown:
        print("\n".join(line_of(entry, output) for entry in _queue(place, sections, words, Records(output))))
        return 0
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"there is no device {device!r} here; --device cpu tries all but the launches")
    worker = OwnProcess(place, sections_of)
    try:
        about, started = worker.about(), worker.startup
        if not about:
            print(f"no process could be started that sees the device {device!r}")
            return 1
        records = Records(file_of(output, about["device"]))
        for section in (sections or SECTIONS) if again else ():
            records.forget(section)
        records.open(about | {"revision": revision()})
        queue = _queue(place, sections, words, records)
        measure(queue, worker, records, seconds - _MARGIN - started, lambda line: print(line, flush=True))
    finally:
        worker.close()
    return 0


def _queue(place: Place, sections: Sequence[str], words: Sequence[str], records: Records) -> list[Entry]:
    found = {section: items_of(section, place) for section in sections or SECTIONS}
    chosen = {
        section: [item for item in items if not words or any(word in item.name for word in words)]
        for section, items in found.items()
    }
    return queued(chosen, records)


def line_of(entry: Entry, output: Path) -> str:
    """State of an item, when and of which revision it was measured, what it is worth, what is expected.

    Args:
        entry: The item.
        output: JSON file.
    """
    row: dict[str, Any] = Records(output).rows.get(entry.key, {})
    versions = row.get("about") or (Records(output).about if row else None) or {}
    when = ", ".join(str(versions[key]) for key in ("date", "revision") if versions.get(key))
    status = "" if row.get("status") in (None, "done") else f" {row['status']}"
    expected = "" if entry.item.predict is None else entry.item.predict()
    worth = worth_of(entry.section, entry.item)
    parts = (f"{entry.state:10}", f"worth {worth:4.1f}", f"{entry.item.seconds:4.0f} s", f"{entry.key}{status}")
    return "  ".join(filter(None, (*parts, when, expected and f"expected {expected}")))


def everything(budget: str, device: str, model: str | None, output: Path) -> int:
    """The whole queue within a time: what is worth most, then the frameworks, then what is left.

    Args:
        budget: See :func:`seconds_of`.
        device: "cuda" or "cpu".
        model: See :class:`.items.Place`.
        output: JSON file of :func:`run`; that of the frameworks lies beside it.

    Returns:
        Exit status: that of the frameworks, of which each cell is right or wrong.
    """
    from benchmarks.frameworks import command as frameworks

    begun, seconds = time.monotonic(), seconds_of(budget)
    run(f"{_FIRST * seconds:.0f}", (), (), device, model, False, False, output)
    beside = output.with_name("gpu-frameworks.json")
    status = frameworks.run(_FRAMEWORKS * seconds, (), (), device, 4, 60.0, None, False, False, beside)
    left = seconds - (time.monotonic() - begun)
    run(f"{max(left, 0.0):.0f}", (), (), device, model, False, False, output)
    return status
