"""What the option ``lr_scale`` takes: multipliers of the learning rate by patterns of names."""

from __future__ import annotations

from typing import Any

from rankwise.options.by_pattern import ByPattern
from rankwise.options.checks import LARGEST, InvalidError, is_number
from rankwise.options.hints import shown

__all__ = ["RateScales"]


class RateScales(ByPattern):
    """A dictionary from name patterns to numbers above 0, or None."""

    values = "multipliers of lr"
    example = 'write e.g. {"*embed*": 0.1}'

    def one(self, pattern: str, value: Any) -> float:
        """See the base class."""
        if not is_number(value) or not 0 < value <= LARGEST:
            rule = f"the multiplier of '{pattern}' must be a number > 0, and is {shown(value)}"
            raise InvalidError(rule, f"{self.example}; to keep parameters as they are, set requires_grad to False")
        return float(value)

    @property
    def range(self) -> str:
        """See the base class."""
        return "dictionary from name patterns to numbers > 0, or None"
