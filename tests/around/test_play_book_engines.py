"""The play-book of those who step an optimizer for their users: DeepSpeed's engine and Megatron's."""

from __future__ import annotations

import pytest
from book_columns import ROWS, as_recorded, check, column
from book_kinds import KINDS


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ZeRO 2", pytest.param("Megatron distributed optimizer", marks=pytest.mark.exhaustive)]
)
def test_nothing_that_a_user_of_an_engine_does_changes_steps(name: str) -> None:
    """Of MKOR alone, which has the most to hear of what happens; see `test_play_book.py` for the others."""
    rows = column(name, [KINDS["mkor"]], own=True)
    check(rows)
    if not ROWS:
        as_recorded(rows, own=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ZeRO 2", pytest.param("Megatron DDP", marks=pytest.mark.exhaustive), "Megatron distributed optimizer"]
)
def test_steps_of_engines_do_not_depend_on_what_surrounds_them(name: str) -> None:
    """Of whole matrices and of those that ranks compute together."""
    check(column(name, [KINDS["mars-m"], KINDS["ldadam"]], events="a step within"))
