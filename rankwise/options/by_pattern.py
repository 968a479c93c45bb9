"""Options that are dictionaries: ``blocks`` and ``lr_scale`` by patterns of names, ``state_dtype`` by states."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from rankwise.options.checks import LARGEST, Check, InvalidError, is_number
from rankwise.options.hints import VALUE_WORDS, nearest, shown

__all__ = ["BlockLayouts", "ByPattern", "Json", "RateScales", "StateDtypes"]


class Json(dict[str, Any]):
    """A dictionary that a command line gives in JSON."""

    def __init__(self, text: str) -> None:
        parsed = json.loads(text)
        if not isinstance(parsed, dict):
            raise ValueError(f"{text} is no JSON object")
        super().__init__(parsed)


class ByPattern(Check):
    """Accepts a dictionary from name patterns to values of one kind, or None.

    Attributes:
        values: Describes the values in a word.
        example: Shows how to write the option.
    """

    kind = Json
    optional = True
    values: ClassVar[str]
    example: ClassVar[str]

    def __call__(self, value: Any, default: Any) -> Any:
        """Check a value, and return it in the form in which it is kept."""
        if value is None:
            return None
        if not isinstance(value, Mapping) or not all(isinstance(pattern, str) for pattern in value):
            raise InvalidError(f"it must be a dictionary from name patterns to {self.values}", self.example)
        return {pattern: self.one(pattern, given) for pattern, given in value.items()}

    @abstractmethod
    def one(self, pattern: str, value: Any) -> Any:
        """Check the value of a pattern.

        Raises:
            InvalidError: The value is invalid.
        """


class RateScales(ByPattern):
    """Accepts a dictionary from name patterns to numbers above 0, or None."""

    values = "multipliers of lr"
    example = 'write e.g. {"*embed*": 0.1}'

    def one(self, pattern: str, value: Any) -> float:
        """Check the value of a pattern."""
        if not is_number(value) or not 0 < value <= LARGEST:
            rule = f"the multiplier of '{pattern}' must be a number > 0, but is {shown(value)}"
            raise InvalidError(rule, f"{self.example}; to keep parameters as they are, set requires_grad to False")
        return float(value)

    @property
    def range(self) -> str:
        """The values in words."""
        return "dictionary from name patterns to numbers > 0, or None"


_TYPES = ("float32", "bfloat16", "int8")


class DType:
    """The value on a command line: a type, or a dictionary of types in JSON."""

    def __new__(cls, text: str) -> Any:
        return Json(text) if text.lstrip().startswith("{") else text


class StateDtypes(Check):
    """Accepts a type, a dictionary from names of states to types, or None."""

    kind = DType
    optional = True

    def __init__(self, *states: str) -> None:
        self.states = states

    def __call__(self, value: Any, default: Any) -> Any:
        """Check a value, and return it in the form in which it is kept."""
        if value is None:
            return None
        if not isinstance(value, Mapping):
            return self._type("it", value)
        for name in value:
            if name not in self.states:
                near = nearest(name, self.states)
                fix = f"did you mean {near!r}?" if near else f"the states are {', '.join(self.states)}"
                raise InvalidError(f"{shown(name)} must be a state of this optimizer", fix)
        return {name: self._type(f"the type of {name!r}", given) for name, given in value.items()}

    @staticmethod
    def _type(what: str, value: Any) -> str:
        name = str(value).removeprefix("torch.")
        if name in _TYPES and not isinstance(value, bytes):
            return name
        meant = nearest(name, _TYPES, {**VALUE_WORDS, "8bit": "int8", "uint8": "int8", "fp8": "int8"}) or "bfloat16"
        raise InvalidError(f"{what} must be 'float32', 'bfloat16' or 'int8'", f"write {meant!r}")

    @property
    def range(self) -> str:
        """The values in words."""
        return f'"float32", "bfloat16", "int8", a dictionary of them by {", ".join(self.states)}, or None'


WORDS = ("qkv", "heads", "groups", "none")
_EXAMPLE = 'write e.g. {"*qkv*": {"q": 4096, "k": 1024, "v": 1024}}'
_NUMBERS = ("groups", "heads")


class BlockLayouts(ByPattern):
    """Accepts a dictionary from name patterns to layouts, or None."""

    values = "layouts"
    example = _EXAMPLE

    def one(self, pattern: str, value: Any) -> Any:
        """Check the value of a pattern."""
        return _layout(pattern, value)

    @property
    def range(self) -> str:
        """The values in words."""
        return 'dictionary from name patterns to "qkv", "heads", "groups", "none", or sizes'


def _layout(pattern: str, layout: Any) -> Any:
    if isinstance(layout, str):
        if layout in WORDS:
            return layout
        near = nearest(layout, list(WORDS))
        fix = f"did you mean '{near}'?" if near else _EXAMPLE
        raise InvalidError(f"the layout of '{pattern}' must be one of {', '.join(WORDS)}, or sizes", fix)
    if isinstance(layout, tuple | list):
        if len(layout) > 1 and all(map(_is_count, layout)):
            return list(layout)
        raise InvalidError(f"the sizes of '{pattern}' must be two or more integers >= 1", _EXAMPLE)
    if not isinstance(layout, Mapping) or not all(isinstance(name, str) for name in layout):
        raise InvalidError(f"the layout of '{pattern}' must be one of {', '.join(WORDS)}, or sizes", _EXAMPLE)
    return _sizes(pattern, dict(layout))


def _sizes(pattern: str, layout: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: size for name, size in layout.items() if name not in _NUMBERS}
    wrong = next((name for name, size in sizes.items() if not _is_count(size)), None)
    if wrong is not None or not sizes:
        what = f"'{wrong}'={shown(sizes[wrong])}" if wrong is not None else "no part"
        raise InvalidError(f"the sizes of '{pattern}' must be integers >= 1, and have {what}", _EXAMPLE)
    wrong = next((name for name in sizes if not name.isidentifier()), None)
    if wrong is not None:
        raise InvalidError(f"the part {wrong!r} of '{pattern}' must be named by a word", _EXAMPLE)
    if not _is_count(layout.get("groups", 1)):
        raise InvalidError(f"'groups' of '{pattern}' must be an integer >= 1", 'write e.g. {"q": 512, "groups": 8}')
    heads = layout.get("heads", 1)
    counts = list(heads) if isinstance(heads, tuple | list) else [heads] * len(sizes)
    if len(counts) != len(sizes) or not all(_is_count(number) or number == 0 for number in counts):
        rule = f"'heads' of '{pattern}' must be an integer >= 1, or one for each of its {len(sizes)} parts"
        raise InvalidError(rule, 'write e.g. {"q": 4096, "k": 1024, "v": 1024, "heads": [32, 8, 8]}')
    return layout


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
