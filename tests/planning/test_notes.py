"""What modules keep with a unit: found under the module's own object."""

from __future__ import annotations

from rankwise.plan.notes import Note, Notes


def test_notes_of_one_text_are_two() -> None:
    """By a common name, one module once took what another had kept."""
    first, second = Note[int]("followed"), Note[set[str]]("followed")
    notes = Notes()
    notes[first] = 1
    assert notes.get(second) is None
    assert notes.obtain(second, set) == set()
    assert (notes[first], len(notes), second in notes) == (1, 2, True)
    assert notes.drop(first) == 1
    assert notes.drop(first) is None
