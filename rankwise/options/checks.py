"""Checks of options: which values an option takes, how they are described, and how a command line reads them."""

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
"""Largest rate or factor: larger ones would leave the range of float32 in products."""
_COUNT = 10**9
"""Largest count or size: more than any run or model has, and far from overflowing an index."""
_TYPES = ("float32", "bfloat16", "float16", "float64")


class InvalidError(ValueError):
    """A value that an option cannot have.

    Args:
        rule: What the value must be.
        fix: What to write instead; empty: the message names the default.
    """

    def __init__(self, rule: str, fix: str = "") -> None:
        super().__init__(rule)
        self.rule, self.fix = rule, fix


def plain_number(value: Any) -> Any:
    """Convert a number of another library, or its array of one element, to Python's; return others as they are."""
    item = getattr(value, "item", None)
    if isinstance(value, Tensor) or not callable(item) or getattr(value, "size", 0) != 1:
        return value
    return item()


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer above every float
        return False


class Check(ABC):
    """Accepts the values of one kind."""

    kind: ClassVar[type]
    """Type of a value on the command line, or of each of several."""
    count: ClassVar[int | None] = 1
    """Number of values that are written one after the other; None: any number."""
    optional: bool = False
    """Whether None is accepted."""

    @abstractmethod
    def __call__(self, value: Any, default: Any) -> Any:
        """Check a value, and return it in the form in which it is kept.

        Raises:
            InvalidError: The value is invalid.
        """

    @property
    @abstractmethod
    def range(self) -> str:
        """The values in words, for messages and tables."""


def _finite(value: Any, default: Any) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise InvalidError("a tensor value must have one element", "pass a float or a 0-d tensor")
        # Reading a tensor on an accelerator would stall the device, so it is trusted.
        if value.device.type != "cpu":
            return math.nan
        value = value.item()
    if not is_number(value):
        raise InvalidError("it must be a finite number, an int or a float", f"write e.g. {default!r}")
    return float(value)


@dataclass(frozen=True)
class Number(Check):
    """Accepts numbers not below ``low``, and not equal to it if ``above``."""

    low: float = 0.0
    above: bool = False
    kind = float

    def __call__(self, value: Any, default: Any) -> Any:
        """Check a value, and return it in the form in which it is kept."""
        value = plain_number(value)
        number = _finite(value, default)
        if number < self.low or (self.above and number == self.low):
            raise InvalidError(f"it must be {self.range}")
        if number > LARGEST:
            raise InvalidError(f"it must be <= {LARGEST:g}")
        return value

    @property
    def range(self) -> str:
        """The values in words."""
        return f"{'>' if self.above else '>='} {self.low:g}"


@dataclass(frozen=True)
class Fraction(Check):
    """Accepts numbers between 0 and 1."""

    with_zero: bool = True
    with_one: bool = False
    kind = float

    def __call__(self, value: Any, default: Any) -> Any:
        """Check a value, and return it in the form in which it is kept."""
        value = plain_number(value)
        number = _finite(value, default)
        excluded = (number == 0 and not self.with_zero) or (number == 1 and not self.with_one)
        if number < 0 or number > 1 or excluded:
            raise InvalidError(f"it must lie {self.range}")
        return value

    @property
    def range(self) -> str:
        """The values in words."""
        return f"in {'[' if self.with_zero else '('}0, 1{']' if self.with_one else ')'}"


@dataclass(frozen=True)
class Integer(Check):
    """Accepts integers from ``low`` to ``high``; ``why`` explains what is above."""

    low: int
    high: int = _COUNT
    why: str = ""
    unit: str = ""
    kind = int

    def __call__(self, value: Any, default: Any) -> Any:
        """Check a value, and return it in the form in which it is kept."""
        value = plain_number(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < self.low:
            raise InvalidError(f"it must be an integer >= {self.low}")
        if value > self.high:
            raise InvalidError(f"it must be <= {self.high}{self.why and ', ' + self.why}")
        return value

    @property
    def range(self) -> str:
        """The values in words."""
        limits = f">= {self.low}" if self.high == _COUNT else f"from {self.low} to {self.high}"
        return f"integer {limits}{self.unit and ', in ' + self.unit}"


@dataclass(frozen=True)
class Flag(Check):
    """Accepts true and false."""

    kind = bool

    def __call__(self, value: Any, default: Any) -> Any:
        """Check a value, and return it in the form in which it is kept."""
        value = plain_number(value)
        if not isinstance(value, bool):
            raise InvalidError("it must be true or false")
        return value

    @property
    def range(self) -> str:
        """The values in words."""
        return "true or false"


class Choice(Check):
    """Accepts one of some words; None may be one.

    Args:
        choices: The words.
        words: Other names of some words, by which messages guess what was meant.
    """

    kind = str

    def __init__(self, *choices: str | None, words: Mapping[str, str] = MappingProxyType({})) -> None:
        self.choices, self._words = choices, {**VALUE_WORDS, **words}
        self.optional = None in choices

    def __call__(self, value: Any, default: Any) -> Any:
        """Check a value, and return it in the form in which it is kept."""
        # Types are compared first: 0 is no name, and a tensor has no truth.
        if isinstance(value, str | None) and value in self.choices:
            return value
        near = nearest(value, [str(choice) for choice in self.choices], self._words)
        meant = next((choice for choice in self.choices if str(choice) == near), "")
        fix = "" if near is None else f"did you mean {with_both_spellings(meant)}?"
        raise InvalidError(f"it must be one of {', '.join(map(with_both_spellings, self.choices))}", fix)

    @property
    def range(self) -> str:
        """The values in words."""
        words = [str(choice) if choice is None else f'"{choice}"' for choice in self.choices]
        return f"{', '.join(words[:-1])} or {words[-1]}"


@dataclass(frozen=True)
class Betas(Check):
    """Accepts two decay rates."""

    kind = float
    count = 2

    def __call__(self, value: Any, default: Any) -> Any:
        """Check a value, and return it in the form in which it is kept."""
        if isinstance(value, tuple | list):
            value = type(value)(map(plain_number, value))
        well_formed = isinstance(value, tuple | list) and len(value) == 2
        if not well_formed or not all(is_number(beta) and 0 <= beta < 1 for beta in value):
            raise InvalidError(f"it must be {self.range}", f"the default is {list(default)}")
        return value

    @property
    def range(self) -> str:
        """The values in words."""
        return "two numbers in [0, 1)"


@dataclass(frozen=True)
class FloatType(Check):
    """Accepts the name of a floating-point type, or torch's object of it.

    Args:
        auto: Whether "auto" is accepted, too.
        narrow: Whether float16 is accepted, in which gradients vanish.
        quantized: Whether "int8" is accepted, too: integers of 8 bits with common scales.
    """

    auto: bool = False
    narrow: bool = True
    quantized: bool = False
    kind = str

    def __call__(self, value: Any, default: Any) -> Any:
        """Check a value, and return it in the form in which it is kept."""
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
        """Further words that are accepted."""
        return [*(["auto"] if self.auto else []), *(["int8"] if self.quantized else [])]

    @property
    def range(self) -> str:
        """The values in words."""
        return Choice(*self._known, *self._words).range


@dataclass(frozen=True)
class Patterns(Check):
    """Accepts a list of name patterns, which is kept as a tuple; a lone string is refused."""

    kind = str
    count = None

    def __call__(self, value: Any, default: Any) -> Any:
        """Check a value, and return it in the form in which it is kept."""
        given = isinstance(value, tuple | list | set | frozenset)
        if not given or not all(isinstance(pattern, str) for pattern in value):
            raise InvalidError("it must be a list of name patterns", 'write e.g. ["*gate*"]')
        # The order of a set of words differs between processes, but ranks compare their options.
        return tuple(value if isinstance(value, tuple | list) else sorted(value))

    @property
    def range(self) -> str:
        """The values in words."""
        return "list of name patterns"


class OrNone(Check):
    """Accepts what another check does, and None."""

    optional = True

    def __init__(self, check: Check) -> None:
        self.check = check
        self.kind, self.count = check.kind, check.count  # type: ignore[misc]

    def __call__(self, value: Any, default: Any) -> Any:
        """Check a value, and return it in the form in which it is kept."""
        return None if value is None else self.check(value, default)

    @property
    def range(self) -> str:
        """The values in words."""
        return f"{self.check.range}, or None"
