"""The page of what was found on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.performance import markdown, sections_of

__all__ = ["gpu_page"]

_INTRODUCTION = """# On a GPU

This page has what was measured on one {device}, in plain PyTorch on one rank. The short answer, as times over fused
AdamW's:

{summary}
- Whole training steps are those of GPT-2 small, with AdamW as the reference. An empty cell was not measured.
- No framework, no messages between GPUs and no CUDA graphs were timed.
- MKOR was timed with two square factors for each matrix. Its default rule keeps windows of vectors since, which have
  not been timed.
- [What was expected](#what-was-expected-of-it) stands beside every figure.

{device}, torch {torch}, triton {triton}, {date}. Made by

```
python -m benchmarks gpu --output docs/data/gpu.json
python -m benchmarks gpu-page docs/data/gpu.json
```

Optimizers step in turns in one process, each on a model of its own. A ratio is the median over pairs of neighbouring
steps. *Floor* is the memory traffic of the rule over AdamW's 28 bytes per parameter, with every state in fp32 and the
clip or graft norm in a pass of its own. `tests/kernels/test_triton_device.py` and
`tests/kernels/test_narrow_device.py` compare the results of compiled kernels with those of the plain functions, also
for steps captured in graphs.
"""

_NOTES = """
- **Element-wise rules** are as near to the bytes that they must move as torch's fused AdamW, or nearer. Their kernels
  reach 3.6 to 3.8 TB/s, where a copy reaches 4.2.
- **8-bit states.** MARS-AdamW's step is shorter with them than with float32 states. It takes half the time of the 8-bit
  AdamWs of torchao and bitsandbytes, or less, though these keep one state less. SONew and LDAdam open and store their
  states in passes of their own: their steps are longer, and SONew's waits for the host.
- **MARS-M and MARS-Shampoo.** Nine tenths of a step are products, most of them symmetric. We compute half of a
  symmetric product, 1.2 to 1.4 times as fast as the library from 4096 rows on. torch's Muon takes 1.28 times as long.
- **LDAdam** multiplies in float32, and its steps at rank 256 are bound by these products.
- **SONew with band 4** is bound by instructions, not by memory.
- **Graphs** are tested there ([support](support.md)), but have not been timed. Messages between GPUs have not, either.
"""

_FIGURES = """
## What was expected of it

*Expected* is what the counted bytes, products and launches allow, at the peaks that the device's maker states and at
the part of them that is usually reached. **outside** marks what this did not foresee.
"""

_SUMMARY = (
    "MARS-AdamW",
    "MARS-AdamW, states int8",
    "MARS-Lion",
    "MARS-M",
    "SONew, tridiagonal",
    "LDAdam, rank 16",
    "LDAdam, rank 256",
    "MKOR",
    "Muon (torch), linear weights only",
    "AdamW8bit (torchao)",
)


def gpu_page(content: Mapping[str, Any]) -> str:
    """Tables of steps, then every figure by section, and what failed.

    Args:
        content: Content of the file that the command wrote.
    """
    rows = [row for item in content["items"].values() for row in item["rows"]]
    parts = [
        _INTRODUCTION.format(**content["about"], summary=_summary(rows)),
        sections_of(rows, _NOTES),
        _FIGURES,
    ]
    sections: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for key, item in content["items"].items():
        section, _, name = key.partition("/")
        sections.setdefault(section, []).append((name, item))
    for section, items in sections.items():
        lines = [line for name, item in items for line in _lines(name, item)]
        headings = ("item", "figure", "value", "expected", "goal", "")
        parts.append(f"\n### {section}\n\n{markdown(headings, lines)}")
    return "".join(parts)


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Ratios of the step alone and of whole training steps, side by side."""
    alone, whole = ({row["name"]: row["ratio"] for row in rows if ("tokens" in row) == kind} for kind in (False, True))
    lines = [
        (name, f"{alone[name]:.2f}", f"{whole[name]:.3f}" if name in whole else "")
        for name in _SUMMARY
        if name in alone
    ]
    return markdown(("type", "step alone", "whole training step"), lines)


def _lines(name: str, item: Mapping[str, Any]) -> list[tuple[str, ...]]:
    if item["status"] != "done":
        return [(name, item["status"], item["reason"].replace("|", "/").replace("\n", " "), "", "", "")]
    found: list[tuple[str, ...]] = []
    for figure in item["figures"]:
        value = "none" if figure["value"] is None else f"{figure['value']:.4g} {figure['unit']}"
        low, high = ("" if figure[end] is None else f"{figure[end]:.4g}" for end in ("low", "high"))
        goal = "" if figure["goal"] is None else f"{figure['goal']:g}"
        expected = f"{low} to {high}" if low or high else ""
        found.append((name, figure["name"], value, expected, goal, "**outside**" if figure["surprising"] else ""))
    return found
