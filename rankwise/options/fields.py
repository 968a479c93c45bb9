"""Options: fields of a paper's option class, from which constructors, documentation, JSON keys and flags are made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import InitVar, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from torch import Tensor

from rankwise.options.checks import Check, InvalidError
from rankwise.options.hints import shown
from rankwise.options.validation import OptionError, called_or

__all__ = ["Option", "Options", "option"]

_KEY = "rankwise"


class Option(NamedTuple):
    """The description of an option.

    Attributes:
        name: Key of the option everywhere.
        default: Value where it is not given.
        check: Checks its values.
        text: Says what it does, in one or more sentences without markup.
        per_group: Whether param groups may have values of their own.
        structural: Whether the shapes of states depend on it, so that it must not change once a group has states.
    """

    name: str
    default: Any
    check: Check
    text: str
    per_group: bool
    structural: bool


def option(default: Any, check: Check, text: str, *, per_group: bool = False, structural: bool = False) -> Any:
    """Declare a field of an :class:`Options`; see :class:`Option`."""
    return field(default=default, metadata={_KEY: (check, text, per_group or structural, structural)})


class _Common:
    """Options of every optimizer; each class declares them in its own order, with its own defaults."""

    lr: float | Tensor
    skip_nonfinite: bool
    store_param_remainders: bool = False
    transition_steps: int


@dataclass(frozen=True)
class Options(_Common):
    """Base of the option sets; it checks every value.

    Raises:
        OptionError: A value is outside its range; the message names the key, the value, the rule and the fix.
    """

    owner: ClassVar[str] = "optimizer"
    decay_options: ClassVar[tuple[str, ...]] = ("weight_decay",)
    """Options that are set to zero in a group for which a framework wants no decay."""
    if TYPE_CHECKING:
        # The options have no such field, but type checkers take the parameters of constructors from them.
        params: InitVar[Any]

    def __post_init__(self, *_: Any) -> None:
        for known in self.table().values():
            try:
                value = known.check(getattr(self, known.name), known.default)
            except InvalidError as invalid:
                self._fail(known.name, invalid.rule, invalid.fix)
            object.__setattr__(self, known.name, value)
        self._check_together()

    def _check_together(self) -> None:
        """Refuse values that do not go together."""

    @classmethod
    @cache
    def table(cls) -> Mapping[str, Option]:
        """All options by name, in the order of the constructor."""
        for known in fields(cls):
            if _KEY not in known.metadata:
                raise OptionError(
                    f"{cls.__name__}.{known.name} is invalid: a field must be an option; write {known.name} = "
                    "option(default, check, text), or take it from shared"
                )
        return {known.name: Option(known.name, known.default, *known.metadata[_KEY]) for known in fields(cls)}

    @classmethod
    def names(cls) -> list[str]:
        """All keys."""
        return list(cls.table())

    @classmethod
    @cache
    def of_all(cls) -> frozenset[str]:
        """The keys of this class and of all that derive from it."""
        return frozenset(cls.names()).union(*(known.of_all() for known in cls.__subclasses__()))

    @classmethod
    def flag(cls, key: str) -> str:
        """An option on command lines, after the dashes; an empty key gives the common prefix."""
        return f"{cls.owner.lower()}-{key.replace('_', '-')}"

    @classmethod
    def per_group(cls) -> tuple[str, ...]:
        """Options that may differ between param groups."""
        return tuple(known.name for known in cls.table().values() if known.per_group)

    @classmethod
    def structural(cls) -> tuple[str, ...]:
        """Options on which the shapes of states depend."""
        return tuple(known.name for known in cls.table().values() if known.structural)

    @property
    def patterns(self) -> Mapping[str, Collection[str]]:
        """Name patterns by the option that has them; each must match a parameter."""
        return {key: tuple(getattr(self, key, None) or ()) for key in ("exclude", "blocks", "lr_scale")}

    @property
    def varying(self) -> tuple[str, ...]:
        """Names out of :meth:`per_group` that are read, given the values of the other options."""
        return self.per_group()

    def value_of(self, key: str) -> Any:
        """Value of an option; where it is None and others decide, what they decide."""
        return getattr(self, key)

    def unread(self) -> Mapping[str, tuple[str, str]]:
        """Options that nothing reads beside the values of others, with the reason and the fix."""
        return {}

    def beyond_engines(self) -> Mapping[str, str]:
        """Options that only the user's own training loop can serve, and what they need."""
        return {}

    def _refuse_unread(self) -> None:
        for key, (reason, fix) in self.unread().items():
            value = getattr(self, key)
            if (tuple(value) if isinstance(value, list) else value) != self.table()[key].default:
                self._fail(key, reason, fix)

    def _refuse_capturable_skips(self, capturable: bool) -> None:
        if capturable and self.skip_nonfinite:
            self._fail(
                "capturable",
                "it must be false with skip_nonfinite=True, because the host must learn after each step whether it "
                "was skipped",
                "set one of the two to false",
            )

    def _fail(self, key: str, rule: str, fix: str = "") -> NoReturn:
        fix = fix or f"the default is {self.table()[key].default!r}"
        raise OptionError(f"{called_or(self.owner)}: {key}={shown(getattr(self, key))} is invalid: {rule}; {fix}")
