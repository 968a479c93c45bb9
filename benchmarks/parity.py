"""The parity matrix as a page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["parity_page"]

_HEAD = """# Parity under DeepSpeed

Generated from the figures the tests write: ten steps of a small model whose matrices are cut inside a row, two
micro-batches per step, clipping at 1.0, fp32, against one process of plain PyTorch. Every error is the largest
difference of a weight, relative to the largest change of a weight.

- **same gradients**: one process is fed the reduced gradients (for MKOR also the statistics) the engine handed over.
- **end to end**: one process trains on the whole batch. There the order in which gradients are summed differs as well;
  the row of `torch.optim.AdamW` shows how far that alone moves a run in the same cell.

```sh
RANKWISE_PARITY_TABLE=parity.json python -m pytest tests/deepspeed_engine/test_ds_parity.py
python -m benchmarks parity parity.json docs/parity.md
```
"""


def parity_page(rows: Sequence[dict[str, Any]]) -> str:
    """Render the rows of the parity test.

    Args:
        rows: Each with world, stage, type, params, end_to_end and, except for AdamW, same_gradients.
    """
    cells = sorted({(row["world"], row["stage"]) for row in rows})
    labels: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}
    for row in rows:
        label = row["type"] if row["type"] != "SONew" else f"SONew, gamma {row['params'].get('gamma', 'default')}"
        labels.setdefault(label, {})[(row["world"], row["stage"])] = row
    parts = [_HEAD]
    for title, key in (("Same gradients", "same_gradients"), ("End to end", "end_to_end")):
        parts.append(f"\n## {title}\n\n| ranks / stage | " + " | ".join(f"{w} / {s}" for w, s in cells) + " |")
        parts.append("|---|" + "---|" * len(cells))
        for label, found in labels.items():
            values = [found.get(cell, {}).get(key) for cell in cells]
            if any(value is not None for value in values):
                shown = ("" if value is None else ("0" if value == 0 else f"{value:.0e}") for value in values)
                parts.append(f"| {label} | " + " | ".join(shown) + " |")
    return "\n".join(parts) + "\n"
