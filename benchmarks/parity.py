"""The parity matrix as a page of the documentation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["half_cell", "number_text", "parity_page", "read_figures"]

_HEAD = """# Parity under DeepSpeed

Does a run under DeepSpeed follow one process of plain PyTorch? Every JSON type was tried under every wrapper, precision
and number of ranks: ten steps of a small model whose matrices are cut inside a row, two micro-batches per step,
clipping that acts in every step. AdamW shows how far rounding alone moves a run. The table has the worst
cell of each type, end to end:

| precision | AdamW | the middle one of our types | the furthest | which |
|---|---|---|---|---|
{rows}

In fp32 it is the largest difference of a weight, relative to the largest change of a weight; in half precision the mean
difference relative to the mean change. Types that move further than AdamW do so in one process already, when samples
are cut into other micro-batches; the tables below say by how much.

## How to read the tables

They are generated from the figures of the tests (two cores, about an hour):

```sh
RANKWISE_PARITY_TABLE=parity.jsonl python -m pytest -m exhaustive tests/deepspeed_engine/test_ds_parity.py
python -m benchmarks parity parity.jsonl docs/parity.md
```

- **same gradients** compares only the sharded optimizer. One process gets the reduced gradients (for MKOR also the
  statistics) that the engine handed over. The figure is the largest difference of a weight relative to the largest
  change of a weight, and the largest over all wrappers, ranks and seeds.
- **first gradients** compares the gradients that the engine handed over in the first step with those of one process. It
  is the mean difference relative to the mean size, and the largest over the same cells.
- The other columns are **end to end**, by wrapper and ranks. One process trains on the whole batch in the same
  precision, with fp32 master weights. It also does what the wrapper already does to the arithmetic of one rank, so that
  the error on one rank is one of fp32. Gradients differ by rounding; the row of `torch.optim.AdamW` shows how far that
  alone moves a run.

The head of the test explains how much is allowed, and why the mean is the figure in half precision.
"""

_FP32_TEXT = """
Each figure is the largest difference of a weight relative to the largest change of a weight, of one seed. Allowed are
10 times AdamW's, or, if more, 10 times what one process of the type shows when the same samples are cut into smaller
micro-batches. For SONew's default edge tolerance, 10 times the effect of gradient noise of 1e-7 on one process is
allowed.
"""

_HALF_TEXT = """
Each figure is the mean difference relative to the mean change, the median of {seeds} seeds. In brackets is its ratio to
AdamW's in the same cell, where AdamW's is more than fp32 rounding. Twice AdamW's is allowed. **†** marks cells beyond
that: rounding moves these rules further in one process already. The number after the mark is the error over the type's
own response, which one process shows when the same samples are cut into smaller micro-batches (times AdamW's error in
the cell over AdamW's under that cut, where it is more). Allowed there is 3.
"""

_LARGEST_TEXT = """
This is the largest difference of a single weight in these runs, relative to the largest change of a weight. One flipped
sign is a whole step here, for AdamW as for MARS-Lion.
"""

_TITLES = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16, static loss scale (256; at stage 0: 1, the only one DeepSpeed allows us there)",
    "fp16 dynamic": "fp16, dynamic loss scale that grows three times",
}
_FP32_ROUNDING = 1e-6
"""Where AdamW's own figure is below this (on one rank), multiples of it say nothing and are left out."""

_STAGE_0 = {"fp32": "no wrapper"}

Row = Mapping[str, Any]


def read_figures(path: Path, keys: Sequence[str] = ("precision", "wrapper", "world", "type")) -> list[dict[str, Any]]:
    """Rows the tests appended, one JSON object per line; of a cell measured twice, the last counts.

    Args:
        path: The file.
        keys: What tells cells apart.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found[tuple(row[key] for key in keys)] = row
    return list(found.values())


def parity_page(rows: Sequence[Row]) -> str:
    """Render the rows of the parity tests.

    Args:
        rows: Each with precision, wrapper, world, type, seeds, largest, mean and, except for AdamW, same_gradients and
            first_gradients; own_response where the type is held to that.
    """
    parts = [_HEAD.format(rows="\n".join(_in_short(rows)))]
    for precision, title in _TITLES.items():
        own = [row for row in rows if row["precision"] == precision]
        if not own:
            continue
        parts.append(f"\n## {title}\n")
        if precision == "fp32":
            parts.append(_FP32_TEXT + "\n" + _table(precision, own, lambda row, _: number_text(row["largest"])))
            continue
        parts.append(_HALF_TEXT.format(seeds=own[0]["seeds"]) + "\n" + _table(precision, own, half_cell))
        largest = _table(precision, own, lambda row, _: number_text(row["largest"]), sums=False)
        parts.append(_LARGEST_TEXT + "\n" + largest)
    return "".join(parts)


def _in_short(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each precision: how far AdamW moves at the most, and the type of ours that moves furthest."""
    for precision in _TITLES:
        key = "largest" if precision == "fp32" else "mean"
        worst: dict[str, float] = {}
        for row in rows:
            if row["precision"] == precision:
                worst[row["type"]] = max(row[key], worst.get(row["type"], 0.0))
        ours = sorted((value, name) for name, value in worst.items() if name != "AdamW")
        if ours:
            middle, (furthest, name) = ours[len(ours) // 2][0], ours[-1]
            cells = (precision, *map(number_text, (worst["AdamW"], middle, furthest)), name)
            yield _line(cells)


def _table(precision: str, rows: Sequence[Row], cell: Callable[[Row, Row], str], sums: bool = True) -> str:
    """Types in rows; wrappers and ranks in columns, in the order the figures came in and by number of ranks."""
    wrappers = sorted({row["wrapper"] for row in rows}, key=_wrapper_order)
    columns = [(wrapper, world) for wrapper in wrappers for world in sorted({row["world"] for row in rows})]
    by_type: dict[str, dict[tuple[str, int], Row]] = {}
    for row in rows:
        by_type.setdefault(row["type"], {})[row["wrapper"], row["world"]] = row
    names = [f"{_wrapper_name(precision, wrapper)} × {world}" for wrapper, world in columns]
    summaries = ["same gradients", "first gradients"] if sums else []
    lines = [_line(["", *summaries, *names]), _line(["---"] * (1 + len(summaries) + len(names)))]
    for label, found in by_type.items():
        cells = [cell(found[key], by_type["AdamW"][key]) if key in found else "" for key in columns]
        totals = [_worst(found.values(), summary.replace(" ", "_")) for summary in summaries]
        lines.append(_line([label, *totals, *cells]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _worst(rows: Any, key: str) -> str:
    values = [row[key] for row in rows if key in row]
    return number_text(max(values)) if values else "–"


def half_cell(row: Row, adamw: Row) -> str:
    """The mean error of a half type, over AdamW's and, where it is held to that, over the type's own response."""
    notes = []
    if row["type"] != "AdamW" and adamw["mean"] > _FP32_ROUNDING:
        notes.append(f"{row['mean'] / adamw['mean']:.1f}")
    if "own_response" in row:
        notes.append(f"† {row['mean'] / row['own_response']:.1f}")
    return " ".join([number_text(row["mean"]), *([f"({' '.join(notes)})"] if notes else [])])


def number_text(value: float) -> str:
    """One digit and the power of ten."""
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")


def _wrapper_order(wrapper: str) -> int:
    return ("stage 0", "BF16_Optimizer", "ZeRO-1", "ZeRO-2", "ZeRO-3").index(wrapper)


def _wrapper_name(precision: str, wrapper: str) -> str:
    return _STAGE_0.get(precision, "FP16_UnfusedOptimizer") if wrapper == "stage 0" else wrapper
