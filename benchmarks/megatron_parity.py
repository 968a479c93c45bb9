"""The Megatron parity figures as a page of the documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["layouts_table", "megatron_page"]

_HEAD = """# Parity under Megatron

This page compares every optimizer in the wrappers of real megatron-core 0.16.1 with one process. The short answer: all
copies of a weight on different ranks are equal bit by bit in every cell, and every cell is within the limits below.

There are two kinds of figures:

- **Same gradients**: the cell gets the reduced gradients that one process recorded. The figure is the largest
  difference of a weight relative to the largest change of a weight.
- **End to end**: the cell computes its own gradients, which differ by rounding. AdamW's column shows how far that alone
  moves a run.

Each run has ten steps of a small GPT: 2 layers, width 64, grouped-query attention, SwiGLU or biased GELU, four experts
in the EP cells. There are two micro-batches per step (four in the interleaved pipeline, of four layers). Ranks are CPU
processes (gloo). AdamW is Megatron's own. The page is generated from the figures of the tests (without `-m exhaustive`,
of the usual cells):

```sh
export RANKWISE_MEGATRON_TABLE=figures.json
python -m pytest -m exhaustive tests/megatron_engine/test_megatron_parity.py
python -m pytest -m exhaustive tests/megatron_engine/test_megatron_deepspeed.py
python -m benchmarks megatron-parity figures.json docs/megatron-parity.md
```
"""

_FP32 = """
Each figure is the largest difference of a weight relative to the largest change of a weight. Allowed are 10 times
AdamW's, or 10 times what one process of the type shows when the samples are cut into other micro-batches. For MARS-Lion
one flipped sign is a whole step, and SONew drops or keeps an edge beside its threshold: for these two the limit of 10
times AdamW's holds for the mean difference relative to the mean change.
"""

_BF16 = """
Each figure is the mean difference relative to the mean change. Allowed are 10 times AdamW's.
"""

_FRAMEWORKS = """
DeepSpeed (rows) and megatron-core's distributed optimizer train the same small language model of PyTorch modules on two
ranks in fp32, with the same samples, learning rates and decay: ten steps of two micro-batches, gradients clipped. Each
figure is the largest difference of the final weights relative to the largest change. Allowed are 10 times AdamW's, for
MARS-Lion of the means.
"""

Row = Mapping[str, Any]


def megatron_page(rows: Sequence[Row]) -> str:
    """The page.

    Args:
        rows: ``type``, ``layout``, ``precision``, ``same``, ``end_to_end`` and ``mean`` of every cell; of comparisons
            with DeepSpeed (``precision`` is ``frameworks``) ``largest`` and ``mean``.
    """
    parts = [_HEAD]
    fp32 = [row for row in rows if row["precision"] == "fp32"]
    bf16 = [row for row in rows if row["precision"] == "bf16"]
    own = [row for row in fp32 if row["type"] not in ("adam", "mkor", "mkor-h")]
    parts += ["\n## fp32, same gradients\n\n", _table(own, "same")]
    both = [row for row in fp32 if not row["layout"].startswith("DP3")]
    parts += ["\n## fp32, end to end\n", _FP32, "\n", _table(both, "end_to_end")]
    parts += ["\n## fp32, end to end, means\n\n", _table(both, "mean")]
    if bf16:
        parts += ["\n## bf16, end to end\n", _BF16, "\n", _table(bf16, "mean")]
    between = [row for row in rows if row["precision"] == "frameworks"]
    if between:
        parts += ["\n## DeepSpeed and Megatron\n", _FRAMEWORKS, "\n", _table(between, "largest")]
        parts += ["\nMeans:\n\n", _table(between, "mean")]
    return "".join(parts)


def _table(rows: Sequence[Row], figure: str) -> str:
    return layouts_table(rows, lambda row, _: _number(row[figure]))


def layouts_table(rows: Sequence[Row], cell: Callable[[Row, Row], str]) -> str:
    """Layouts in rows and types in columns, in the order that they came in.

    Args:
        rows: With ``type``, ``layout`` and figures.
        cell: The text of a row, given AdamW's of the same layout too.
    """
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    types = list(dict.fromkeys(row["type"] for row in rows))
    found = {(row["type"], row["layout"]): row for row in rows}
    lines = ["| layout | " + " | ".join("AdamW" if name == "adam" else name for name in types) + " |"]
    lines.append("|---|" + "---|" * len(types))
    for layout in layouts:
        own = [found.get((name, layout)) for name in types]
        cells = ["" if row is None else cell(row, found[types[0], layout]) for row in own]
        lines.append(f"| {layout} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"
