"""What was found on a GPU, as a part of the page of timings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.performance import markdown

__all__ = ["gpu_rows", "gpu_section"]

_INTRODUCTION = """
## What was expected of the GPU

{device}, torch {torch}, triton {triton}, {date}. Made by `python -m benchmarks gpu`. *Expected* is what the counted
bytes, products and launches allow at the peaks that the device's maker states, and at what is usually reached of them;
**outside** is what that did not foresee.
"""


def gpu_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows for the tables of :func:`benchmarks.performance.performance_page`.

    Args:
        content: Of the file that the command wrote; empty: there is none.
    """
    return [row for item in content.get("items", {}).values() for row in item["rows"]]


def gpu_section(content: Mapping[str, Any]) -> str:
    """A table for each section, and what failed or is missing.

    Args:
        content: As for :func:`gpu_rows`.
    """
    if not content:
        return ""
    parts = [_INTRODUCTION.format(**content["about"])]
    sections: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for key, item in content["items"].items():
        section, _, name = key.partition("/")
        sections.setdefault(section, []).append((name, item))
    for section, items in sections.items():
        lines = [line for name, item in items for line in _lines(name, item)]
        headings = ("item", "figure", "value", "expected", "goal", "")
        parts.append(f"\n### {section}\n\n{markdown(headings, lines)}")
    return "".join(parts)


def _lines(name: str, item: Mapping[str, Any]) -> list[tuple[str, ...]]:
    if item["status"] != "done":
        return [(name, item["status"], item["reason"].replace("|", "/").replace("\n", " "), "", "", "")]
    found = []
    for figure in item["figures"]:
        value = "none" if figure["value"] is None else f"{figure['value']:.4g} {figure['unit']}"
        low, high = ("" if figure[end] is None else f"{figure[end]:.4g}" for end in ("low", "high"))
        goal = "" if figure["goal"] is None else f"{figure['goal']:g}"
        expected = f"{low} to {high}" if low or high else ""
        found.append((name, figure["name"], value, expected, goal, "**outside**" if figure["surprising"] else ""))
    return found
