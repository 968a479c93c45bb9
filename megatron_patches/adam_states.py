"""This module finds a parameter's states in checkpoints of Megatron's own optimizers, and asks for a rank's part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.nn import Parameter

from megatron_patches.records import nested

__all__ = ["WEIGHT", "AskedState", "BucketPlaces", "NamedPlaces", "Stored", "stored_step"]

WEIGHT = "weight"
"""Name of the full-precision weight among the names of moments."""
_NAMES = {
    WEIGHT: ("fp32_param", "param"),
    "exp_avg": ("exp_avg",),
    "exp_avg_sq": ("exp_avg_sq",),
}
_MUON = "momentum_buffer"
_STATE = "optimizer.state."
_BUCKETS = "optimizer.distributed."
# Some of Megatron's formats put the number of an optimizer before keys if there are several.
_CHAINED = re.compile(r"^chained_\d+\.")


@dataclass(frozen=True)
class Stored:
    """A checkpoint that another optimizer wrote.

    Attributes:
        entries: Sharded tensors by key, without values, and sharded objects.
        common: The part of the checkpoint that all ranks share.
    """

    entries: Mapping[str, Any]
    common: Mapping[str, Any]

    @cached_property
    def plain(self) -> dict[str, str]:
        """Keys by their names without the number of an optimizer, if these names differ."""
        keys: dict[str, str | None] = {}
        for key in self.entries:
            short = _CHAINED.sub("", key)
            keys[short] = None if short in keys else key
        return {short: key for short, key in keys.items() if key is not None}

    @property
    def has_states(self) -> bool:
        """Whether the checkpoint has states of an optimizer."""
        return any(_CHAINED.sub("", key).startswith((_STATE, _BUCKETS)) for key in self.entries)

    @property
    def in_buckets(self) -> bool:
        """Whether a distributed optimizer wrote whole buffers, without the parameters' names."""
        return any(_CHAINED.sub("", key).startswith(_BUCKETS) for key in self.entries)

    @cached_property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Names of the checkpoint's states. Muon's momentum is an average, as Adam's first moment; SGD's is a sum."""
        is_muon = any(map(_is_muon, _groups(self.common)))
        return {**_NAMES, "exp_avg": ("exp_avg", _MUON)} if is_muon else _NAMES


def _is_muon(group: Mapping[str, Any]) -> bool:
    """Whether a group is Muon's, whose coefficient has had two names; SGD has the second, too, beside dampening."""
    return "momentum_beta" in group or ("momentum" in group and "dampening" not in group)


class AskedState(NamedTuple):
    """A state that is asked for, with the place of its values once they are read.

    Attributes:
        request: Megatron's sharded tensor, or the factory of several.
        run: Elements of the flattened tensor that this rank's optimizer holds.
    """

    request: Any
    run: slice


def _groups(common: Any) -> Iterator[Mapping[str, Any]]:
    for _, holder in nested(common):
        groups = holder.get("param_groups") if isinstance(holder, Mapping) else None
        if isinstance(groups, list | tuple):
            yield from (group for group in groups if isinstance(group, Mapping))


def stored_step(*states: Any) -> int:
    """Return the largest count of steps anywhere in what all ranks share of an optimizer.

    Args:
        states: Nested dictionaries.
    """
    steps = [0]
    for state in states:
        steps += [int(group["step"]) for group in _groups(state) if group.get("step") is not None]
        holders = (holder for _, holder in nested(state) if isinstance(holder, Mapping))
        steps += [int(holder["common_step"]) for holder in holders if "common_step" in holder]
    return max(steps)


class NamedPlaces:
    """States under the names of the model's tensors, and in the shapes of this rank's tensor-parallel shards.

    Args:
        wrapper: Wrapper of our optimizer.
        model_state: The model's sharded state, in the checkpoint's layout.
        stored: The checkpoint.
        dealt: Whether every data-parallel rank was given whole parameters of its own.
    """

    further: Mapping[str, ShardedObject] = {}
    """Objects to be read beside the states."""

    def __init__(self, wrapper: MegatronOptimizer, model_state: Any, stored: Stored, dealt: bool) -> None:
        self._stored, self._dealt = stored, dealt
        sharded, _ = extract_sharded_tensors_and_factories(model_state)
        self._sharded = {id(entry.data): entry for entry in nested_values(sharded)}
        buffers = wrapper.buffers if isinstance(wrapper, DistributedOptimizer) else ()
        # As in Megatron, the first rank reads for all copies, whether it holds a part or not.
        self.parameters: list[Parameter] = [p for buffer in buffers for p in buffer.param_index_map]

    def ask(self, parameter: Parameter, state: str, held: slice) -> AskedState | None:
        """Ask for a state of a parameter; None if the checkpoint has none that fits.

        Args:
            parameter: Parameter of the model.
            state: :data:`WEIGHT` or a moment's name.
            held: Elements of the flattened parameter that the optimizer holds.
        """
        entry = self._sharded.get(id(parameter))
        if entry is None:
            return None
        for name in self._stored.names[state]:
            request = self._request(entry, parameter, f"{_STATE}{name}.{entry.key}")
            if request is not None:
                return AskedState(request, held)
        return None

    def _request(self, entry: Any, parameter: Parameter, short: str) -> Any:
        is_factory = isinstance(entry, ShardedTensorFactory)
        # The tensors of a factory may have longer keys.
        names = (short, *(() if not is_factory else (plain for plain in self._stored.plain if plain.startswith(short))))
        keys = [self._stored.plain[plain] for plain in names if plain in self._stored.plain]
        if not keys:
            return None
        prefix = _CHAINED.match(keys[0])
        key = (prefix.group() if prefix else "") + short
        dtype = self._stored.entries[keys[0]].dtype
        room = torch.empty(parameter.shape, dtype=dtype, device="cpu")
        given: dict[str, Any] = {"key": key, "data": room}
        if self._dealt:
            given["replica_id"] = (*entry.replica_id[:-1], 0)
        request = replace(entry, **given) if is_factory else replace(entry, **given, dtype=dtype)
        pieces = list(nested_values(request.build())) if is_factory else [request]
        return request if all(map(self._fits, pieces)) else None

    def _fits(self, piece: ShardedTensor) -> bool:
        stored = self._stored.entries.get(piece.key)
        if stored is None:
            return False
        return bool(piece.allow_shape_mismatch or tuple(stored.global_shape) == tuple(piece.global_shape))


class BucketPlaces:
    """States in the buffers of Megatron's distributed optimizer, whose layout this run must share.

    The buffers have no names, so that the weights in them must be compared with the model's.

    Args:
        wrapper: Distributed wrapper of our optimizer.
        stored: The checkpoint.
        position: Position of the wrapper among several; None if there is one.
    """

    parameters: tuple[Parameter, ...] = ()

    def __init__(self, wrapper: DistributedOptimizer, stored: Stored, position: int | None) -> None:
        self._stored = stored
        prefix = "" if position is None else f"chained_{position}."
        self._base = f"{prefix}{_BUCKETS}dp_group_idx_{wrapper.data_parallel_group_idx}"
        self._instance = wrapper.distributed_optimizer_instance_id
        rank, ranks = wrapper.data_parallel_group.rank(), wrapper.data_parallel_group.size()
        self._runs: dict[int, tuple[str, int, int, int]] = {}
        for gbuf, ranges in enumerate(wrapper.gbuf_ranges):
            for dtype, buckets in ranges.items():
                for index, bucket in enumerate(buckets):
                    local_bucket = wrapper.buffers[gbuf].buckets[index]
                    first = rank * (local_bucket.grad_data.numel() // ranks)
                    key = f"{self._base}.gbuf_idx_{gbuf}.dtype_{dtype}.bucket_idx_{index}"
                    for parameter, places in bucket["param_map"].items():
                        local = places["gbuf_local"]
                        size = local.end - local.start
                        self._runs[id(parameter)] = (key, local_bucket.numel_unpadded, first + local.start, size)
        wanted = ("optimizer", *(("grad_scaler",) if getattr(wrapper, "grad_scaler", None) else ()))
        objects = {name: self._object(f"{self._base}.{name}", rank) for name in wanted}
        self.further = {name: entry for name, entry in objects.items() if entry.unique_key in stored.entries}

    def _object(self, key: str, rank: int) -> ShardedObject:
        return ShardedObject(key, None, (1,), (0,), replica_id=(self._instance, 0, rank))

    def ask(self, parameter: Parameter, state: str, held: slice) -> AskedState | None:
        """Ask for a state of a parameter, as :meth:`NamedPlaces.ask` does."""
        if id(parameter) not in self._runs:
            return None
        base, numel, start, size = self._runs[id(parameter)]
        key = f"{base}.{'param' if state == WEIGHT else state}"
        entry = self._stored.entries.get(key)
        if entry is None or tuple(entry.global_shape) != (numel,) or size != held.stop - held.start:
            return None
        data = torch.empty(size, dtype=entry.dtype, device="cpu")
        request = ShardedTensor(
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=(size,),
            global_shape=(numel,),
            global_offset=(start,),
            axis_fragmentations=None,
            replica_id=(self._instance, 0, 0),
        )
        return AskedState(request, slice(0, size))
