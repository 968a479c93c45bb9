"""The page of what other people's tests say of our optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.peers.deepspeed_hook import CONTROL
from benchmarks.peers.expected import VERDICTS, counted, verdict
from benchmarks.peers.results import Row

__all__ = ["peers_page"]

_HEAD = """# Peers' suites

This page says what the unit tests of DeepSpeed, Megatron and PyTorch report when one of our optimizers stands where
Adam was. None of their files is changed: a plugin of pytest rewrites the `"optimizer"` block of every configuration
that a DeepSpeed test writes, and answers Megatron's factory when a test asks for `"adam"`. `torch.optim.AdamW` takes
the same places as a control. A case counts if the control was put in place there and passed.

A failure is expected if [a list](../benchmarks/peers/expected.json) names the case and the reason. Every other failure
is unexpected, and so is a pass of a case on the list.

```sh
python -m benchmarks peers --torch
python -m benchmarks peers --deepspeed path/to/DeepSpeed
python -m benchmarks peers --megatron path/to/Megatron-LM
```

Every command goes on where it stopped: cases with a known result are not run again without `--again`. All figures are
from CPUs, with gloo.
"""

_SUITES = {
    "torch": """## PyTorch

torch installs the records of its own optimizer tests (`OptimizerInfo`: constructor options, wrong options, schedulers),
but not the tests. Our types have records of the same kind, and the checks are ours; each runs with every input of the
record. The control is torch's own record of AdamW.
""",
    "deepspeed": """## DeepSpeed

These are the files of `tests/unit` that configure an optimizer. At most one case of each test function was run, its
first, with up to four ranks.
""",
    "megatron": """## Megatron

These are Megatron's unit tests of optimizers, of data parallelism and of distributed checkpoints, in one process on a
CPU (`megatron_patches.cpu`). Most of them want several GPUs or Transformer Engine, and end before an optimizer is
built; they do not count.
""",
}


def peers_page(rows: Sequence[Row]) -> str:
    """Render the results.

    Args:
        rows: Those of all suites.
    """
    text = _HEAD
    for suite, words in _SUITES.items():
        found = [row for row in rows if row["suite"] == suite]
        if found:
            text += "\n" + words + _section(found)
    return text


def _section(rows: Sequence[Row]) -> str:
    tests, against = rows[0]["tests"], rows[0]["against"]
    types = list(dict.fromkeys([CONTROL, *sorted({row["type"] for row in rows})]))
    known = {(row["type"], row["case"]) for row in rows}
    worth = [row["case"] for row in rows if row["type"] == CONTROL and counted(row) and row["outcome"] == "passed"]
    text = f"\nThe tests are of version {tests}, and ran against {against}.\n\n" if tests != against else ""
    text = text or f"\nThe version is {against}.\n\n"
    text += f"| type | cases | {' | '.join(VERDICTS)} | not run yet |\n|---|{'---|' * (len(VERDICTS) + 2)}\n"
    for name in types:
        mine = [row for row in rows if row["type"] == name and counted(row)]
        counts = Counter(verdict(row)[0] for row in mine)
        left = sum((name, case) not in known for case in worth)
        cells = [str(counts[each] or "–") for each in VERDICTS]
        shown = f"{name} (control)" if name == CONTROL else name
        text += f"| {shown} | {len(mine)} | {' | '.join(cells)} | {left or '–'} |\n"
    return text + _beside(rows) + _reasons(rows) + _unexpected(rows)


def _beside(rows: Iterable[Row]) -> str:
    """What the control ran that says nothing of an optimizer, and what it has not run."""
    control = [row for row in rows if row["type"] == CONTROL]
    ends = Counter(row["outcome"] for row in control if not counted(row))
    said = ", ".join(f"{ends[end]} {end}" for end in ("passed", "failed", "skipped", "hung") if ends[end])
    text = f"\nIn {ends.total()} further cases nothing was put in Adam's place ({said}).\n" if ends else ""
    left = max((row.get("of", 0) for row in control), default=0) - len(control)
    return text + (f"\n{left} cases have not been tried yet; the command goes on with them.\n" if left > 0 else "")


def _reasons(rows: Iterable[Row]) -> str:
    """Of every reason, how many cases of which type, and in which functions."""
    types: dict[str, Counter[str]] = {}
    functions: dict[str, dict[str, None]] = {}
    for row in filter(counted, rows):
        name, reason = verdict(row)
        if name == "expected failure":
            types.setdefault(reason, Counter())[row["type"]] += 1
            functions.setdefault(reason, {})[_function(row["case"])] = None
    if not types:
        return ""
    text = "\n### What fails, and why\n\n| reason | cases | tests |\n|---|---|---|\n"
    for reason in sorted(types, key=lambda each: (-types[each].total(), each)):
        cases = ", ".join(f"{name} {number}" for name, number in sorted(types[reason].items()))
        names = list(functions[reason])
        further = f" and {len(names) - 4} more" if len(names) > 4 else ""
        text += f"| {reason} | {cases} | {', '.join(f'`{name}`' for name in names[:4])}{further} |\n"
    return text


def _unexpected(rows: Iterable[Row]) -> str:
    found = [(verdict(row), row) for row in filter(counted, rows)]
    lines = [
        f"- {row['type']}: `{row['case']}` ({name}): {reason or row['message'].replace('|', ' ').replace('<', ' ')}"
        for (name, reason), row in found
        if name.startswith("unexpected")
    ]
    return "\n### Unexpected\n\n" + ("\n".join(lines) if lines else "No case failed or passed unexpectedly.") + "\n"


def _function(case: str) -> str:
    """The class and the function."""
    return "::".join(case.partition("[")[0].split("::")[1:]) or case
