"""Times of E13's steps, each measured with the device to itself: runs side by side have none that mean anything."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence.experiment import Run
from benchmarks.convergence.ladder import RUNGS, experiment_of
from benchmarks.convergence.results import Results
from benchmarks.convergence.runner import Place, step_milliseconds

__all__ = ["FILE", "known_times", "measure_times"]

FILE = "E13-times.json"


def known_times(folder: Path) -> list[dict[str, Any]]:
    """Rows of experiment, contender, device, milliseconds, torch and date.

    Args:
        folder: Folder of the results.
    """
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def measure_times(
    folder: Path, place: Place, measure: Callable[[Run, torch.device], float] = step_milliseconds
) -> Iterator[str]:
    """Measure the times that are not there for this device, of contenders that have their place on the ladder.

    Args:
        folder: Folder of the results; the file is written after each.
        place: Device, and when to stop.
        measure: Measures one.

    Yields:
        A line for each.
    """
    rows, results = known_times(folder), Results(folder).of(place.device.type)
    known = {(row["experiment"], row["contender"]) for row in rows if row["device"] == place.name}
    # Each size only once for the two lengths of 16 M: their steps are the same.
    for rung in {rung.hidden: rung for rung in reversed(RUNGS)}.values():
        experiment = experiment_of(rung, results)
        for contender in experiment.contenders:
            if (rung.name, contender.name) in known or time.monotonic() > place.end:
                continue
            milliseconds = measure(experiment.run(contender, contender.settings[0], 0, 0), place.device)
            where = {"device": place.name, "device_type": place.device.type}
            where |= {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
            row = {
                "experiment": rung.name,
                "contender": contender.name,
                "milliseconds": round(milliseconds, 3),
                **where,
            }
            rows.append(row)
            (folder / FILE).write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
            yield f"{rung.name} {contender.name}: {milliseconds:.2f} ms a step"
