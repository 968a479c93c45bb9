"""The page of what was found on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.frameworks.page import frameworks_section
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.whole_page import whole_section
from benchmarks.performance import markdown, sections_of

__all__ = ["gpu_page"]

_INTRODUCTION = """# On a GPU

This page has what was measured on one {device}: whole training steps first, then [frameworks](#frameworks-on-one-card),
the [optimizer alone](#the-optimizer-alone), and [every figure](#what-was-expected-of-it) with what was expected of it.
`python -m benchmarks gpu --list` shows what is measured, what is of older code, and what is not measured.
{missing}"""

_ALONE = """
## The optimizer alone

The short answer, in plain PyTorch on one rank, as times over fused AdamW's:

{summary}
- Whole training steps of this table are those of GPT-2 small, not compiled, with AdamW as the reference. They take so
  long (150 thousand tokens a second) that an optimizer's share is small. An empty cell was not measured.
- MKOR was timed with two square factors for each matrix. Its default rule keeps windows of vectors since, which have
  not been timed.

{device}, torch {torch}, triton {triton}, {date}. Made by

```
python -m benchmarks gpu        # goes on where docs/data/gpu.json ends
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
- **LDAdam** multiplied in float32, and its steps at rank 256 were bound by these products.
- **Changed since, and not measured.** LDAdam multiplies bfloat16 halves, and long matrices of MARS-M and MARS-Shampoo
  are orthogonalised in float16 on their Gram matrices, with tiles copied by descriptors. The figures of these three
  types are those of the kernels before. Counts of bytes and operations, at the rates of the products above, predict
  20 to 23 ms for LDAdam at rank 256, whose kernels split large matrices where they read them. For MARS-M, whose pass
  over the momenta measures them (4 bytes a parameter less), they predict 103 ms, or 85 if the descriptors bring 560 to
  680 TFLOP/s; a step of Llama 1B has 167 launches instead of 216, one of 7 B 1,225.
- **SONew with band 4** is bound by instructions, not by memory.
- **Kernels from after these figures**, which no device has timed. SONew's pass opens and stores 8-bit states itself: 12
  launches and 28 bytes a parameter instead of 339 and 84. By its instructions a step should take 8 to 10 ms here, not
  49.6. For band 4 a thread takes four elements, with 346 instructions each instead of 900, which should be 16 to 20 ms
  instead of 34.1. AdamW's pass over 8-bit states, which instructions bind, has 132 an element instead of 156 (4.6 ms of
  MARS-AdamW's step instead of 5.4). The figures above are of the kernels before.
- **Graphs**: [what can be captured](support.md#cuda-graphs), and how it is tested.
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


def gpu_page(
    content: Mapping[str, Any], cpu: Mapping[str, Any] | None = None, gpu: Mapping[str, Any] | None = None
) -> str:
    """Whole steps, frameworks, tables of steps, then every figure by section, and what failed.

    Args:
        content: Content of the file that the command wrote.
        cpu: What ``gpu-frameworks`` wrote on a CPU; None: it has not run.
        gpu: What it wrote on a card.
    """
    every = [row for item in content["items"].values() for row in item["rows"]]
    rows = [row for row in every if "engine" not in row]
    parts = [
        _INTRODUCTION.format(**content["about"], missing=_missing(content["items"])),
        whole_section([row for row in every if "engine" in row]),
        frameworks_section(cpu, gpu),
        _ALONE.format(**content["about"], summary=_summary(rows)),
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


_SAID = {
    "kernels-correct": "results of the present kernels",
    "whole-steps": "whole steps at the card's throughput",
    "steady": "memory of a steady step",
    "graphs": "captured steps, also below FSDP2 and DDP",
    "races": "kernels under compute-sanitizer",
    "multi": "messages between two GPUs",
}
"""What sections of the queue are about."""


def _missing(items: Mapping[str, Any]) -> str:
    """A line of what no item has measured."""
    measured = {key.partition("/")[0] for key in items}
    left = [f"{_SAID.get(section, section)} (`--section {section}`)" for section in SECTIONS if section not in measured]
    return f"Nothing is measured yet of: {'; '.join(left)}.\n" if left else ""


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
