"""Our optimizers leave records in Megatron's checkpoints, which are found here and fitted to this run.

Megatron gives experts an optimizer of their own only if expert parallelism cuts them, so that another size of it may
ask for two records where the checkpoint has one, or the reverse. States are found by name in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "RECORD",
    "Place",
    "any_layout",
    "at_place",
    "find_records",
    "nested",
    "plain_names",
    "relocate_records",
    "wanted_records",
]

RECORD = "rankwise"
_SCALER = "grad_scaler"
_AVOID = "chained_optim_avoid_prefix"
_SHARDING = "distrib_optim_sharding_type"

Place = tuple[Any, ...]
"""Keys that lead to something in nested dictionaries and lists."""
Records = Mapping[Place, Mapping[str, Any]]


def nested(state: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield all values in nested dictionaries and lists, with the keys that lead to them; containers come first."""
    yield place, state
    items: Any = ()
    if isinstance(state, Mapping):
        items = state.items()
    elif isinstance(state, Sequence) and not isinstance(state, str | bytes):
        items = enumerate(state)
    for key, value in items:
        yield from nested(value, (*place, key))


def at_place(state: Any, place: Place) -> Any:
    """Return the value in nested dictionaries and lists to which these keys lead."""
    for key in place:
        state = state[key]
    return state


def find_records(state: Any) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield records of optimizers of ours anywhere in nested dictionaries and lists, after where they lie."""
    for place, holder in nested(state):
        record = holder.get(RECORD) if isinstance(holder, Mapping) else None
        if isinstance(record, Mapping) and "identity" in record:
            yield place, record


def any_layout(metadata: Mapping[str, Any] | None, common: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a checkpoint says of its layout, corrected if ours wrote it, so that it can be read on any layout.

    Args:
        metadata: Metadata that Megatron stored. Some of its own formats belong to one layout; without the distributed
            optimizer it names none, though a resume with it asks for one.
        common: The part of the checkpoint that all ranks share.
    """
    if next(find_records(common), None) is None:
        return metadata
    return {**(metadata or {}), _SHARDING: "fully_reshardable"}


def plain_names(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return metadata for which Megatron puts no numbers before the names of several optimizers' states.

    Args:
        metadata: Megatron's metadata of a checkpoint to be written or read.
    """
    given = {key: value for key, value in (metadata or {}).items() if key != _SHARDING}
    return {**given, _AVOID: True}


def wanted_records(requested: Records, stored: Records) -> dict[Place, Mapping[str, Any]]:
    """Return the checkpoint's record for each record that is asked for.

    Args:
        requested: Records of this run.
        stored: Records of the checkpoint.
    """
    if requested.keys() == stored.keys() or not stored:
        return {place: stored[place] for place in requested.keys() & stored.keys()}
    return dict.fromkeys(requested, _joined(list(stored.values())))


def _joined(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join records to one with all groups, each once as a group of experts and once of other parameters."""
    groups, members = [], []
    for record in records:
        for group, member_names in zip(record["groups"], record["members"], strict=True):
            for expert in (False, True):
                groups.append({**group, "is_expert_parallel": expert})
                members.append(member_names)
    return {**records[0], "groups": groups, "members": members}


def relocate_records(loaded: Any, requested: Records, stored: Records) -> None:
    """Put the checkpoint's records where this run looks for them.

    Args:
        loaded: What Megatron read, which changes in place.
        requested: Records of this run.
        stored: Records of the checkpoint.
    """
    if requested.keys() == stored.keys() or not (requested and stored):
        return
    records = wanted_records(requested, stored)
    scalers = [at_place(loaded, place).get(_SCALER) for place in stored]
    for place in stored.keys() - requested.keys():
        _take_out(loaded, place)
    for place, record in records.items():
        target = at_place(loaded, place)
        target[RECORD] = record
        if scalers[0] is not None:
            target[_SCALER] = scalers[0]


def _take_out(loaded: Any, place: Place) -> None:
    here = at_place(loaded, place)
    # Megatron keeps an empty dictionary where a rank had no values.
    for key in [
        key for key, value in here.items() if key in (RECORD, _SCALER) or (isinstance(value, dict) and not value)
    ]:
        del here[key]
    if not here and place:
        del at_place(loaded, place[:-1])[place[-1]]
