"""The play-book: entry points and what happens before and around them, in every framework, judged by AdamW's cell.

Rows come from the events' declarations and from the ways of each framework, columns from the entry points'
declarations, types from `rankwise.names` and from the fields of the options. Each framework plays every event before a
step, and every entry point after nothing. CI plays a matrix type and MKOR in one process, and of the frameworks MKOR
under FSDP2, and in `test_play_book_engines.py` under ZeRO 2, there without the user's groups and what surrounds a step,
of which one process tells. Exhaustive are these, an element-wise type, DDP, ZeRO 0, 1 and 3, Megatron's wrappers and
the other types of all frameworks, the product, all types and all options.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from book_cells import Player
from book_columns import FRAMEWORKS, ROWS, USUAL, as_recorded, check, column
from book_kinds import ADAMW, KINDS, variants
from book_ranks import play
from book_runs import Run
from book_verdicts import verdict

from benchmarks.around_page import around_page, recorded
from rankwise.options.validation import OptionError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("plain", USUAL[1:]),
        pytest.param("plain", USUAL[:1], marks=pytest.mark.exhaustive),
        *(pytest.param(name, USUAL, marks=pytest.mark.exhaustive) for name in FRAMEWORKS[1:]),
    ],
)
def test_nothing_that_a_user_does_between_steps_changes_them(name: str, kinds: Sequence[str]) -> None:
    rows = column(name, [KINDS[kind] for kind in kinds])
    check(rows)
    if not ROWS:
        as_recorded(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("DDP", marks=pytest.mark.exhaustive), "FSDP2"])
def test_nor_does_it_where_models_are_spread_over_ranks(name: str) -> None:
    """Of MKOR alone, which has the most to hear of what happens."""
    rows = column(name, [KINDS["mkor"]], own=True)
    check(rows)
    if not ROWS:
        as_recorded(rows, own=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in USUAL])
def test_every_type(name: str, kind: str) -> None:
    check(column(name, [KINDS[kind]]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_point_after_every_event(kind: str) -> None:
    check(column("plain", [KINDS[kind]], whole=True))


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
    check(column("plain", [chosen]))


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
