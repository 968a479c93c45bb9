"""The fault table, the fuzz and the soak figures as a page of the documentation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak_page import soak_section

__all__ = ["read_rows", "reliability_page"]

_HEAD = """# Reliability

What a run of ours does when something goes wrong: each fault is provoked in real processes, and what is seen must be
what is expected, word for word. Generated from what the tests saw:

```sh
export RANKWISE_FAULT_TABLE=faults.jsonl
python -m pytest tests/faults/test_fault_table.py
python -m pytest -m exhaustive tests/faults/test_fault_table.py
python -m benchmarks reliability faults.jsonl docs/reliability.md
```

`tests/faults/test_killed_ranks.py` kills ranks at twelve random points besides, with other optimizers and ZeRO stages.

## Faults
"""

_FUZZ = """
## Mutated settings

Random slips in optimizer blocks and flags (values, types, misspelt keys, options of other optimizers): each either
trains steps that change every weight it should, or ends before the first step in a message that names the key. Any
other exception fails the test.

| what | cases in the default run | cases with `-m exhaustive` | test |
| --- | --- | --- | --- |
| DeepSpeed `"optimizer"` blocks | 400 | 6,000 | `tests/deepspeed_engine/test_fuzz_blocks.py` |
| Megatron flags | 400 | 6,000 | `tests/megatron_engine/test_fuzz_flags.py` |
"""

_GRACE = """
## Stopping with grace

A scheduler's SIGTERM may reach one rank only, in the midst of a step. Let the handler take a note and the ranks agree
at the end of every step, where a checkpoint is whole; the row “SIGTERM with grace” runs this loop:

```python
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
for batch in batches:
    ...  # forward, backward, step
    stop = torch.tensor(float(bool(asked)), device=engine.device)
    torch.distributed.all_reduce(stop, torch.distributed.ReduceOp.MAX)
    if stop:
        engine.save_checkpoint(folder)
        break
```
"""

_RATES = """
## Rates that differ between ranks

Ranks that share states compare the rates of their first step. A schedule may change them at every later one, and
comparing them then would cost a message a step: as with torch.optim, a rank whose scheduler went another way is not
noticed. Under `DistributedDataParallel` the ranks' weights part; where weights are cut over ranks (ZeRO, Megatron's
distributed optimizer) they stay alike, and the parts of one rank take its rate. Where the schedule is code of your own,
call this on all ranks now and then; the row “the learning rate” runs it:

```python
def refuse_other_rates(optimizer):
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, rates)
    if any(theirs != rates for theirs in everyone):
        raise RuntimeError(f"the ranks' learning rates differ: {everyone}")
```
"""

Row = Mapping[str, Any]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows the tests appended, one JSON object per line; of a row seen twice, the last counts."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        found[row["fault"], row["where"]] = row
    return list(found.values())


def reliability_page(rows: Sequence[Row], soak: Sequence[Row] = ()) -> str:
    """Render the rows of the fault table.

    Args:
        rows: Each with fault, where, expected and seen.
        soak: Figures of the soak; without any, the page has no such section.

    Raises:
        ValueError: A cell is empty.
    """
    columns = ("fault", "where", "expected", "seen")
    lines = [_line(columns), _line(["---"] * len(columns))]
    faults = list(dict.fromkeys(row["fault"] for row in rows))  # the same fault elsewhere follows it
    for row in sorted(rows, key=lambda row: faults.index(row["fault"])):
        cells = [str(row[column]).strip() for column in columns]
        if not all(cells):
            raise ValueError(f"a cell of the row {cells} is empty; run the tests again")
        lines.append(_line([*cells[:3], "as expected" if cells[3] == cells[2] else cells[3]]))
    return (
        _HEAD + "\n" + "\n".join(lines) + "\n" + _GRACE + _RATES + _FUZZ + ("\n" + soak_section(soak) if soak else "")
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
