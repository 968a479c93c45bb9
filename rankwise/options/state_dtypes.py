"""What the option ``state_dtype`` takes: in which types element states are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankwise.options.by_pattern import Json
from rankwise.options.checks import Check, InvalidError
from rankwise.options.hints import VALUE_WORDS, nearest, shown

__all__ = ["StateDtypes"]

_TYPES = ("float32", "bfloat16", "int8")


class DType:
    """What a command line has: a type, or a dictionary of them in JSON."""

    def __new__(cls, text: str) -> Any:
        return Json(text) if text.lstrip().startswith("{") else text


class StateDtypes(Check):
    """A type, a dictionary from names of states to types, or None.

    Args:
        states: The names.
    """

    kind = DType
    optional = True

    def __init__(self, *states: str) -> None:
        self.states = states

    def __call__(self, value: Any, default: Any) -> Any:
        """See the base class."""
        if value is None:
            return None
        if not isinstance(value, Mapping):
            return self._type("it", value)
        for name in value:
            if name not in self.states:
                near = nearest(name, self.states)
                fix = f"did you mean {near!r}?" if near else f"the states are {', '.join(self.states)}"
                raise InvalidError(f"{shown(name)} must be a state of this optimizer", fix)
        return {name: self._type(f"the type of {name!r}", each) for name, each in value.items()}

    @staticmethod
    def _type(what: str, value: Any) -> str:
        name = str(value).removeprefix("torch.")
        if name in _TYPES and not isinstance(value, bytes):
            return name
        meant = nearest(name, _TYPES, {**VALUE_WORDS, "8bit": "int8", "uint8": "int8", "fp8": "int8"}) or "bfloat16"
        raise InvalidError(f"{what} must be 'float32', 'bfloat16' or 'int8'", f"write {meant!r}")

    @property
    def range(self) -> str:
        """See the base class."""
        return f'"float32", "bfloat16", "int8", a dictionary of them by {", ".join(self.states)}, or None'
