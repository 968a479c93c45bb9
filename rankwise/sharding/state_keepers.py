"""Which states of matrices lie with other ranks than their owners: pure Python, the same result on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["BALANCE", "LEAST_KEPT_ELSEWHERE", "keepers_of"]

BALANCE = 1.1
"""The fullest rank's memory over the mean, up to which owners keep all of their states."""
LEAST_KEPT_ELSEWHERE = 1 << 22
"""Bytes of a state from which on keeping it elsewhere is worth a message in every step."""


def keepers_of(
    owners: Mapping[str, int],
    states: Mapping[str, Mapping[str, int]],
    held: Sequence[int],
    given: Mapping[Any, int],
) -> dict[tuple[str, str], int]:
    """Let the emptiest ranks keep states of the fullest, until these are full no more or nothing is gained.

    Args:
        owners: Rank by matrix.
        states: For each matrix, bytes of those of its states that may lie elsewhere.
        held: Bytes that each rank holds besides.
        given: Who keeps which state already, by the matrix and the state's name.

    Returns:
        The rank that keeps a state in its owner's place, by the matrix and the state's name.
    """
    found: dict[tuple[str, str], int] = {}
    totals = list(held)
    own: list[list[tuple[int, str, str]]] = [[] for _ in held]
    for key, sizes in states.items():
        for name, size in sizes.items():
            keeper = given.get((key, name))
            totals[owners[key] if keeper is None else keeper] += size
            if keeper is not None:
                found[key, name] = keeper
            elif size >= LEAST_KEPT_ELSEWHERE:
                own[owners[key]].append((size, key, name))
    limit = BALANCE * sum(totals) / len(totals)
    while max(totals) > limit:
        rank, keeper = totals.index(max(totals)), totals.index(min(totals))
        lent = [state for state in own[rank] if totals[keeper] + state[0] < totals[rank]]
        if not lent:
            break
        # No more than is needed.
        enough = [state for state in lent if totals[rank] - state[0] <= limit]
        chosen = min(enough) if enough else max(lent)
        own[rank].remove(chosen)
        size, key, name = chosen
        found[key, name] = keeper
        totals[rank] -= size
        totals[keeper] += size
    return found
