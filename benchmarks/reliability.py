"""The fault table, the fuzz and the soak figures as a page of the documentation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.soak_page import soak_section

__all__ = ["read_rows", "reliability_page"]

_HEAD = """# Reliability

This page says what a run does when something goes wrong. The tests provoke each fault in real processes, and what they
see must be what is listed here, word for word. The short answer:

| what goes wrong | what the run does |
| --- | --- |
| NaN or Inf in a gradient, `skip_nonfinite` on | undoes the step on all ranks and counts it |
| the same, `skip_nonfinite` off | takes the step, as torch.optim does |
| a rank is killed | the others end within 60 s; the last checkpoint continues |
| the disk is full while saving | all ranks raise; the previous checkpoint is intact |
| a checkpoint file is damaged | all ranks raise and name the file; nothing has changed |
| ranks disagree on options, model or version | all ranks raise and name the difference |
| ranks' learning rates part later | nothing is noticed: [check it yourself](#rates-that-differ-between-ranks) |
| SIGTERM on one rank | all ranks save and end, with [this loop](#stopping-with-grace) |

The page is generated from what the tests saw:

```sh
export RANKWISE_FAULT_TABLE=faults.jsonl
python -m pytest tests/faults/test_fault_table.py
python -m pytest -m exhaustive tests/faults/test_fault_table.py
python -m benchmarks reliability faults.jsonl docs/reliability.md
```

In addition, `tests/faults/test_killed_ranks.py` kills ranks at twelve random points, with other optimizers and ZeRO
stages.

The unit tests of DeepSpeed, Megatron and PyTorch run with our types in Adam's place: [what they report](peers.md).

What happens when a user changes something between two steps is a page of its own: [around.md](around.md).

## Faults

Each outcome is followed by the faults that lead to it. Where a test's name is given, that test shows it.
"""

_FUZZ = """
## Mutated settings

These tests make random mistakes in optimizer blocks and flags: wrong values, wrong types, misspelt keys, options of
other optimizers. A run then either trains and changes every weight it should, or ends before the first step with a
message that names the key. Any other exception fails the test.

| what | cases in the default run | cases with `-m exhaustive` | test |
| --- | --- | --- | --- |
| DeepSpeed `"optimizer"` blocks | 400 | 6,000 | `tests/deepspeed_engine/test_fuzz_blocks.py` |
| Megatron flags | 400 | 6,000 | `tests/megatron_engine/test_fuzz_flags.py` |
"""

_GRACE = """
## Stopping with grace

A scheduler's SIGTERM may reach one rank only, in the middle of a step. A checkpoint is consistent only at the end of a
step. So let the handler set a flag, and let the ranks agree at the end of every step. The fault “SIGTERM with grace”
runs this loop:

```python
import signal

import torch


def train_until_asked(engine, batches, train_step, folder):
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    for batch in batches:
        train_step(batch)  # forward, backward, step
        stop = torch.tensor(float(bool(asked)), device=engine.device)
        torch.distributed.all_reduce(stop, torch.distributed.ReduceOp.MAX)
        if stop:
            engine.save_checkpoint(folder)
            break
```
"""

_RATES = """
## Rates that differ between ranks

Ranks that share states compare their learning rates at the first step only. A schedule may change the rates at every
later step, and comparing them then would cost a message a step. So nothing notices a rank whose schedule goes another
way, as with torch.optim. Under `DistributedDataParallel` the weights of the ranks then diverge. Where weights are cut
over ranks (ZeRO, Megatron's distributed optimizer) the copies stay equal, and the shards of one rank use its rate. If
your schedule is your own code, call this function on all ranks now and then. The fault “ranks disagree on the learning
rate” runs it:

```python
import torch


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
    places: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        fault, where, expected, seen = (str(row[column]).strip() for column in columns)
        if not all((fault, where, expected, seen)):
            raise ValueError(f"a cell of the row {row} is empty; run the tests again")
        places.setdefault((expected, "" if seen == expected else seen), {}).setdefault(where, []).append(fault)
    lines: list[str] = []
    for (expected, seen), faults in places.items():
        lines += ["", f"**{expected[0].upper()}{expected[1:]}**{f' ({seen})' if seen else ''}", ""]
        lines += [f"- *{where}*: {'; '.join(dict.fromkeys(found))}" for where, found in faults.items()]
    return _HEAD + "\n".join(lines) + "\n" + _GRACE + _RATES + _FUZZ + ("\n" + soak_section(soak) if soak else "")
