"""An optimizer's states by parameter name and position, whichever ranks hold them and wherever they cut them.

A framework whose checkpoints take states piece by piece writes :func:`stored_shards` and :func:`owned_states` under
names of its own, fills them in place and calls :func:`resume`. One whose files hold what each rank had is read as named
vectors: :func:`saved_vectors` of every rank's file, laid down together, from which :func:`restore` fills any layout.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.layout.agreement import together
from rankwise.layout.chunked_vectors import ChunkedVector, NamedVectors, StorageError
from rankwise.layout.dtensors import local_view
from rankwise.layout.layout import Shard
from rankwise.plan.kept_states import initial_part
from rankwise.states.matrix_states import MatrixState, kept_by
from rankwise.states.packed_states import PackedValues, packed_in, values_of
from rankwise.states.param_remainders import REMAINDER
from rankwise.states.state_takeover import MOMENTS
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.updates.remainders import join, split

logger = logging.getLogger(__name__)

__all__ = [
    "SlicePlace",
    "StoredShard",
    "Vectors",
    "common_step",
    "merge_vectors",
    "owned_states",
    "restore",
    "resume",
    "saved_vectors",
    "slice_places",
    "stored_shards",
    "take_moments",
    "take_over_moments",
]


class StoredShard(NamedTuple):
    """A run of a parameter on this rank.

    Attributes:
        shard: Where it lies in the parameter.
        copy: Which of the copies that ranks hold alike it is a part of; 0 is the one to be written.
        weight: 1-D view of the optimizer's weight.
        states: 1-D views of its element states, by name.
    """

    shard: Shard
    copy: int
    weight: Tensor
    states: dict[str, Tensor]


@dataclass(frozen=True)
class SlicePlace:
    """One of the equal slices of a matrix.

    Attributes:
        whole: The matrix.
        index: Index of the slice.
        count: Number of slices.
        axes: The dimension along which a state is cut, by its name; all slices have the other states alike.
    """

    whole: str
    index: int
    count: int
    axes: Mapping[str, int]


def stored_shards(optimizer: ShardedOptimizer) -> Iterator[StoredShard]:
    """This rank's planned shards, with their states allocated if they were not.

    Args:
        optimizer: Planned, see :meth:`rankwise.step.optimizer.ShardedOptimizer.plan_ahead`.
    """
    for unit in optimizer.planned_units:
        for index, tensor in enumerate(unit.tensors):
            flat = local_view(tensor).detach().view(-1)
            for entry, states in unit.states.of_entries(optimizer.state, index):
                part = entry.shard
                copy = list(unit.stored.copies[part.key]).index(part.copy)
                weight = flat[part.offset : part.offset + part.numel]
                yield StoredShard(part, copy, weight, states)


def _places(optimizer: ShardedOptimizer) -> Iterator[tuple[Shard, Tensor, dict[str, Tensor | PackedValues]]]:
    """This rank's planned shards, their weights, and what their states are to be written into."""
    for unit in optimizer.planned_units:
        for index, tensor in enumerate(unit.tensors):
            flat = local_view(tensor).detach().view(-1)
            for entry, states in unit.states.to_fill(optimizer.state, index):
                part = entry.shard
                yield part, flat[part.offset : part.offset + part.numel], states


def owned_states(optimizer: ShardedOptimizer) -> dict[str, MatrixState]:
    """The states of matrices that this rank has as their owner, or keeps for it; at first the owner's initial ones."""
    found: dict[str, MatrixState] = {}
    present = optimizer.matrix_states.everything()
    for unit in optimizer.planned_units:
        if unit.exchange is not None:
            initial = optimizer.step_costs(unit).matrix_state
            for task in unit.exchange.owned():
                own = present.get(task.key, {})
                if fresh := initial_part(unit, task, own, initial):
                    found[task.key] = {**fresh, **own}
            for key, name in kept_by(unit.exchange.plan.keepers, unit.layout.rank, present):
                found.setdefault(key, {})[name] = present[key][name]
    return found


def slice_places(optimizer: ShardedOptimizer) -> dict[str, SlicePlace]:
    """Where the states of every slice this rank owns lie in the matrix's, by its key in :func:`owned_states`."""
    found: dict[str, SlicePlace] = {}
    for unit in optimizer.planned_units:
        if unit.exchange is None:
            continue
        cut_states = optimizer.step_costs(unit).cut_states
        for task in unit.exchange.owned():
            if task.whole is not None:
                matrix = unit.slices[task.whole]
                found[task.key] = SlicePlace(task.whole, matrix.parts.index(task.key), matrix.count, cut_states(task))
    return found


def common_step(optimizer: ShardedOptimizer) -> int:
    """The number of steps taken; a collective, as a rank without any tensor has no count of its own."""
    optimizer.settle()
    return max((unit.common_step(optimizer.state) for unit in optimizer.planned_units), default=0)


def resume(
    optimizer: ShardedOptimizer, matrix_states: Mapping[str, MatrixState], step: int, extra: Mapping[str, Any]
) -> None:
    """Take over matrix states and counts; weights and element states are written through their views.

    Args:
        optimizer: Planned.
        matrix_states: As :func:`owned_states` gave them.
        step: As :func:`common_step` gave it; 0 leaves the optimizer as if it had not been stepped.
        extra: As :meth:`rankwise.step.optimizer.ShardedOptimizer.extra_state` gave it.
    """
    groups = range(len(optimizer.param_groups) if step else 0)
    steps = {index: torch.tensor(float(step), dtype=torch.float32, device="cpu") for index in groups}
    optimizer.adopt(matrix_states if step else {}, steps, extra)


# --- named vectors ---------------------------------------------------------------------------------------------------

Vectors = dict[str, Any]
"""Tensors, and :class:`ChunkedVector` of which other ranks hold the rest, by name."""


def saved_vectors(state_dict: Mapping[str, Any], flats: Sequence[Tensor]) -> Vectors:
    """One rank's part of a saved optimizer, by name.

    Args:
        state_dict: What :meth:`ShardedOptimizer.state_dict` returned on that rank.
        flats: The weights stored in the tensors of its param groups, flattened, in the same order; padding at the end
            may be cut off.

    Returns:
        ``weight/<key>``, with what a remainder adds, and ``element/<state>/<key>`` as :class:`ChunkedVector`,
        ``matrix/<key>/<state>`` and ``step/<group>`` as tensors.
    """
    found: Vectors = {}
    for index, (record, flat) in enumerate(zip(state_dict["layout"], flats, strict=True)):
        state = state_dict["state"].get(index, {})
        packed = {name: layout[0] for name in state if (layout := packed_in(record, name)) is not None}
        if "step" in state:
            found[f"step/{record['group']}"] = state["step"].reshape(())
        for run, (key, shape, start, end, offset) in enumerate(record["runs"]):
            numel = prod(shape)
            weight = flat.reshape(-1)[offset : offset + end - start]
            for name, offsets in record["states"].items():
                first = offsets[run]
                if first is not None and name in state:
                    values: Any = values_of(state[name], first, end - start, packed.get(name))
                    if name == REMAINDER:
                        weight = join(weight, values)
                    else:
                        _add(found, f"element/{name}/{key}", numel, start, values)
            _add(found, f"weight/{key}", numel, start, weight)
    for key, matrix in state_dict["matrix_states"].items():
        found.update({f"matrix/{key}/{name}": value for name, value in matrix.items()})
    return found


def merge_vectors(parts: Sequence[Vectors]) -> Vectors:
    """Join the parts of several ranks that one process read."""
    merged: Vectors = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, ChunkedVector) and name in merged:
                merged[name].chunks.extend(value.chunks)
            else:
                merged[name] = value
    return merged


def restore(
    optimizer: ShardedOptimizer,
    saved: NamedVectors,
    group: dist.ProcessGroup | None,
    extra: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
) -> None:
    """Load weights and states into an optimizer whose units are planned, whatever its layout.

    Args:
        optimizer: Its tensors receive the weights; its states are replaced by the saved ones, which may be none.
        saved: Under the names of :func:`saved_vectors`.
        group: Ranks that call this together.
        extra: As :meth:`ShardedOptimizer.extra_state` gave it, perhaps among other things; None loads the weights alone
            and leaves the states as they are.
        strict: False leaves weights alone that were not saved.

    Raises:
        MisfitError: On every rank alike, before anything changes: a matrix has a state of another shape.
        StorageError: Alike: a parameter was not saved, or with another shape, or what was saved cannot be read.
    """

    def checked() -> tuple[dict[str, MatrixState], dict[str, Tensor]]:
        _refuse_another_model(optimizer, saved, strict, group)
        if extra is None:
            return {}, {}
        matrices = _owned_destinations(optimizer, saved)
        optimizer.saved.refuse_misfits(optimizer, matrices)
        return matrices, _counts(saved)

    # No rank gives up, whose caller may remove the files, while others still look.
    matrices, steps = together(checked, group)
    if extra is not None:
        optimizer.forget_states()
    wanted, unpacked = _destinations(optimizer, saved, extra is not None)
    places = {f"matrix/{key}/{name}": value for key, state in matrices.items() for name, value in state.items()}
    saved.load({**wanted, **places, **steps}, group)
    for unpack in unpacked:
        unpack()
    if extra is not None:
        counts = {int(name.removeprefix("step/")): value for name, value in steps.items()}
        optimizer.adopt(matrices, counts, extra)


def _refuse_another_model(
    optimizer: ShardedOptimizer, saved: NamedVectors, strict: bool, group: dist.ProcessGroup | None
) -> None:
    """Compare what was saved with the model's parameters, whichever rank holds them: each rank looks at its share."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    for key, shape in islice(optimizer.planner.logical_shapes().items(), rank, None, ranks):
        found = saved.get(f"weight/{key}")
        if found is None and strict:
            raise StorageError(f"the checkpoint has no parameter '{key}'; it is of another model, or files are missing")
        if found is not None and found[0].numel() != prod(shape):
            raise StorageError(
                f"'{key}' has {found[0].numel()} elements in the checkpoint and {prod(shape)} in the model; it is of "
                "another model"
            )


def _destinations(
    optimizer: ShardedOptimizer, stored: Collection[str], states: bool
) -> tuple[Vectors, list[Callable[[], object]]]:
    """The optimizer's own weights and element states, those that were saved, to be filled in place.

    Returns:
        They, by name; and what is to be done then, for what is filled in the place of narrow weights that keep a
        remainder.
    """
    wanted: Vectors = {}
    unpacked: list[Callable[[], object]] = []
    for part, weight, own in _places(optimizer):
        rest: Any = own.pop(REMAINDER, None)
        if rest is not None and f"weight/{part.key}" in stored:
            whole = torch.empty_like(weight, dtype=torch.float32)
            unpacked.append(partial(split, whole, weight, rest))
            weight = whole
        values: dict[str, Tensor | PackedValues] = {f"weight/{part.key}": weight}
        if states:
            values.update({f"element/{name}/{part.key}": value for name, value in own.items()})
        for name, value in values.items():
            if name in stored:
                _add(wanted, name, prod(part.shape), part.start, value)
                if isinstance(value, PackedValues):
                    unpacked.append(value.close)
    return wanted, unpacked


def _owned_destinations(optimizer: ShardedOptimizer, stored: NamedVectors) -> dict[str, MatrixState]:
    """Room for the saved states of the matrices that this rank owns."""
    saved: dict[str, dict[str, str]] = {}
    for path in stored:
        if path.startswith("matrix/"):
            key, _, name = path.removeprefix("matrix/").rpartition("/")
            saved.setdefault(key, {})[name] = path
    # Here, where all of them are seen, and only once.
    carried = optimizer.saved.carrier.carried(saved, announce=optimizer.rank == 0)
    owners = optimizer.owners()
    return {
        key: {name: torch.empty(stored[path][0], dtype=stored[path][1], device="cpu") for name, path in state.items()}
        for key, state in carried.items()
        if owners.get(key) == optimizer.rank
    }


def _counts(stored: NamedVectors) -> dict[str, Tensor]:
    """Room for the steps of each param group."""
    return {
        name: torch.zeros((), dtype=kind, device="cpu")
        for name, (_, kind) in stored.items()
        if name.startswith("step/")
    }


def take_over_moments(optimizer: ShardedOptimizer, saved: NamedVectors, group: dist.ProcessGroup | None) -> None:
    """Go on where an optimizer with AdamW's states has stopped, whatever its layout; as :func:`restore` for states.

    Args:
        optimizer: Planned; its weights are loaded already, its states are replaced.
        saved: Moments under the names of :func:`saved_vectors`.
        group: Ranks that call this together.

    Raises:
        StorageError: They cannot be read.
    """
    moments, steps = _stored_moments(optimizer, saved), _counts(saved)
    saved.load(steps, group)
    began = max((int(step) for step in steps.values()), default=0)

    def fill(carried: Mapping[str, Mapping[str, str]]) -> None:
        wanted: Vectors = {}
        for part, _, states in _places(optimizer):
            for moment, name in carried.get(part.key, {}).items():
                _add(wanted, f"element/{moment}/{part.key}", prod(part.shape), part.start, states[name])
        saved.load(wanted, group)

    _succeed(optimizer, moments, began, fill, "another optimizer")


def take_moments(
    optimizer: ShardedOptimizer,
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    began: int,
    values: Callable[[Tensor, str], Tensor],
    author: str,
    note: str = "",
    elsewhere: Collection[str] = (),
) -> None:
    """As :func:`take_over_moments`, from what each of the optimizer's tensors held.

    Args:
        optimizer: Planned; its weights are loaded already, its states are replaced.
        shapes: Shapes of the moments there are, by parameter, alike on every rank.
        began: Steps that the other optimizer has taken; 0 if it has taken none.
        values: A moment of what one of the optimizer's tensors holds, as long as the tensor.
        author: Name of the optimizer that wrote the states.
        note: Further words for the user.
        elsewhere: What starts afresh in parts of the model that other optimizers have. One record is saved for all.
    """

    def fill(carried: Mapping[str, Mapping[str, str]]) -> None:
        for unit in optimizer.planned_units:
            for index, tensor in enumerate(unit.tensors):
                for entry, own in unit.states.of_entries(optimizer.state, index):
                    run = slice(entry.shard.offset, entry.shard.offset + entry.shard.numel)
                    for moment, name in carried.get(entry.info.name, {}).items():
                        own[name].copy_(values(tensor, moment).reshape(-1)[run])

    _succeed(optimizer, shapes, began, fill, author, note, elsewhere)


def _succeed(
    optimizer: ShardedOptimizer,
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    began: int,
    fill: Callable[[Mapping[str, Mapping[str, str]]], None],
    author: str,
    note: str = "",
    elsewhere: Collection[str] = (),
) -> None:
    """Decide what means the same, fill it, start the rest afresh, and say so."""
    succession = optimizer.saved.succession
    found = succession.plan(shapes if began else {}, optimizer.param_groups)
    optimizer.forget_states()
    fill(found.carried)
    record = succession.record(found, began, elsewhere)
    resume(optimizer, {}, began, {**optimizer.extra_state(), **record})
    told = succession.told(found, author)
    if optimizer.rank == 0:
        logger.warning("%s%s", told, note)


def _stored_moments(optimizer: ShardedOptimizer, stored: NamedVectors) -> dict[str, dict[str, tuple[int, ...]]]:
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, (info, _) in optimizer.table.catalog.items():
        for name in MOMENTS:
            place = f"element/{name}/{key}"
            if place in stored and stored[place][0].numel() == prod(info.shape):
                found.setdefault(key, {})[name] = tuple(info.shape)
    return found


def _add(vectors: Vectors, name: str, numel: int, start: int, values: Tensor | PackedValues) -> None:
    vectors.setdefault(name, ChunkedVector(numel, [])).chunks.append((start, values))
