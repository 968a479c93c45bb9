"""The page with its plots, and what stands on it beside the experiments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.convergence.directions import directions_section, draw_directions
from benchmarks.convergence.experiments import EXPERIMENTS
from benchmarks.convergence.page import evidence_page
from benchmarks.convergence.plots import draw
from benchmarks.convergence.results import Results

__all__ = ["page_text", "write_page"]


def _rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def page_text(folder: Path) -> str:
    """The page.

    Args:
        folder: Of the results.
    """
    further = {"E2": directions_section(_rows(folder / "directions.json"))}
    return evidence_page(EXPERIMENTS.values(), Results(folder), further)


def write_page(folder: Path, page: Path) -> None:
    """Write page and plots.

    Args:
        folder: Of the results.
        page: Markdown file; plots go to ``images`` beside it.
    """
    page.write_text(page_text(folder), encoding="utf-8")
    images, results = page.parent / "images", Results(folder)
    for experiment in EXPERIMENTS.values():
        draw(experiment, results, images / f"evidence-{experiment.name}.png")
    if rows := _rows(folder / "directions.json"):
        draw_directions(rows, images / "evidence-directions.png")
