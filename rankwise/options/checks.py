"""What values an option takes: the check, the range in words, and how a command line is to read it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.options.hints import VALUE_WORDS, nearest, with_both_spellings

__all__ = [
    "Betas",
    "Check",
    "Choice",
    "Flag",
    "FloatType",
    "Fraction",
    "Integer",
    "InvalidError",
    "Number",
    "OrNone",
    "Patterns",
    "is_number",
    "plain_number",
]

LARGEST = 1e6
"""Largest rate or factor: products with more would leave the range of float32."""
_COUNT = 10**9
"""Largest count or size: more than any run or model has, and far from overflowing an index."""
_TYPES = ("float32", "bfloat16", "float16", "float64")


class InvalidError(ValueError):
    """A value that an option cannot have.

    Args:
        rule: What it must be.
        fix: What to write instead; empty: the default is named.
    """

    def __init__(self, rule: str, fix: str = "") -> None:
        super().__init__(rule)
        self.rule, self.fix = rule, fix


def plain_number(value: Any) -> Any:
    """A number of another library, such as numpy's, or its array of one element, as Python has it; else the value."""
    item = getattr(value, "item", None)
    if isinstance(value, Tensor) or not callable(item) or getattr(value, "size", 0) != 1:
        return value
    return item()


def is_number(value: Any) -> bool:
    """Whether it is finite and no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer above every float
        return False


class Check(ABC):
    """Values of one kind."""

    kind: ClassVar[type]
    """Type of the value as typed, or of each of several."""
    count: ClassVar[int | None] = 1
    """Values that are typed one after the other; None: any number of them."""
    optional: bool = False
    """Whether None is one of the values."""

    @abstractmethod
    def __call__(self, value: Any, default: Any) -> Any:
        """The value as it is kept.

        Raises:
            InvalidError: It is none of the kind.
        """

    @property
    @abstractmethod
    def range(self) -> str:
        """The values in words, in a message's or a table's."""


def _finite(value: Any, default: Any) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise InvalidError("a tensor value must have one element", "pass a float or a 0-d tensor")
        # A tensor on an accelerator is trusted: reading it here would stall the device.
        if value.device.type != "cpu":
            return math.nan
        value = value.item()
    if not is_number(value):
        raise InvalidError("it must be a finite number, an int or a float", f"write e.g. {default!r}")
    return float(value)


@dataclass(frozen=True)
class Number(Check):
    """Not below ``low``, nor equal to it if ``above``."""

    low: float = 0.0
    above: bool = False
    kind = float

    def __call__(self, value: Any, default: Any) -> Any:
        """See the base class."""
        value = plain_number(value)
        number = _finite(value, default)
        if number < self.low or (self.above and number == self.low):
            raise InvalidError(f"it must be {self.range}")
        if number > LARGEST:
            raise InvalidError(f"it must be <= {LARGEST:g}")
        return value

    @property
    def range(self) -> str:
        """See the base class."""
        return f"{'>' if self.above else '>='} {self.low:g}"


@dataclass(frozen=True)
class Fraction(Check):
    """Between 0 and 1."""

    with_zero: bool = True
    with_one: bool = False
    kind = float

    def __call__(self, value: Any, default: Any) -> Any:
        """See the base class."""
        value = plain_number(value)
        number = _finite(value, default)
        excluded = (number == 0 and not self.with_zero) or (number == 1 and not self.with_one)
        if number < 0 or number > 1 or excluded:
            raise InvalidError(f"it must lie {self.range}")
        return value

    @property
    def range(self) -> str:
        """See the base class."""
        return f"in {'[' if self.with_zero else '('}0, 1{']' if self.with_one else ')'}"


@dataclass(frozen=True)
class Integer(Check):
    """From ``low`` to ``high``, above which ``why`` is what to do or the reason."""

    low: int
    high: int = _COUNT
    why: str = ""
    unit: str = ""
    kind = int

    def __call__(self, value: Any, default: Any) -> Any:
        """See the base class."""
        value = plain_number(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < self.low:
            raise InvalidError(f"it must be an integer >= {self.low}")
        if value > self.high:
            raise InvalidError(f"it must be <= {self.high}{self.why and ', ' + self.why}")
        return value

    @property
    def range(self) -> str:
        """See the base class."""
        limits = f">= {self.low}" if self.high == _COUNT else f"from {self.low} to {self.high}"
        return f"integer {limits}{self.unit and ', in ' + self.unit}"


@dataclass(frozen=True)
class Flag(Check):
    """True or false."""

    kind = bool

    def __call__(self, value: Any, default: Any) -> Any:
        """See the base class."""
        value = plain_number(value)
        if not isinstance(value, bool):
            raise InvalidError("it must be true or false")
        return value

    @property
    def range(self) -> str:
        """See the base class."""
        return "true or false"


class Choice(Check):
    """One of some words; None may be one.

    Args:
        choices: The words.
        words: What others call some of them, for messages.
    """

    kind = str

    def __init__(self, *choices: str | None, words: Mapping[str, str] = MappingProxyType({})) -> None:
        self.choices, self._words = choices, {**VALUE_WORDS, **words}
        self.optional = None in choices

    def __call__(self, value: Any, default: Any) -> Any:
        """See the base class."""
        # Compared by type first: 0 is no name, and a tensor has no truth.
        if isinstance(value, str | None) and value in self.choices:
            return value
        near = nearest(value, [str(choice) for choice in self.choices], self._words)
        meant = next((choice for choice in self.choices if str(choice) == near), "")
        fix = "" if near is None else f"did you mean {with_both_spellings(meant)}?"
        raise InvalidError(f"it must be one of {', '.join(map(with_both_spellings, self.choices))}", fix)

    @property
    def range(self) -> str:
        """See the base class."""
        words = [str(choice) if choice is None else f'"{choice}"' for choice in self.choices]
        return f"{', '.join(words[:-1])} or {words[-1]}"


@dataclass(frozen=True)
class Betas(Check):
    """Two decay rates."""

    kind = float
    count = 2

    def __call__(self, value: Any, default: Any) -> Any:
        """See the base class."""
        if isinstance(value, tuple | list):
            value = type(value)(map(plain_number, value))
        well_formed = isinstance(value, tuple | list) and len(value) == 2
        if not well_formed or not all(is_number(beta) and 0 <= beta < 1 for beta in value):
            raise InvalidError(f"it must be {self.range}", f"the default is {list(default)}")
        return value

    @property
    def range(self) -> str:
        """See the base class."""
        return "two numbers in [0, 1)"


@dataclass(frozen=True)
class FloatType(Check):
    """The name of a floating-point type, as a JSON file gives it; torch's own object is taken for its name.

    Args:
        auto: Whether "auto" is one too.
        narrow: Whether float16 is one, in which gradients vanish.
        quantized: Whether "int8" is one too: integers of 8 bits with common scales.
    """

    auto: bool = False
    narrow: bool = True
    quantized: bool = False
    kind = str

    def __call__(self, value: Any, default: Any) -> Any:
        """See the base class."""
        name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        if isinstance(name, str) and (name in self._known or (name == value and name in self._words)):
            return name
        meant = nearest(name, [*self._known, *self._words], VALUE_WORDS) or "float32"
        unless = "".join(f", or be {word!r}" for word in self._words)
        known = f"{', '.join(self._known[:-1])} or {self._known[-1]}"
        raise InvalidError(f"it must name a floating-point type: {known}{unless}", f"write {meant!r}")

    @property
    def _known(self) -> Sequence[str]:
        return [name for name in _TYPES if self.narrow or name != "float16"]

    @property
    def _words(self) -> Sequence[str]:
        """What else it may be."""
        return [*(["auto"] if self.auto else []), *(["int8"] if self.quantized else [])]

    @property
    def range(self) -> str:
        """See the base class."""
        return Choice(*self._known, *self._words).range


@dataclass(frozen=True)
class Patterns(Check):
    """A list of name patterns; kept as a tuple. A lone string is none."""

    kind = str
    count = None

    def __call__(self, value: Any, default: Any) -> Any:
        """See the base class."""
        given = isinstance(value, tuple | list | set | frozenset)
        if not given or not all(isinstance(pattern, str) for pattern in value):
            raise InvalidError("it must be a list of name patterns", 'write e.g. ["*gate*"]')
        # Sets of words come in another order in each process; ranks compare what they were given.
        return tuple(value if isinstance(value, tuple | list) else sorted(value))

    @property
    def range(self) -> str:
        """See the base class."""
        return "list of name patterns"


class OrNone(Check):
    """What another check takes, and None."""

    optional = True

    def __init__(self, check: Check) -> None:
        self.check = check
        self.kind, self.count = check.kind, check.count  # type: ignore[misc]

    def __call__(self, value: Any, default: Any) -> Any:
        """See the base class."""
        return None if value is None else self.check(value, default)

    @property
    def range(self) -> str:
        """See the base class."""
        return f"{self.check.range}, or None"
