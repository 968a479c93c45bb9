"""``python -m benchmarks gpu``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.items import Place
from benchmarks.gpu.records import Records
from benchmarks.gpu.sections import SECTIONS, items_of, sections_of
from benchmarks.gpu.session import measure_sections
from benchmarks.gpu.worker import OwnProcess

__all__ = ["run", "seconds_of"]

_MARGIN = 5.0  # Seconds of the budget for the end of the process.


def seconds_of(text: str) -> float:
    """Seconds that "540", "540s" or "9m" stand for.

    Raises:
        ValueError: It is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([sm]?)", text)
    if found is None:
        raise ValueError(f"a budget is seconds or minutes, as 540, 540s or 9m, not {text!r}")
    return float(found[1]) * (60.0 if found[2] == "m" else 1.0)


def run(
    budget: str,
    sections: Sequence[str],
    words: Sequence[str],
    device: str,
    model: str | None,
    again: bool,
    output: Path,
) -> int:
    """Measure what is not in the file yet.

    Args:
        budget: See :func:`seconds_of`.
        sections: Some of :data:`.sections.SECTIONS`; empty for all.
        words: Only items whose names contain one of them; empty for all.
        device: "cuda" or "cpu".
        model: See :class:`.items.Place`.
        again: Whether the sections are measured anew.
        output: JSON file.

    Returns:
        Exit status: 0, also where something is left for a further call.

    Raises:
        ValueError: An unknown section or budget, no such device, or rows of another one in the file.
    """
    unknown = [section for section in sections if section not in SECTIONS]
    if unknown:
        raise ValueError(f"there is no section {unknown[0]!r}; there are: {', '.join(SECTIONS)}")
    seconds = seconds_of(budget)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"there is no device {device!r} here; --device cpu tries all but the launches")
    place = Place(torch.device(device), model)
    records = Records(output)
    for section in sections or SECTIONS:
        if again:
            records.forget(section)
    worker = OwnProcess(place, sections_of)
    try:
        about, started = worker.about(), worker.startup
        if not about:
            print(f"no process could be started that sees the device {device!r}")
            return 1
        records.open(about)
        found = {section: items_of(section, place) for section in sections or SECTIONS}
        chosen = {
            section: [item for item in items if not words or any(word in item.name for word in words)]
            for section, items in found.items()
        }
        measure_sections(chosen, worker, records, seconds - _MARGIN - started, lambda line: print(line, flush=True))
    finally:
        worker.close()
    return 0
