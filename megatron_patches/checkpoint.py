"""Optimizer states become Megatron's sharded tensors, by name and position in the unsharded parameter.

Every rank writes the pieces that it holds, but only the first rank a piece that several hold, and owners write matrix
states. Loading depends on names and positions alone, so that data-, tensor- and pipeline-parallel sizes may change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.serialization import (
    load_sharded_metadata,
    load_tensors_metadata,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from megatron_patches.adam_states import Stored
from megatron_patches.layouts import MegatronLayout
from megatron_patches.megatron_fsdp import under_megatron_fsdp
from megatron_patches.model_keys import model_keys
from megatron_patches.param_groups import Group, match_groups
from megatron_patches.records import RECORD, Place, at_place, find_records, relocate_records, wanted_records
from megatron_patches.resuming import misfit, options_record, overrides, settle_options
from megatron_patches.takeover import TAKEOVER, Takeover, find_takeovers, taken_over
from megatron_patches.whole_files import common_state, require_whole
from rankwise.checkpoint.named_vectors import (
    common_step,
    owned_states,
    resume,
    state_parts,
    stored_shards,
)
from rankwise.layout.dtensors import is_sharded
from rankwise.layout.layout import Shard
from rankwise.mkor.factor_schedule import joined, without_factors
from rankwise.saving.changed_blocks import start_afresh, without_blocks
from rankwise.states.declared_states import StatePart
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["explained_load", "load_sharded", "sharded_state"]

# Megatron rounds the rows of these weights up to a multiple of the tensor-parallel size.
_PADDED = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")
_OURS = "optimizer.rankwise"
logger = logging.getLogger(__name__)
Records = Sequence[Mapping[str, Any]]


class _Piece(NamedTuple):
    """A rectangle of a parameter (a run, if it is no matrix) with a view of this rank's values of it."""

    name: str
    values: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    copy: int | tuple[int, int]


def sharded_state(wrapper: MegatronOptimizer, is_loading: bool, model_state: Any) -> dict[str, Any]:
    """Return what one wrapper contributes to a checkpoint, or asks of one.

    Args:
        wrapper: Wrapper of our optimizer, with its layout.
        is_loading: Whether a checkpoint will fill the tensors.
        model_state: The model's sharded state.
    """
    inner = wrapper.optimizer
    if inner is not None:
        inner.plan_ahead(inner.planner.source.units())
    step, extras = _of_all_ranks(wrapper)
    weights = {} if is_loading else model_keys(wrapper, model_state)
    state: dict[str, Any] = {TAKEOVER: Takeover(wrapper, model_state)} if is_loading and model_state else {}
    if inner is None:
        return state
    parts = state_parts(inner)
    state |= {
        RECORD: {
            "identity": inner.identity,
            "step": step,
            "groups": [_settings(group) for group in inner.param_groups],
            "members": [sorted(names) for names in wrapper.members],
            "options": options_record(inner),
            "extra": joined(extras),
            "weights": weights,
        },
        "elements": {str(index): _sharded(piece, is_loading) for index, piece in enumerate(_pieces(wrapper))},
        "matrices": {
            f"{key}/{name}": _matrix_state(inner, name, value, parts.get(key, {}).get(name, StatePart(key)))
            for key, values in owned_states(inner).items()
            for name, value in values.items()
        },
    }
    if getattr(wrapper, "grad_scaler", None):
        state["grad_scaler"] = wrapper.grad_scaler.state_dict()
    return state


@torch.no_grad()
def load_sharded(wrapper: MegatronOptimizer, state: Mapping[str, Any]) -> None:
    """Take over what a checkpoint filled into :func:`sharded_state`.

    Args:
        wrapper: Wrapper of our optimizer.
        state: The filled dictionary.

    Raises:
        ValueError: Another optimizer has written the checkpoint.
    """
    inner: ShardedOptimizer = wrapper.optimizer
    if isinstance(state.get(TAKEOVER), Takeover):
        state[TAKEOVER].commit()
        return
    if RECORD not in state:
        raise ValueError(_refusal([], inner.identity))
    saved = state[RECORD]
    if saved["identity"] != inner.identity:
        raise ValueError(_refusal([saved["identity"]], inner.identity))
    before = [dict(group) for group in inner.param_groups]
    _restore_groups(wrapper, saved)
    settle_options(inner, before, saved["options"], overrides(wrapper), keep_structure=True)
    for index, piece in enumerate(_pieces(wrapper)):
        loaded = state["elements"][str(index)]
        if loaded.data_ptr() != piece.values.data_ptr():
            piece.values.copy_(loaded.view_as(piece.values))
    matrices: dict[str, dict[str, Tensor]] = {}
    for key, values in owned_states(inner).items():
        # States that the checkpoint has of other logical matrices only were not asked for.
        filled = {name: state["matrices"].get(f"{key}/{name}") for name in values}
        matrices[key] = {
            name: value.reshape(values[name].shape).to(values[name])
            for name, value in filled.items()
            if value is not None
        }
    resume(inner, matrices, saved["step"], saved["extra"])


@contextmanager
def explained_load(requested: Mapping[str, Any], folder: str) -> Iterator[Callable[[Any], None]]:
    """Check a checkpoint before anything of it is read, and say what did not fit if reading it fails.

    The context yields a function to be called with what was read, which puts our records where this run looks for them.

    Args:
        requested: Sharded state of the model and its optimizers, to be loaded.
        folder: Folder of the checkpoint.

    Raises:
        ValueError: An optimizer would get states of another one, or of other shapes, a param group could get several
            settings, or a file is missing or cut off.
    """
    stored = _common_state(requested, folder)
    if any(find_takeovers(requested)):
        require_whole(folder)
    in_place = _filled_in_place(requested)
    placed, theirs = dict(find_records(requested)), dict(find_records(stored))
    wanted, saved = list(placed.values()), list(theirs.values())
    predecessor = _predecessor(requested, theirs, stored, folder)
    if predecessor is not None:
        yield partial(_settled, predecessor, in_place)
        return
    _refuse_another(wanted, saved, "optimizer" in stored)
    for place, record in wanted_records(placed, theirs).items():
        match_groups(_recorded_groups(placed[place]), _recorded_groups(record))
    _leave_out_without_factors(requested, wanted_records(placed, theirs))
    _leave_out_divided_otherwise(requested, placed, folder)
    try:
        yield partial(_settled, partial(relocate_records, requested=placed, stored=theirs), in_place)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception.
        if not wanted:
            raise
        reason = misfit(requested, folder, wanted, saved) if saved else _refusal([], wanted[0]["identity"])
        if reason is None:
            raise
        raise ValueError(reason) from error


def _filled_in_place(requested: Any) -> dict[Place, MegatronOptimizer]:
    """Return wrappers under FSDP2 by the place of their states: Megatron's loop does not load these once more."""
    return {
        place: holder[TAKEOVER].wrapper
        for place, holder in find_takeovers(requested)
        if any(is_sharded(weight) for group in holder[TAKEOVER].wrapper.param_groups for weight in group["params"])
    }


def _settled(relocate: Callable[[Any], None], in_place: Mapping[Place, MegatronOptimizer], loaded: Any) -> None:
    relocate(loaded)
    for place, wrapper in in_place.items():
        # This loads counts, options and what was not read in place. A user's own loop may load them once more.
        wrapper.load_state_dict(at_place(loaded, place))


def _predecessor(requested: Any, theirs: Mapping[Any, Any], common: Mapping[str, Any], folder: str) -> Any:
    """Return what takes over states of Megatron's own optimizers, if they wrote the checkpoint; ranks agree on it."""
    holders = [holder for _, holder in find_takeovers(requested)]
    if holders and not theirs:
        stored = Stored(load_sharded_metadata(folder), common)
        if stored.has_states:
            return taken_over(requested, stored)
    for holder in holders:
        del holder[TAKEOVER]
    return None


def _leave_out_without_factors(requested: Mapping[str, Any], stored: Mapping[Any, Mapping[str, Any]]) -> None:
    """Ask for no state of a matrix that had no factors when it was saved; by the record it continues without them."""
    for place, record in stored.items():
        names, matrices = without_factors(record["extra"]), at_place(requested, place).get("matrices", {})
        prefix = f"{_OURS}.{record['identity']}.matrix."
        for key, value in list(matrices.items()):
            if without_blocks(value.key.removeprefix(prefix).partition(".")[2]) in names:
                del matrices[key]


def _leave_out_divided_otherwise(
    requested: Mapping[str, Any], placed: Mapping[Any, Mapping[str, Any]], folder: str
) -> None:
    """Ask for no state of a matrix if its weight was divided into other matrices when saved: it starts afresh."""
    wanted = []
    for place in placed:
        holder = at_place(requested, place)
        wanted += [(holder["matrices"], key, value.key) for key, value in holder.get("matrices", {}).items()]
    if not wanted:
        return
    stored = set(load_tensors_metadata(folder))
    weights = {without_blocks(key) for key in stored}
    lost = [item for item in wanted if item[2] not in stored and without_blocks(item[2]) in weights]
    for matrices, key, _ in lost:
        del matrices[key]
    if lost:
        names = list(dict.fromkeys(without_blocks(key.rpartition("/")[0]) for _, key, _ in lost))
        logger.warning("rankwise: %s", start_afresh(names, dict.fromkeys(key.rpartition("/")[2] for _, key, _ in lost)))


def _common_state(requested: Mapping[str, Any], folder: str) -> Mapping[str, Any]:
    if any(find_records(requested)):
        return common_state(folder)
    if not requested.get("optimizer"):
        return {}
    try:
        return common_state(folder)
    except Exception:  # noqa: BLE001 - nothing of ours is wanted: what is wrong is for Megatron to say.
        return {}


def _refuse_another(wanted: Records, saved: Records, has_optimizer: bool) -> None:
    mine, theirs = ({record["identity"] for record in records} for records in (wanted, saved))
    if mine and not (theirs and mine <= theirs) and (theirs or has_optimizer):
        raise ValueError(_refusal(sorted(theirs), ", ".join(sorted(mine))))
    if theirs and not mine:
        raise ValueError(_refusal(sorted(theirs), "Megatron's own optimizer"))


def _refusal(saved: Sequence[str], wanted: str) -> str:
    author = ", ".join(map(repr, saved)) or "one of Megatron's own, if it holds any"
    return (
        f"{wanted} cannot continue with the checkpoint's optimizer states, which were written by {author}; continue "
        "with the --optimizer that wrote them, or pass --no-load-optim to start the states afresh"
    )


def _of_all_ranks(wrapper: Any) -> tuple[int, list[dict[str, Any]]]:
    """Return steps taken and extra states of all ranks' optimizers; a collective.

    Megatron saves rank 0's record alone, which has one stage and some of the experts, or none at all.
    """
    inner = wrapper.optimizer
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (0 if inner is None else common_step(inner), wrapper.adoption.extra_states()))
    return max(steps for steps, _ in everyone), [extra for _, extras in everyone for extra in extras]


def _prefix(inner: ShardedOptimizer) -> str:
    # Keys have the optimizer's name: Megatron reads into states in place, and must find none in another's checkpoint.
    return f"{_OURS}.{inner.identity}"


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _restore_groups(wrapper: MegatronOptimizer, saved: Mapping[str, Any]) -> None:
    """Restore hyper-parameters from the matching groups of the checkpoint."""
    groups = wrapper.optimizer.param_groups
    current = [Group(_settings(group), names) for group, names in zip(groups, wrapper.members, strict=True)]
    for group, settings in zip(groups, match_groups(current, _recorded_groups(saved)), strict=True):
        group.update(settings)


def _recorded_groups(record: Mapping[str, Any]) -> list[Group]:
    return [Group(group, frozenset(names)) for group, names in zip(record["groups"], record["members"], strict=True)]


def _pieces(wrapper: MegatronOptimizer) -> Iterator[_Piece]:
    """Yield all element states of this rank, and main weights if the model's own are rounded."""
    # The model's dictionary has the main weights under Megatron's FSDP.
    half = (wrapper.config.bf16 or wrapper.config.fp16) and not under_megatron_fsdp(wrapper)
    for shard, copy_here, weight, states in stored_shards(wrapper.optimizer):
        copy = _copy(wrapper.optimizer, shard.key, copy_here)
        named = {"weight": weight, **states} if half else states
        for name, values in named.items():
            yield from _rectangles(shard, copy, f"{_prefix(wrapper.optimizer)}.{name}.{shard.key}", values)


def _copy(inner: ShardedOptimizer, name: str, copy: int) -> int | tuple[int, int]:
    """Which of all the copies of a weight: the first one is written."""
    layout = inner.planner.source
    earlier = layout.stage_copies.get(name, 0) if isinstance(layout, MegatronLayout) else 0
    return (earlier, copy) if earlier else copy


def _rectangles(shard: Shard, copy: int | tuple[int, int], name: str, values: Tensor) -> Iterator[_Piece]:
    if len(shard.shape) != 2:
        yield _Piece(name, values, (prod(shard.shape),), (shard.start,), copy)
        return
    left, first = 0 if shard.columns is None else shard.columns[0], 0
    for row, column, rows, width in shard.rectangles():
        view = values[first : first + rows * width].view(rows, width)
        yield _Piece(name, view, shard.shape, (row, left + column), copy)
        first += rows * width


def _sharded(piece: _Piece, is_loading: bool) -> ShardedTensor:
    padded = piece.name.endswith(_PADDED)
    return ShardedTensor(
        key=piece.name,
        # Megatron clears a tensor that it may fill in part, before it knows whether the checkpoint fits.
        data=piece.values.clone() if padded and is_loading else piece.values,
        dtype=piece.values.dtype,
        local_shape=tuple(piece.values.shape),
        global_shape=piece.shape,
        global_offset=piece.offset,
        axis_fragmentations=None,
        replica_id=piece.copy,
        allow_shape_mismatch=padded,
    )


def _matrix_state(inner: ShardedOptimizer, name: str, value: Tensor, part: StatePart) -> ShardedTensor:
    """Return a state of a matrix, or this rank's slice of it, as a sharded tensor."""
    # Megatron's tensors have at least one dimension.
    data = value.reshape(1) if value.dim() == 0 else value
    offset, cuts = [0] * data.dim(), [1] * data.dim()
    if part.axis is not None:
        offset[part.axis], cuts[part.axis] = part.number * data.shape[part.axis], part.slices
    return ShardedTensor(
        key=f"{_prefix(inner)}.matrix.{name}.{part.whole}",
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=part.whole_shape(tuple(data.shape)),
        global_offset=tuple(offset),
        axis_fragmentations=tuple(cuts),
        replica_id=_copy(inner, part.whole, part.number if part.axis is None else 0),
    )
