"""What modules keep with a step unit while its plan stands: every module under keys of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Note", "Notes"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Note(Generic[T_co]):
    """The key of one thing, described by ``what``, that a module keeps with units; no other key is equal to it."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return f"Note({self.what!r})"


class Notes:
    """The notes of one unit; a unit that is planned anew begins without any."""

    def __init__(self) -> None:
        self._values: dict[Note[Any], Any] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, note: Note[Any]) -> bool:
        return note in self._values

    def __getitem__(self, note: Note[T]) -> T:
        value: T = self._values[note]
        return value

    def __setitem__(self, note: Note[T], value: T) -> None:
        self._values[note] = value

    def get(self, note: Note[T]) -> T | None:
        """Return the value; None where there is none yet."""
        return self._values.get(note)

    def obtain(self, note: Note[T], make: Callable[[], T]) -> T:
        """Return the value; make it where there is none yet."""
        if note not in self._values:
            self._values[note] = make()
        value: T = self._values[note]
        return value

    def drop(self, note: Note[T]) -> T | None:
        """Remove the value and return it; None where there is none."""
        return self._values.pop(note, None)
