"""The soak as a section of the documentation: the runs side by side, and what must not have grown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

__all__ = ["condensed", "distance", "faults", "losses", "soak_section"]

Row = Mapping[str, Any]

_A_STEP = 1024
"""Bytes a step by which memory may grow in the second half of a segment: less than any one tensor that is kept."""
_SETTLED = 4 * 2**20
"""Bytes by which it may grow there at least. Allocators take the most in their first few hundred steps."""

_FLAT = """Nothing that is counted (units, index tables, hooks, states, tensors) grew within a segment. In the second
half of a segment, memory grew by less than 4 MiB or 1 KiB a step, whichever is more."""

_COUNTED = (
    "units",
    "index tables",
    "entries of units",
    "module hooks",
    "states",
    "matrix states",
    "tensors",
    "objects",
)

_TEXT = """## Soak

The soak trains a small GPT for thousands of steps and disturbs it at random. It shows that a disturbed run ends at the
loss of an undisturbed one, and that nothing accumulates in memory.

The model has 2 blocks of width 32 (30 thousand weights) and trains on real text under DeepSpeed ZeRO-3: gloo, a batch
of 12 × 16 tokens, gradient clipping, a learning-rate schedule, a checkpoint every 50 steps. It starts on four ranks.
Then, at random, one rank is killed (`SIGKILL`; a third of the times while a checkpoint is being written), or all ranks
save and end. The run continues the last checkpoint on one to four ranks, drawn anew, with the same samples a step. Two
other runs stand beside it: an undisturbed one, and one on a single rank, which shows the effect of another summation
order alone.

```sh
python -m benchmarks soak soak.jsonl checkpoints --type MARS-M --type MKOR
python -m benchmarks soak-figures soak.jsonl --folder checkpoints
```

The loss is measured on held-out text. A difference of losses that does not grow, and is of the size that summation
order alone makes, is rounding. It decides individual weights after thousands of steps, not how well the run trains.
"""


def _of(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if wanted.items() <= row.items()]


def losses(rows: Iterable[Row], kind: str, run: str) -> dict[int, float]:
    """Loss by step; of a step taken twice, the last counts."""
    return {row["step"]: row["loss"] for row in _of(rows, kind="loss", type=kind, run=run)}


def distance(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], initial: Mapping[str, Tensor]) -> Row:
    """How far weights lie apart: the largest difference over the largest change, and the mean over the mean change."""

    def flat(of: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([of[name].double().flatten() for name in sorted(expected)])

    apart, changed = (flat(got) - flat(expected)).abs(), (flat(expected) - flat(initial)).abs()
    return {"largest": float(apart.max() / changed.max()), "mean": float(apart.mean() / changed.mean())}


def condensed(rows: Sequence[Row]) -> list[Row]:
    """What the documentation keeps: losses, ends of segments, the first, middle and last counts of each segment."""
    wanted = {id(row) for counts in _counts(rows) for row in counts}
    return [row for row in rows if row["kind"] != "counts" or id(row) in wanted]


def _counts(rows: Iterable[Row]) -> list[list[Row]]:
    """First, middle and last counts of each start of the ranks that has several."""
    found: dict[tuple[Any, ...], list[list[Row]]] = {}
    for row in rows:
        starts = found.setdefault((row["type"], row["run"]), [[]])
        # A segment that was interrupted from outside is started again.
        if row["kind"] == "started":
            starts.append([])
        elif row["kind"] == "counts":
            starts[-1].append(row)
    every = [counts for starts in found.values() for counts in starts if len(counts) > 1]
    return [[counts[0], counts[(len(counts) - 1) // 2], counts[-1]] for counts in every]


def faults(rows: Sequence[Row]) -> list[str]:
    """What is more at the end of a segment than at its start, or differs between segments on as many ranks."""
    found = []
    for first, middle, last in _counts(rows):
        place = f"{last['type']}, {last['run']}, steps {first['step']} to {last['step']} on {last['world']} ranks"
        grown = {name: last["counts"][name] - first["counts"][name] for name in _COUNTED}
        # Every save logs; a few objects come with the first.
        allowed = {"objects": 500}
        found += [f"{place}: {more} more {name}" for name, more in grown.items() if more > allowed.get(name, 0)]
        more, steps = last["resident"] - middle["resident"], last["step"] - middle["step"]
        if more > max(_SETTLED, _A_STEP * steps):
            found.append(f"{place}: {more / 2**20:.1f} MiB more memory in the last {steps} steps")
    sizes: dict[tuple[Any, ...], set[int]] = {}
    for row in _of(rows, kind="counts"):
        sizes.setdefault((row["type"], row["world"]), set()).add(row["state_bytes"])
    for (kind, world), bytes_ in sizes.items():
        if len(bytes_) > 1:
            found.append(f"{kind} on {world} ranks: rank 0 held {sorted(bytes_)} bytes of state")
    return found


def soak_section(rows: Sequence[Row]) -> str:
    """The section of the page.

    Args:
        rows: As :func:`benchmarks.soak.soak` yields them, all or condensed.
    """
    kinds = list(dict.fromkeys(row["type"] for row in rows))
    parts = [_TEXT, _line(["", *kinds]), _line(["---"] * (1 + len(kinds)))]
    columns = [dict(_summary(rows, kind)) for kind in kinds]
    names = list(dict.fromkeys(name for column in columns for name in column))
    parts += [_line([name, *(column.get(name, "") for column in columns)]) for name in names]
    parts += [f"\n{text}" for text in _found(rows)]
    for kind in kinds:
        parts += ["", f"Loss, {kind}:", "", *_loss_table(rows, kind)]
    return "\n".join(parts) + "\n"


def _found(rows: Sequence[Row]) -> list[str]:
    wrong = faults(rows)
    return ["Found: " + "; ".join(wrong) + "."] if wrong else [_FLAT]


def _summary(rows: Sequence[Row], kind: str) -> Iterable[tuple[str, str]]:
    """The figures of a type by name."""
    own = _of(rows, type=kind)
    segments = _of(own, kind="segment", run="disturbed")
    kills = [row for row in segments if row["end"] == "kill"]
    worlds = Counter(row["world"] for row in segments)
    calm, rough, single = (losses(own, kind, run) for run in ("undisturbed", "disturbed", "one rank"))
    reached = [max(found, default=0) for found in (calm, rough, single)]
    of = max((row.get("steps", 0) for row in own), default=0)
    yield f"steps of {of}: undisturbed, disturbed, one rank", ", ".join(map(str, reached))
    yield "kills; clean ends", f"{len(kills)}; {len(segments) - len(kills)}"
    yield "steps done again after kills", str(_repeated(segments))
    yield "starts on 1, 2, 3, 4 ranks", ", ".join(str(worlds[world]) for world in (1, 2, 3, 4))
    if kills:
        seconds = [row["notice_seconds"] for row in kills]
        yield "others end after a kill, median and longest", f"{median(seconds):.1f} s, {max(seconds):.1f} s"
    for name, other in (("disturbed", rough), ("one rank", single)):
        if both := sorted(calm.keys() & other.keys()):
            apart = [abs(other[step] - calm[step]) for step in both]
            yield f"loss, {name} against undisturbed: mean, largest", f"{sum(apart) / len(apart):.1e}, {max(apart):.1e}"
            yield f"last loss, {name} (undisturbed)", f"{other[both[-1]]:.4f} ({calm[both[-1]]:.4f})"
    for row in _of(own, kind="weights"):
        yield f"weights, {row['run']} against undisturbed: largest, mean", f"{row['largest']:.2f}, {row['mean']:.2f}"
    memory = _counts(own)
    for name, at in (("a segment", 0), ("its second half", 1)):
        if memory:
            grown = [(row[2]["resident"] - row[at]["resident"], row[2]["step"] - row[at]["step"]) for row in memory]
            most, steps = max(grown)
            yield f"largest growth of rank 0's memory in {name}", f"{most / 2**20:.1f} MiB in {steps} steps"
    ends = [row[-1] for row in memory]
    four = [row["resident"] / 2**20 for row in ends if row["world"] == 4]
    if four:
        yield "rank 0's memory at the ends of segments on 4 ranks", f"{min(four):.0f} to {max(four):.0f} MiB"
    for world in (1, 2, 3, 4):
        if sizes := {row["state_bytes"] for row in _of(own, kind="counts", world=world)}:
            yield f"rank 0's bytes of state on {world}", " or ".join(map(str, sorted(sizes)))


def _repeated(segments: Sequence[Row]) -> int:
    return sum(before["last"] - after["first"] for before, after in zip(segments, segments[1:], strict=False))


def _loss_table(rows: Sequence[Row], kind: str) -> list[str]:
    runs = ("undisturbed", "disturbed", "one rank")
    found = [losses(rows, kind, run) for run in runs]
    steps = sorted(set().union(*found))
    # At most a line for every tenth report; the data has all of them.
    shown = [step for at, step in enumerate(steps) if at % max(1, len(steps) // 10) == 0 or step == steps[-1]]
    lines = [_line(["step", *runs]), _line(["---"] * 4)]
    return lines + [_line([str(step), *(f"{of[step]:.4f}" if step in of else "" for of in found)]) for step in shown]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
