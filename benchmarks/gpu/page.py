"""The page of what was found on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.performance import markdown, sections_of

__all__ = ["gpu_page"]

_INTRODUCTION = """# On a GPU

{device}, torch {torch}, triton {triton}, {date}. Made by

```
python -m benchmarks gpu --output docs/data/gpu.json
python -m benchmarks gpu-page docs/data/gpu.json
```

One rank: nothing is sent. Optimizers step in turns in one process, each on a model of its own; a ratio is the median
over pairs of neighbouring steps. *Floor* is the memory traffic of the rule with every state in fp32 and the clip or
graft norm in a pass of its own, over AdamW's 28 bytes per parameter. Compiled kernels' results are held to those of
the plain functions by `tests/kernels/test_triton_device.py` and `tests/kernels/test_narrow_device.py`, steps captured
in graphs too.
"""

_NOTES = """
- Rules of elements are as far from the bytes that they must move as torch's fused AdamW is, or nearer: their kernels
  reach 3.6 to 3.8 TB/s where a copy reaches 4.2.
- With states of a byte each MARS-AdamW's step is shorter than with states in float32, and takes half of the time of the
  8-bit AdamWs of torchao and bitsandbytes, or less, though they keep one state less. SONew's and LDAdam's open and keep
  theirs in passes of their own: longer steps, and SONew's waits for the host.
- MARS-M's and MARS-Shampoo's steps are nine tenths products, most of them symmetric: those are done by half, 1.2 to 1.4
  times as fast as the library from 4096 rows on. torch's Muon takes 1.28 times as long.
- LDAdam's products are in float32, and its steps at rank 256 are bound by them; those of SONew's band 4 by
  instructions, not by memory.
- Graphs are tested there ([support](support.md)), but have not been timed; neither have messages between GPUs.
"""

_FIGURES = """
## What was expected of it

*Expected* is what the counted bytes, products and launches allow at the peaks that the device's maker states, and at
what is usually reached of them; **outside** is what that did not foresee.
"""


def gpu_page(content: Mapping[str, Any]) -> str:
    """Tables of steps, then every figure by section, and what failed.

    Args:
        content: Content of the file that the command wrote.
    """
    rows = [row for item in content["items"].values() for row in item["rows"]]
    parts = [_INTRODUCTION.format(**content["about"]), sections_of(rows, _NOTES), _FIGURES]
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
