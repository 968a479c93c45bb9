"""An optimizer's states by parameter name and position, whichever ranks hold them and wherever they cut them.

A framework whose checkpoints take states piece by piece writes :func:`stored_shards` and :func:`owned_states` under
names of its own, fills them in place and calls :func:`resume`. One whose files hold what each rank had is read as named
vectors: :func:`saved_vectors` of every rank's file are merged, and :func:`restore` fills any layout from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.layout.agreement import together
from rankwise.layout.chunked_vectors import CheckpointError, ChunkedVector, NamedVectors
from rankwise.layout.dtensors import local_view
from rankwise.layout.layout import Shard
from rankwise.plan.kept_states import initial_part
from rankwise.saving.shared_matrices import homes
from rankwise.states.declared_states import StatePart
from rankwise.states.matrix_states import MatrixState, kept_by
from rankwise.states.optimizer_spec import MOMENTS
from rankwise.states.packed_states import PackedValues, packed_in, values_of
from rankwise.states.param_remainders import REMAINDER
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.updates.remainders import join, split

__all__ = [
    "StoredShard",
    "Vectors",
    "common_step",
    "merge_vectors",
    "of_matrices",
    "owned_states",
    "restore",
    "resume",
    "saved_vectors",
    "state_parts",
    "stored_shards",
    "take_moments",
]


class StoredShard(NamedTuple):
    """A run of a parameter on this rank.

    Attributes:
        shard: Place of the run in the parameter.
        copy: Number of the copy, of several that ranks hold alike; copy 0 is to be written.
        weight: 1-D view of the optimizer's weight.
        states: 1-D views of its element states, by name, or what stands for packed ones.
    """

    shard: Shard
    copy: int
    weight: Tensor
    states: dict[str, Any]


def stored_shards(optimizer: ShardedOptimizer, closed: bool = False) -> Iterator[StoredShard]:
    """This rank's planned shards, with their states, which are allocated if need be.

    Args:
        optimizer: Planned optimizer, see :meth:`rankwise.step.optimizer.ShardedOptimizer.plan_ahead`.
        closed: Whether packed states stay packed, as :class:`PackedValues`.
    """
    for unit in optimizer.planned_units:
        for index, tensor in enumerate(unit.tensors):
            flat = local_view(tensor).detach().view(-1)
            for entry, states in unit.states.of_entries(optimizer.state, index, closed):
                part = entry.shard
                copy = list(unit.stored.copies[part.key]).index(part.copy)
                weight = flat[part.offset : part.offset + part.numel]
                yield StoredShard(part, copy, weight, states)


def owned_states(optimizer: ShardedOptimizer) -> dict[str, MatrixState]:
    """States of matrices that this rank owns or keeps for their owners; initial ones where there are none yet."""
    states: dict[str, MatrixState] = {}
    present = optimizer.matrix_states.everything()
    for unit in optimizer.planned_units:
        if unit.exchange is not None:
            for task in unit.exchange.owned():
                saved = present.get(task.key, {})
                if fresh := initial_part(unit, task, saved):
                    states[task.key] = {**fresh, **saved}
            for key, name in kept_by(unit.exchange.plan.keepers, unit.layout.rank, present):
                states.setdefault(key, {})[name] = present[key][name]
    return states


def state_parts(optimizer: ShardedOptimizer) -> dict[str, dict[str, StatePart]]:
    """The parts that the slices that this rank owns have of states, by the keys and names of :func:`owned_states`."""
    return {
        task.key: {name: unit.state_part(task, name) for name in unit.stored_states(task)}
        for unit in optimizer.planned_units
        for task in (() if unit.exchange is None else unit.exchange.owned())
        if task.whole is not None
    }


def common_step(optimizer: ShardedOptimizer) -> int:
    """Number of steps taken; a collective, because a rank without any tensor has no count of its own."""
    optimizer.settle()
    return max((unit.common_step(optimizer.state) for unit in optimizer.planned_units), default=0)


def resume(
    optimizer: ShardedOptimizer,
    matrix_states: Mapping[str, MatrixState],
    step: int,
    extra: Mapping[str, Any],
    fill: Callable[[], None] | None = None,
) -> None:
    """Take over matrix states and counts; weights and element states are written through their views.

    Args:
        optimizer: Planned optimizer.
        matrix_states: States in the form of :func:`owned_states`.
        step: Number of steps taken; 0 leaves the optimizer as if it had not been stepped.
        extra: Result of :meth:`rankwise.step.optimizer.ShardedOptimizer.extra_state`.
        fill: See :meth:`rankwise.step.optimizer.ShardedOptimizer.adopt`.
    """
    optimizer.adopt(matrix_states if step else {}, _counts_of_all(optimizer, step), extra, fill)


def _counts_of_all(optimizer: ShardedOptimizer, step: int) -> dict[int, Tensor]:
    """One count of steps for every param group; none where no step was taken."""
    count = torch.tensor(float(step), dtype=torch.float32, device="cpu")
    return dict.fromkeys(range(len(optimizer.param_groups) if step else 0), count)


# --- named vectors ---------------------------------------------------------------------------------------------------

Vectors = dict[str, Any]
"""Tensors, and :class:`ChunkedVector` of which other ranks hold the rest, by name."""


def saved_vectors(state_dict: Mapping[str, Any], flats: Sequence[Tensor]) -> Vectors:
    """Convert one rank's part of a saved optimizer to vectors by name.

    Args:
        state_dict: Result of :meth:`ShardedOptimizer.state_dict` on that rank.
        flats: The weights stored in the tensors of its param groups, flattened, in the same order; padding at the end
            may be cut off.

    Returns:
        ``weight/<key>``, with what a remainder adds, and ``element/<state>/<key>`` as :class:`ChunkedVector`,
        ``matrix/<key>/<state>`` and ``step/<group>`` as tensors.
    """
    vectors: Vectors = {}
    for index, (record, flat) in enumerate(zip(state_dict["layout"], flats, strict=True)):
        state = state_dict["state"].get(index, {})
        packed = {name: layout[0] for name in state if (layout := packed_in(record, name)) is not None}
        if "step" in state:
            vectors[f"step/{record['group']}"] = state["step"].reshape(())
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
                        _add(vectors, f"element/{name}/{key}", numel, start, values)
            _add(vectors, f"weight/{key}", numel, start, weight)
    for key, matrix in state_dict["matrix_states"].items():
        vectors.update({f"matrix/{key}/{name}": value for name, value in matrix.items()})
    return vectors


def merge_vectors(parts: Sequence[Vectors]) -> Vectors:
    """Join the vectors of several ranks that one process read."""
    merged: Vectors = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, ChunkedVector) and name in merged:
                merged[name].chunks.extend(value.chunks)
            else:
                merged[name] = value
    return merged


def of_matrices(vectors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The states of matrices among named vectors, by matrix and by state."""
    found: dict[str, dict[str, Any]] = {}
    for path, value in vectors.items():
        if path.startswith("matrix/"):
            key, _, name = path.removeprefix("matrix/").rpartition("/")
            found.setdefault(key, {})[name] = value
    return found


def restore(
    optimizer: ShardedOptimizer,
    saved: NamedVectors,
    group: dist.ProcessGroup | None,
    extra: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
    inherited: bool = False,
) -> None:
    """Load weights and states into an optimizer whose units are planned, whatever its layout.

    Args:
        optimizer: Optimizer whose tensors get the weights; the saved states, perhaps none, replace its own.
        saved: Vectors under the names of :func:`saved_vectors`.
        group: Ranks that call this together.
        extra: Result of :meth:`ShardedOptimizer.extra_state`, perhaps with other keys; None loads the weights alone and
            leaves the states as they are.
        strict: Whether all weights must have been saved; else missing ones are left alone.
        inherited: Whether the states are moments of AdamW or Muon; ``extra`` is None then.

    Raises:
        MisfitError: A matrix has a state of another shape; on every rank alike, before anything changes.
        CheckpointError: A parameter was not saved, or with another shape, or cannot be read; on every rank alike.
    """

    def judged() -> tuple[dict[str, MatrixState], dict[str, Tensor]]:
        _refuse_another_model(optimizer, saved, strict, group)
        matrices = {} if extra is None else _owned_destinations(optimizer, saved)
        optimizer.saved.fit.refuse_misfits(matrices)
        return matrices, {} if extra is None and not inherited else _counts(saved)

    # If a rank gave up alone, its caller might remove the files while others still look.
    matrices, steps = together(judged, group)
    counts = {int(name.removeprefix("step/")): value for name, value in steps.items()}
    succession, takeover = optimizer.saved.succession, None
    if inherited:
        saved.load(steps, group)
        began = max(map(int, steps.values()), default=0)
        takeover = succession.plan(_stored_moments(optimizer, saved) if began else {}, optimizer.param_groups)
        extra, counts = succession.record(takeover, began), _counts_of_all(optimizer, began)

    def fill() -> None:
        moments = None if takeover is None else takeover.carried
        wanted, unpacked = _destinations(optimizer, saved, extra is not None, moments)
        if matrices:
            matrices.update(_owned_destinations(optimizer, saved, announce=False))  # of those that were left out, too
        places = {f"matrix/{key}/{name}": value for key, state in matrices.items() for name, value in state.items()}
        saved.load({**wanted, **places, **steps}, group)
        for unpack in unpacked:
            unpack()

    if extra is None:
        fill()
    else:
        optimizer.adopt(matrices, counts, extra, fill)
    if takeover is not None:
        succession.tell(takeover, "another optimizer")


def _refuse_another_model(
    optimizer: ShardedOptimizer, saved: NamedVectors, strict: bool, group: dist.ProcessGroup | None
) -> None:
    """Compare what was saved with the model's parameters, whichever rank holds them; ranks share the work."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    shapes = {key: shape for unit in optimizer.planned_units for key, shape in unit.stored.shapes.items()}
    for key, shape in islice(shapes.items(), rank, None, ranks):
        stored = saved.get(f"weight/{key}")
        if stored is None and strict:
            raise CheckpointError(
                f"the checkpoint has no parameter '{key}'; it is of another model, or files are missing"
            )
        if stored is not None and stored[0].numel() != prod(shape):
            raise CheckpointError(
                f"'{key}' has {stored[0].numel()} elements in the checkpoint and {prod(shape)} in the model; it is of "
                "another model"
            )


def _destinations(
    optimizer: ShardedOptimizer,
    stored: Collection[str],
    states: bool,
    moments: Mapping[str, Mapping[str, str]] | None,
) -> tuple[Vectors, list[Callable[[], object]]]:
    """The optimizer's own weights and element states that were saved, to be filled in place.

    Args:
        optimizer: The planned optimizer.
        stored: Names of what was saved.
        states: Whether element states are wanted beside the weights.
        moments: By parameter, the states that saved moments become; None where states have the names they had.

    Returns:
        The vectors by name, and functions to be called when they are filled: these write back what was filled in the
        place of packed states and of narrow weights with remainders.
    """
    wanted: Vectors = {}
    unpacked: list[Callable[[], object]] = []
    for part, _, weight, states_here in stored_shards(optimizer, closed=True):
        remainder: Any = states_here.pop(REMAINDER, None)
        if remainder is not None and f"weight/{part.key}" in stored:
            whole = torch.empty_like(weight, dtype=torch.float32)
            unpacked.append(partial(split, whole, weight, remainder))
            weight = whole
        values: dict[str, Tensor | PackedValues] = {f"weight/{part.key}": weight}
        if states:
            name_here = optimizer.table.base_name(part.key)
            names = {state: state for state in states_here} if moments is None else moments.get(name_here, {})
            values.update({f"element/{name}/{part.key}": states_here[state] for name, state in names.items()})
        for name, value in values.items():
            if name in stored:
                _add(wanted, name, prod(part.shape), part.start, value)
                if isinstance(value, PackedValues):
                    unpacked.append(value.close)
    return wanted, unpacked


def _owned_destinations(
    optimizer: ShardedOptimizer, stored: NamedVectors, announce: bool = True
) -> dict[str, MatrixState]:
    """Memory for the saved states of the matrices that this rank owns."""
    saved = of_matrices({path: path for path in stored})
    # This place sees the states of all matrices, so the warning comes from here, once.
    carried = optimizer.saved.carrier.carried(saved, announce=announce and optimizer.planner.rank == 0)
    owners = optimizer.owners()
    for unit in optimizer.planned_units:
        owners |= homes(unit)
    return {
        key: {name: torch.empty(stored[path][0], dtype=stored[path][1], device="cpu") for name, path in state.items()}
        for key, state in carried.items()
        if owners.get(key) == optimizer.planner.rank
    }


def _counts(stored: NamedVectors) -> dict[str, Tensor]:
    """Memory for the step counts of the param groups."""
    return {
        name: torch.zeros((), dtype=kind, device="cpu")
        for name, (_, kind) in stored.items()
        if name.startswith("step/")
    }


def take_moments(
    optimizer: ShardedOptimizer,
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    began: int,
    values: Callable[[Tensor, str], Tensor],
    author: str,
    note: str = "",
    elsewhere: Collection[str] = (),
) -> None:
    """Continue with the moments that another optimizer has of each of the optimizer's tensors.

    Args:
        optimizer: Planned optimizer; its weights are loaded already, its states are replaced.
        shapes: Shapes of the moments there are, by parameter, the same on every rank.
        began: Steps that the other optimizer has taken; 0 if it has taken none.
        values: Returns a moment of the content of one of the optimizer's tensors, as long as the tensor.
        author: Name of the optimizer that wrote the states.
        note: Further words for the user.
        elsewhere: Parameters of other optimizers that start afresh: one record is saved for the whole model.
    """
    succession = optimizer.saved.succession
    takeover = succession.plan(shapes if began else {}, optimizer.param_groups)

    def fill() -> None:
        for unit in optimizer.planned_units:
            for index, tensor in enumerate(unit.tensors):
                for entry, views in unit.states.of_entries(optimizer.state, index):
                    run = slice(entry.shard.offset, entry.shard.offset + entry.shard.numel)
                    for moment, name in takeover.carried.get(entry.info.name, {}).items():
                        views[name].copy_(values(tensor, moment).reshape(-1)[run])

    resume(optimizer, {}, began, succession.record(takeover, began, elsewhere), fill)
    succession.tell(takeover, author, note)


def _stored_moments(optimizer: ShardedOptimizer, stored: NamedVectors) -> dict[str, dict[str, tuple[int, ...]]]:
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, (info, _) in optimizer.table.catalog.items():
        for name in MOMENTS:
            places = [f"element/{name}/{key}"]
            if places[0] not in stored and len(info.shape) == 3:
                places = [f"{places[0]}[{index}]" for index in range(info.shape[0])]
            found = [stored[place][0].numel() for place in places if place in stored]
            if len(found) == len(places) and sum(found) == prod(info.shape):
                shapes.setdefault(key, {})[name] = tuple(info.shape)
    return shapes


def _add(vectors: Vectors, name: str, numel: int, start: int, values: Tensor | PackedValues) -> None:
    vectors.setdefault(name, ChunkedVector(numel, [])).chunks.append((start, values))
