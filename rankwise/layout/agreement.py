"""Makes work that may fail on some ranks fail on all, so that no rank waits in a collective for one that gave up."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

__all__ = ["gather_together", "refuse_difference", "together"]

_T = TypeVar("_T")
_Failure = tuple[type[Exception], str]


def together(work: Callable[[], _T], group: dist.ProcessGroup | None) -> _T:
    """Run some work on every rank; if it fails on any, it fails on all. A collective.

    Args:
        work: Function that enters no collective of the ranks.
        group: The ranks, which call this together; None for one process.

    Returns:
        What ``work`` returned on this rank.

    Raises:
        Exception: On every rank, with the type and the text of the first rank's that failed.
    """
    result, _ = _run(work, group, lambda _: None)
    return result


def gather_together(work: Callable[[], _T], group: dist.ProcessGroup | None) -> list[_T]:
    """Run some work as :func:`together` does; returns what it returned on every rank, in rank order."""
    return _run(work, group, lambda result: result)[1]


def refuse_difference(everyone: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Compare what the ranks have planned.

    Args:
        everyone: For each rank, a digest of its plans, and its settings by the names that the message uses.

    Raises:
        RuntimeError: The ranks planned differently.
    """
    differing = _differing([theirs for _, theirs in everyone])
    signs = [(theirs, tuple(others.get(name) for name in differing)) for theirs, others in everyone]
    if len(set(signs)) > 1:
        usual = max(signs, key=signs.count)
        odd = [rank for rank, sign in enumerate(signs) if sign != usual]
        named = "".join(
            f" {name} is {', '.join(f'{value} on ranks {ranks}' for value, ranks in values.items())}."
            for name, values in differing.items()
        )
        raise RuntimeError(
            f"data-parallel ranks planned different steps (ranks {odd} differ from the others); their models or "
            f"optimizer options differ.{named} Build the same model with the same options on every rank."
        )


def _run(
    work: Callable[[], _T], group: dist.ProcessGroup | None, shared: Callable[[_T], _T | None]
) -> tuple[_T, list[_T]]:
    if group is None or dist.get_world_size(group) == 1:
        result = work()
        return result, [result]
    failure: Exception | None = None
    outcome: tuple[_T | None, _Failure | None]
    try:
        result = work()
        outcome = (shared(result), None)
    except Exception as error:
        failure, outcome = error, (None, (_sendable(type(error)), str(error)))
    everyone: list[tuple[_T | None, _Failure | None]] = [(None, None)] * dist.get_world_size(group)
    dist.all_gather_object(everyone, outcome, group=group)
    failed = [rank for rank, (_, rank_failure) in enumerate(everyone) if rank_failure is not None]
    if failed:
        kind, text = everyone[failed[0]][1] or (RuntimeError, "")
        where = "" if len(failed) == len(everyone) else f" (on rank {failed[0]})"
        raise kind(f"{text}{where}") from failure
    return result, [value for value, _ in everyone]  # type: ignore[misc]


def _sendable(kind: type[Exception]) -> type[Exception]:
    """A type that every rank can build from a text: the error's own, if possible."""
    try:
        pickle.dumps(kind)
        kind("")
    except Exception:
        return RuntimeError
    return kind


def _differing(settings: Sequence[Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    """Names whose values differ between the ranks that have them, with the ranks of each value."""
    ranks_of: dict[str, dict[str, list[int]]] = {}
    for rank, rank_settings in enumerate(settings):
        for name, value in rank_settings.items():
            ranks_of.setdefault(name, {}).setdefault(value, []).append(rank)
    return {name: values for name, values in ranks_of.items() if len(values) > 1}
