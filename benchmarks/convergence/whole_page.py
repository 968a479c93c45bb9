"""The page with its plots, and what stands on it beside the experiments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.convergence.backends import on_digits, on_text
from benchmarks.convergence.costs import cost_claims, cost_section, draw_costs, draw_memory, memory_section
from benchmarks.convergence.defaults import defaults_section
from benchmarks.convergence.directions import directions_section, draw_directions
from benchmarks.convergence.experiments import EXPERIMENTS
from benchmarks.convergence.page import evidence_page, interval_words
from benchmarks.convergence.plots import draw
from benchmarks.convergence.repeats import Repeat, kept_repeats
from benchmarks.convergence.results import Results
from benchmarks.convergence.state_types import states_section
from benchmarks.convergence.verdicts import mean_interval
from benchmarks.performance import markdown

__all__ = ["page_text", "write_page"]

_LARGER = """
## E8: Larger models

Models of 1 to 124 M parameters need a GPU: they are the [ladder](sizes.md#e13-the-ladder), E13.
"""


_NUMERICS = """
## Rounding of GPUs, tried on a CPU

On GPUs LDAdam multiplies bfloat16 halves instead of float32, and MARS-M float16 (Gram matrices) instead of bfloat16. A
transformer of bytes (2 layers, width 64, {steps} steps) was trained with either rounding, from the same weights on the
same samples, on a CPU ({torch}). Held-out loss, nats per byte, and the difference paired by {seeds} seeds:

"""


def _numerics(path: Path) -> str:
    """What ``python -m benchmarks.device_numerics`` found."""
    if not path.exists():
        return ""
    found = json.loads(path.read_text(encoding="utf-8"))
    about, losses = found["about"], found["losses"]
    rows = []
    for row in found["differences"]:
        means = (f"{fmean(losses[row[side]]):.4f}" for side in ("arm", "beside"))
        rows.append((row["arm"], row["beside"], *means, f"{row['difference']:+.4f} ± {row['half_interval']:.4f}"))
    head = _NUMERICS.format(steps=about["steps"], torch=f"torch {about['torch']}", seeds=len(about["seeds"]))
    return head + markdown(("rounding", "beside", "loss", "beside it", "difference, 95 % interval"), rows)


_REPEATS = """
## The same runs, by later code

Rows above stay as they were recorded. These were run again after a rule's form had changed (MKOR's official rule keeps
windows of vectors where it kept dense factors), with `python -m benchmarks convergence --only E3 --contender
"MKOR on AdamW" --again`; the difference is paired by seed.

"""


def _repeats(folder: Path) -> str:
    """A row for each contender whose runs were done again."""
    groups: dict[tuple[str, str], list[Repeat]] = {}
    for one in kept_repeats(folder):
        groups.setdefault((one.experiment, one.contender), []).append(one)
    rows = [(experiment, contender, *_repeated_figures(repeats)) for (experiment, contender), repeats in groups.items()]
    columns = ("experiment", "contender", "seeds", "recorded", "again", "difference, 95 % interval", "states again")
    return _REPEATS + markdown(columns, rows) if rows else ""


def _repeated_figures(repeats: Sequence[Repeat]) -> tuple[str, ...]:
    recorded, repeated = (fmean(getattr(one, name) for one in repeats) for name in ("recorded", "repeated"))
    difference = interval_words(mean_interval([one.repeated - one.recorded for one in repeats]), "+")
    return (
        str(len(repeats)),
        f"{recorded:.4f}",
        f"{repeated:.4f}",
        difference,
        f"{repeats[0].state_bytes / 2**20:.2f} MiB",
    )


def _rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def page_text(folder: Path) -> str:
    """The page.

    Args:
        folder: Folder of the results.
    """
    results = Results(folder)
    further = {"E2": on_digits(results) + directions_section(_rows(folder / "directions.json")), "E3": on_text(results)}
    memory, costs = (_rows(folder / name) for name in ("memory.json", "costs.json"))
    page = evidence_page(EXPERIMENTS.values(), results, further, cost_claims(memory, costs), defaults_section(results))
    return (
        page
        + memory_section(memory)
        + cost_section(costs)
        + _LARGER
        + states_section(results)
        + _numerics(folder / "numerics.json")
        + _repeats(folder)
    )


def write_page(folder: Path, page: Path) -> None:
    """Write page and plots.

    Args:
        folder: Folder of the results.
        page: Markdown file; plots go to ``images`` beside it.
    """
    page.write_text(page_text(folder), encoding="utf-8")
    images, results = page.parent / "images", Results(folder)
    for experiment in EXPERIMENTS.values():
        draw(experiment, results, images / f"evidence-{experiment.name}.png")
    if rows := _rows(folder / "directions.json"):
        draw_directions(rows, images / "evidence-directions.png")
    for name, drawing, kind in (("E6", draw_memory, "memory"), ("E7", draw_costs, "costs")):
        if rows := _rows(folder / f"{kind}.json"):
            drawing(rows, images / f"evidence-{name}.png")
