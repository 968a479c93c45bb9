"""Checks keys of options: which exist, and which make sense beside others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rankwise.options.hints import hint_for, shown

__all__ = ["OptionError", "called", "called_or", "check_given", "check_keys", "check_preset"]

_called: ContextVar[str] = ContextVar("called", default="")


class OptionError(ValueError):
    """A hyper-parameter is outside its range, or a key is unknown."""


@contextmanager
def called(name: str) -> Iterator[None]:
    """Begin messages about options, and of optimizers built in the context, with the name that a user chose."""
    token = _called.set(name)
    try:
        yield
    finally:
        _called.reset(token)


def called_or(name: str) -> str:
    """The name that a user chose, or else this one."""
    return _called.get() or name


def check_keys(given: Collection[str], valid: Collection[str], owner: str) -> None:
    """Refuse unknown keys, naming the nearest valid one.

    Raises:
        OptionError: ``given`` holds a key that is not in ``valid``.
    """
    for key in given:
        if key not in valid:
            raise OptionError(f"{owner} has no option {shown(key)}: {hint_for(key, valid)}")


def check_preset(given: Mapping[str, Any], preset: Mapping[str, Any], owner: str, instead: str) -> None:
    """Refuse other values for what an optimizer's name already says.

    Args:
        given: The user's options.
        preset: Options that the name stands for.
        owner: The name, for the message.
        instead: The name that leaves the choice to the user.

    Raises:
        OptionError: An option is given; the message names the key and the name to use.
    """
    for key in preset:
        if key in given:
            advice = (
                "" if given[key] == preset[key] else f", or choose {key}={shown(given[key])} under the name '{instead}'"
            )
            raise OptionError(
                f"{owner} has no option '{key}', which the name fixes ({key}={preset[key]!r}): leave it out{advice}"
            )


def check_given(given: Mapping[str, Any], unread: Mapping[str, tuple[str, str]], owner: str) -> None:
    """Refuse options that were given although nothing reads them beside the values of others.

    Args:
        given: The user's options.
        unread: Options that nothing reads, with the reason and the fix.
        owner: Name of the optimizer, for the message.

    Raises:
        OptionError: An option is given; the message names the key, the reason and the fix.
    """
    for key, (reason, fix) in unread.items():
        if key in given:
            raise OptionError(f"{owner}: {key}={shown(given[key])} is invalid: {reason}; {fix}")
