"""The page with its plots, and what stands on it beside the experiments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.convergence.backends import on_digits, on_text
from benchmarks.convergence.costs import cost_claims, cost_section, draw_costs, draw_memory, memory_section
from benchmarks.convergence.defaults import defaults_section
from benchmarks.convergence.directions import directions_section, draw_directions
from benchmarks.convergence.experiments import EXPERIMENTS
from benchmarks.convergence.page import evidence_page
from benchmarks.convergence.plots import draw
from benchmarks.convergence.results import Results
from benchmarks.convergence.state_types import states_section

__all__ = ["page_text", "write_page"]

_LARGER = """
## E8: Larger models

Models of 1 to 124 M parameters need a GPU: they are the [ladder](sizes.md#e13-the-ladder), E13.
"""


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
    return page + memory_section(memory) + cost_section(costs) + _LARGER + states_section(results)


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
