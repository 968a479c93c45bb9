"""The section of the cells on the page of what was found on a GPU: what follows one process, on a card and on CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.frameworks.cells import CELLS, Cell
from benchmarks.frameworks.judge import EXACT, TIMES_ROUNDING
from benchmarks.performance import markdown

__all__ = ["frameworks_section"]

Content = Mapping[str, Any]

_TEXT = """
## Frameworks on one card

Each cell is a real framework on several ranks: every rank of a card says that it is another host, so that NCCL takes
several on one device. All types take six steps of two micro-batches in it, and must end beside one process of plain
PyTorch (torchtitan: one rank of its trainer). In float32 the largest difference of an element counts, which must stay
below {exact:g} of the largest change. In 8 and 16 bits the root mean square counts, which must stay below {times:g}
times what a change of the first weights by one rounding leads to in the same cell.

```
python -m benchmarks gpu-frameworks                # goes on where it stopped; --list shows what is left
python -m benchmarks gpu-frameworks --device cpu   # the same cells over gloo
```

Each figure is how many types are within their bound, and the worst of the float32 ones. A dash: none has run yet.

{where}
{table}
"""


def frameworks_section(cpu: Content | None, gpu: Content | None) -> str:
    """The section.

    Args:
        cpu: What the command wrote on a CPU; None: it has not run.
        gpu: What it wrote on a card.
    """
    lines = [
        (cell.front, cell.name, _ranks(cell), *(_found(cell, content) for content in (cpu, gpu))) for cell in CELLS
    ]
    table = markdown(("framework", "setting", "ranks", "CPU ranks, gloo", "one card, NCCL"), lines)
    where = "\n".join(
        f"- {name}: {_versions(content) if content else 'not run yet'}"
        for name, content in (("CPU ranks", cpu), ("one card", gpu))
    )
    return _TEXT.format(exact=EXACT, times=TIMES_ROUNDING, where=where + "\n", table=table)


def _ranks(cell: Cell) -> str:
    return str(cell.ranks) if cell.resumed_on is None else f"{cell.ranks}, then {cell.resumed_on}"


def _versions(content: Content) -> str:
    about = content["about"]
    named = ("torch", "deepspeed", "megatron-core", "torchtitan")
    versions = ", ".join(f"{name} {about[name]}" for name in named if about.get(name))
    return f"{about['device']}, {versions}, {about['date']}"


def _found(cell: Cell, content: Content | None) -> str:
    front, _, rest = cell.key.partition("/")
    items = content["items"] if content else {}
    rows = [row for key, row in items.items() if key.startswith(f"{front}/{rest}: ")]
    figures = {figure["name"]: figure for row in rows for figure in row["figures"]}
    skipped = [row["reason"] for row in rows if row["status"] == "skipped"]
    problems = [row["reason"] for row in rows if row["status"] == "failed"]
    if not figures and not problems:
        return skipped[0] if skipped else "–"
    within = [figure for figure in figures.values() if not figure["surprising"]]
    text = f"{len(within)} of {len(figures)}"
    exact = [figure["value"] for figure in within if figure["unit"] == "of the largest change"]
    if exact:
        text += f", {max(exact):.0e}"
    if not problems and len(within) == len(figures):
        return text
    return f"**{text}**" + "".join(f"; {problem[:120]}" for problem in problems)
