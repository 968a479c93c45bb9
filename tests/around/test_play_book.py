"""The play-book: entry points and what happens before and around them, in every framework, judged by AdamW's cell.

Rows come from the events' declarations and from the ways of each framework, columns from the entry points'
declarations, types from `rankwise.names` and from the fields of the options. In CI each framework plays every event
before a step, and every entry point after nothing, with an element-wise type, a matrix type and MKOR; the product, all
types and all options are exhaustive. `RANKWISE_AROUND_ROWS` names a file for ``python -m benchmarks around``; with it
`RANKWISE_AROUND_ONLY`, a pattern of events and entry points, plays a part of the table.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from book_cells import Player
from book_kinds import ADAMW, KINDS, Kind, variants
from book_ranks import cells, play
from book_runs import DDP, FSDP2, Run
from book_verdicts import KNOWN, listed, verdict
from cpu_deepspeed import choose_cpu, prepare_ranks

from benchmarks.around_page import around_page, recorded
from rankwise.options.validation import OptionError

ROOT = Path(__file__).resolve().parents[2]
ROWS = os.environ.get("RANKWISE_AROUND_ROWS")
ONLY = re.compile(os.environ.get("RANKWISE_AROUND_ONLY", ""))
USUAL = ("mars-adamw", "ldadam", "mkor")
FRAMEWORKS = ("plain", "DDP", "FSDP2", *(f"ZeRO {stage}" for stage in range(4)), "Megatron DDP")
FRAMEWORKS = (*FRAMEWORKS, "Megatron distributed optimizer")


def framework(name: str) -> type[Run]:
    """The class of a framework's runs; skips where it is not installed."""
    if name.startswith("ZeRO"):
        choose_cpu()
        pytest.importorskip("deepspeed")
        import book_deepspeed

        prepare_ranks()
        return book_deepspeed.ZEROS[name]
    if name.startswith("Megatron"):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        pytest.importorskip("megatron.core")
        import book_megatron

        return book_megatron.MEGATRONS[name]
    return {"plain": Run, "DDP": DDP, "FSDP2": FSDP2}[name]


def column(name: str, kinds: Sequence[Kind], whole: bool = False) -> list[dict[str, Any]]:
    """Rows of a framework: what each type does in each cell. Ranks are started once for all of them."""
    runs = framework(name)
    chosen = [cell for cell in cells(runs, ADAMW, whole) if ONLY.search("; ".join(cell))]
    # Where rows are recorded, each type has ranks of its own: what is seen until an interruption is kept.
    parts = [[kind] for kind in (ADAMW, *kinds)] if ROWS else [[ADAMW, *kinds]]
    rows: list[dict[str, Any]] = []
    found: dict[tuple[Kind, Any], Any] = {}
    for part in parts:
        jobs = [(kind, cell) for kind in part for cell in chosen]
        found |= zip(jobs, play(runs, jobs, thorough=whole), strict=True)
        seen = [
            _row(name, kind, cell, found[kind, cell], found[ADAMW, cell]) for kind, cell in jobs if not kind.is_adamw
        ]
        _write_down(seen)
        rows += seen
    return rows


def _row(name: str, kind: Kind, cell: Any, ours: Any, adamw: Any) -> dict[str, Any]:
    word, why = verdict(name, kind, cell, ours, adamw)
    known = listed(KNOWN, name, kind, cell)
    if known is not None and word != "not applicable":
        word, why = ("known fault", known.why) if word == "fault" else ("no fault any more", known.why)
    return {"framework": name, "type": kind.name, "event": cell[0], "entry": cell[1], "is": word, "why": why}


def _write_down(rows: Sequence[dict[str, Any]]) -> None:
    if ROWS:
        with Path(ROWS).open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _check(rows: Sequence[dict[str, Any]]) -> None:
    assert rows
    wrong = [row for row in rows if row["is"] in ("fault", "no fault any more")]
    told = "\n".join(f"{r['framework']}, {r['type']}: {r['event']}, {r['entry']}: {r['is']}, {r['why']}" for r in wrong)
    assert not wrong, f"{len(wrong)} of {len(rows)} cells are not as AdamW's and not refused by name:\n{told}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_nothing_that_a_user_does_between_steps_changes_them(name: str) -> None:
    rows = column(name, [KINDS[kind] for kind in USUAL])
    _check(rows)
    if not ROWS:
        _as_recorded(rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in USUAL])
def test_every_type(name: str, kind: str) -> None:
    _check(column(name, [KINDS[kind]]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_point_after_every_event(kind: str) -> None:
    _check(column("plain", [KINDS[kind]], whole=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", list(variants()))
def test_every_option(kind: str) -> None:
    """With every other value of every option that chooses a mechanism, where the options allow it."""
    from book_kinds import network

    chosen = variants()[kind]
    if chosen.options.get("exact"):
        pytest.skip("exact mode asks a loop for the next batch's gradient too")
    try:
        chosen.build(list(network(chosen).named_parameters()))
    except OptionError as refusal:
        pytest.skip(str(refusal))
    _check(column("plain", [chosen]))


def _words(rows: Sequence[Any]) -> dict[tuple[str, ...], str]:
    return {tuple(row[key] for key in ("framework", "type", "event", "entry")): row["is"] for row in rows}


def _as_recorded(rows: Sequence[dict[str, Any]]) -> None:
    """The page has these cells, and says of each what was seen."""
    known, seen = _words(recorded()), _words(rows)
    other = {key: (known.get(key), word) for key, word in seen.items() if known.get(key) != word}
    named = {(row["framework"], row["type"]) for row in rows}
    gone = [key for key in known if key[:2] in named and key not in seen]
    assert not other and not gone, f"python -m benchmarks around writes the page anew: {other} {gone}"


def test_the_page_is_written_from_what_was_recorded() -> None:
    assert (ROOT / "docs/around.md").read_text() == around_page(recorded())


def test_the_record_has_every_framework_and_usual_type() -> None:
    found = {(row["framework"], row["type"]) for row in recorded()}
    assert found == {(name, kind) for name in FRAMEWORKS for kind in USUAL}


def test_a_hang_and_a_death_are_named() -> None:
    """By a framework of which one rank waits for the other, or ends."""
    from book_broken import Broken

    found = dict(zip(Broken.jobs(), play(Broken, Broken.jobs()), strict=True))
    told = {cell[0]: outcome.error for (_, cell), outcome in found.items()}
    assert told["nothing"] == ""
    assert told["one rank waits"].startswith("hangs: ranks [0] wait")
    assert told["one rank ends"].startswith("dies: ")
    assert told["a step"] == ""


FAULTS = {
    ("nothing", "zero_grad()"): "as AdamW",
    ("a step within torch.autocast", "step()"): "as AdamW",
    ("a checkpoint loaded, of a step ago", "step()"): "fault",
    ("nothing", "save, load into new objects"): "fault",
    ("the optimizer copied alone", "step()"): "fault",
    ("another optimizer's state_dict loaded", "step()"): "AdamW fails too",
}


@pytest.mark.parametrize("cell", FAULTS)
def test_a_fault_is_seen(cell: tuple[str, str]) -> None:
    """Of an optimizer that loads nothing, and raises what no row of refusals says."""
    from book_broken import Careless

    careless = Careless("careless", "careless")
    ours, adamw = (Player(Run, kind).outcome(cell) for kind in (careless, ADAMW))
    assert verdict("plain", careless, cell, ours, adamw)[0] == FAULTS[cell]
