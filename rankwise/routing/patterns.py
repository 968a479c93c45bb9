"""Name patterns of options: shell wildcards on whole names. A pattern that matches nothing is refused as a slip."""

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
    """Accept patterns that match none of the given parameters: the caller knows more of them, and checks them all."""
    token = _later.set(True)
    try:
        yield
    finally:
        _later.reset(token)


def are_checked_later() -> bool:
    """Whether the program is inside :func:`checked_later`."""
    return _later.get()


def unmatched(patterns: Collection[str], names: Collection[str]) -> list[str]:
    """The patterns that match none of the names."""
    return [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)]


def refuse_unmatched(owner: str, patterns: Collection[str], names: Sequence[str], key: str = "exclude") -> None:
    """Refuse patterns of the option ``key`` that match none of the names of all parameters.

    Raises:
        OptionError: A pattern matches nothing; the message names it, and similar names.
    """
    for pattern in unmatched(patterns, names):
        raise OptionError(_message(owner, key, pattern, names))


def refuse_unmatched_everywhere(
    owner: str, patterns: Collection[str], names: Sequence[str], key: str = "exclude"
) -> None:
    """Refuse patterns without effect on any rank, where ranks hold different parameters; a collective of all ranks.

    Raises:
        OptionError: On every rank that has the pattern, if it matches nothing on any.
    """
    idle = unmatched(patterns, names)
    everyone: list[tuple[list[str], list[str]]] = [([], [])] * dist.get_world_size()
    dist.all_gather_object(everyone, (list(patterns), idle))
    matched = {pattern for rank_patterns, missed in everyone for pattern in rank_patterns if pattern not in missed}
    for pattern in idle:
        if pattern not in matched:
            raise OptionError(_message(owner, key, pattern, names))


def _message(owner: str, key: str, pattern: str, names: Sequence[str]) -> str:
    first_names = ", ".join([*names[:3], "..."] if len(names) > 3 else names)
    return (
        f"{owner}: {key}={pattern!r} is invalid: it must match the whole name of a parameter, with * for any part of "
        f"it, but matches none ({first_names}); {_advice(pattern, names)}"
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
