"""Name patterns of options: shell wildcards on whole names; one that matches nothing is a slip of the pen."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatch

import torch.distributed as dist

from rankwise.options.hints import nearest
from rankwise.options.validation import OptionError

__all__ = ["are_checked_later", "checked_later", "refuse_unmatched", "refuse_unmatched_everywhere", "unmatched"]

_later: ContextVar[bool] = ContextVar("later", default=False)


@contextmanager
def checked_later() -> Iterator[None]:
    """Accept patterns that match none of the parameters given: more are known to the caller, who checks them all."""
    token = _later.set(True)
    try:
        yield
    finally:
        _later.reset(token)


def are_checked_later() -> bool:
    """Whether :func:`checked_later` is in force."""
    return _later.get()


def unmatched(patterns: Collection[str], names: Collection[str]) -> list[str]:
    """The patterns that match none of the names."""
    return [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)]


def refuse_unmatched(owner: str, patterns: Collection[str], names: Sequence[str], key: str = "exclude") -> None:
    """Refuse patterns that mean nothing.

    Args:
        owner: The optimizer, for the message.
        patterns: Those of an option.
        names: Names of all parameters there are.
        key: The option.

    Raises:
        OptionError: Names the pattern, and names that are like it.
    """
    for pattern in unmatched(patterns, names):
        raise OptionError(_message(owner, key, pattern, names))


def refuse_unmatched_everywhere(
    owner: str, patterns: Collection[str], names: Sequence[str], key: str = "exclude"
) -> None:
    """Collective over all ranks: as :func:`refuse_unmatched`, where other ranks hold other parameters.

    Raises:
        OptionError: On every rank that has the pattern, if it matches nothing on any.
    """
    idle = unmatched(patterns, names)
    everyone: list[tuple[list[str], list[str]]] = [([], [])] * dist.get_world_size()
    dist.all_gather_object(everyone, (list(patterns), idle))
    matched = {pattern for theirs, missed in everyone for pattern in theirs if pattern not in missed}
    for pattern in idle:
        if pattern not in matched:
            raise OptionError(_message(owner, key, pattern, names))


def _message(owner: str, key: str, pattern: str, names: Sequence[str]) -> str:
    some = ", ".join([*names[:3], "..."] if len(names) > 3 else names)
    return (
        f"{owner}: {key}={pattern!r} is invalid: it must match the whole name of a parameter, with * for any part of "
        f"it, but matches none ({some}); {_advice(pattern, names)}"
    )


def _advice(pattern: str, names: Sequence[str]) -> str:
    core = pattern.strip("*.")
    holding = [name for name in names if core and core in name]
    if holding:
        return f"'*{core}*' would match {len(holding)}, {holding[0]} for example"
    parts = dict.fromkeys(part for name in names for part in name.split("."))
    near = nearest(core, [*names, *parts])
    if near is not None:
        return f"did you mean '{near if near in names else f'*{near}*'}'?"
    return "leave it out"
