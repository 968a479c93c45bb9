"""What the option ``lr_scale`` takes: multipliers of the learning rate by patterns of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankwise.options.block_layouts import TypedLayouts
from rankwise.options.checks import LARGEST, Check, InvalidError, is_number
from rankwise.options.hints import shown

__all__ = ["RateScales"]

_EXAMPLE = 'write e.g. {"*embed*": 0.1}'


class RateScales(Check):
    """A dictionary from name patterns to numbers above 0, or None."""

    kind = TypedLayouts
    optional = True

    def __call__(self, value: Any, default: Any) -> Any:
        """See the base class."""
        if value is None:
            return None
        if not isinstance(value, Mapping) or not all(isinstance(pattern, str) for pattern in value):
            raise InvalidError("it must be a dictionary from name patterns to multipliers of lr", _EXAMPLE)
        for pattern, scale in value.items():
            if not is_number(scale) or not 0 < scale <= LARGEST:
                rule = f"the multiplier of '{pattern}' must be a number > 0, and is {shown(scale)}"
                raise InvalidError(rule, f"{_EXAMPLE}; to keep parameters as they are, set requires_grad to False")
        return {pattern: float(scale) for pattern, scale in value.items()}

    @property
    def range(self) -> str:
        """See the base class."""
        return "dictionary from name patterns to numbers > 0, or None"
