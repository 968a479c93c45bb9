"""Records of our optimizers in Megatron's checkpoints: where they lie, and what they say of the layout.

Megatron gives experts an optimizer of their own only where expert parallelism cuts them, so that another size of it may
ask for two records where the checkpoint has one, or the reverse. States are found by name all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

__all__ = [
    "PLAIN_NAMES",
    "RECORD",
    "any_layout",
    "find_records",
    "plain_names",
    "relocate_records",
    "wanted_records",
]

RECORD = "rankwise"
PLAIN_NAMES = "plain_names"
_SCALER = "grad_scaler"
_AVOID = "chained_optim_avoid_prefix"
_NUMBERED = "rankwise_numbered_names"
_SHARDING = "distrib_optim_sharding_type"

Place = tuple[Any, ...]
Records = Mapping[Place, Mapping[str, Any]]


def find_records(state: Any, place: Place = ()) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """The records of optimizers of ours anywhere in nested dictionaries and lists, and where they lie.

    Args:
        state: A state dictionary.
        place: Keys that lead to it.
    """
    if isinstance(state, Mapping):
        record = state.get(RECORD)
        if isinstance(record, Mapping) and "identity" in record:
            yield place, record
        else:
            for key, value in state.items():
                yield from find_records(value, (*place, key))
    elif isinstance(state, Sequence) and not isinstance(state, str | bytes):
        for index, value in enumerate(state):
            yield from find_records(value, (*place, index))


def any_layout(metadata: Mapping[str, Any] | None, common: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a checkpoint says of its layout, corrected where ours wrote it: its states are read on any.

    Args:
        metadata: What Megatron stored. Some of its own formats belong to one layout; without the distributed
            optimizer it names none, for which it asks on a resume with it.
        common: What all ranks share of the checkpoint.
    """
    records = [record for _, record in find_records(common)]
    if not records:
        return metadata
    stored = metadata or {}
    # Until records said so, Megatron put a number before the names where it had several optimizers.
    plain = len(records) == 1 or all(record.get(PLAIN_NAMES) for record in records)
    numbered = not plain and (stored.get(_SHARDING) == "dp_reshardable" or not stored.get(_AVOID, False))
    return {**stored, _SHARDING: "fully_reshardable", _NUMBERED: numbered}


def plain_names(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metadata for which Megatron leaves the names of several optimizers' states as they are.

    Args:
        metadata: Megatron's, of a checkpoint to be written, or that of one to be read.
    """
    given = dict(metadata or {})
    if given.pop(_NUMBERED, False):
        return {**given, _AVOID: False}
    given.pop(_SHARDING, None)
    return {**given, _AVOID: True}


def wanted_records(requested: Records, stored: Records) -> dict[Place, Mapping[str, Any]]:
    """The checkpoint's record for each one that is asked for.

    Args:
        requested: This run's.
        stored: The checkpoint's.
    """
    if requested.keys() == stored.keys() or not stored:
        return {place: stored[place] for place in requested.keys() & stored.keys()}
    return dict.fromkeys(requested, _joined(list(stored.values())))


def _joined(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One record with the groups of all, each as one of experts and as one of others."""
    groups, members = [], []
    for record in records:
        names = record.get("members") or [[]] * len(record["groups"])
        for group, own in zip(record["groups"], names, strict=True):
            for expert in (False, True):
                groups.append({**group, "is_expert_parallel": expert})
                members.append(own)
    return {**records[0], "groups": groups, "members": members}


def relocate_records(loaded: Any, requested: Records, stored: Records) -> None:
    """Put the checkpoint's records where this run looks for them.

    Args:
        loaded: What Megatron read; changed in place.
        requested: This run's.
        stored: The checkpoint's.
    """
    if requested.keys() == stored.keys() or not (requested and stored):
        return
    found = wanted_records(requested, stored)
    scalers = [_at(loaded, place).get(_SCALER) for place in stored]
    for place in stored.keys() - requested.keys():
        _take_out(loaded, place)
    for place, record in found.items():
        target = _at(loaded, place)
        target[RECORD] = record
        if scalers[0] is not None:
            target[_SCALER] = scalers[0]


def _take_out(loaded: Any, place: Place) -> None:
    here = _at(loaded, place)
    # Of what a rank had none of, Megatron keeps an empty dictionary.
    for key in [
        key for key, value in here.items() if key in (RECORD, _SCALER) or (isinstance(value, dict) and not value)
    ]:
        del here[key]
    if not here and place:
        del _at(loaded, place[:-1])[place[-1]]


def _at(state: Any, place: Place) -> MutableMapping[Any, Any]:
    for key in place:
        state = state[key]
    found: MutableMapping[Any, Any] = state
    return found
