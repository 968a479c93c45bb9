"""Options that are dictionaries from patterns of parameters' names."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from rankwise.options.checks import Check, InvalidError

__all__ = ["ByPattern", "Json"]


class Json(dict[str, Any]):
    """Such a dictionary as a command line has it, in JSON."""

    def __init__(self, text: str) -> None:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"{text} is no JSON object")
        super().__init__(found)


class ByPattern(Check):
    """A dictionary from name patterns to values of one kind, or None.

    Attributes:
        values: What they are, in a word.
        example: How to write one.
    """

    kind = Json
    optional = True
    values: ClassVar[str]
    example: ClassVar[str]

    def __call__(self, value: Any, default: Any) -> Any:
        """See the base class."""
        if value is None:
            return None
        if not isinstance(value, Mapping) or not all(isinstance(pattern, str) for pattern in value):
            raise InvalidError(f"it must be a dictionary from name patterns to {self.values}", self.example)
        return {pattern: self.one(pattern, each) for pattern, each in value.items()}

    @abstractmethod
    def one(self, pattern: str, value: Any) -> Any:
        """The value of a pattern, checked.

        Raises:
            InvalidError: It cannot have it.
        """
