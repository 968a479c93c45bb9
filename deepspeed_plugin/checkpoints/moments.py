"""AdamW's files in the form of ours: which run of which parameter lies where, by the names that DeepSpeed noted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, prod
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from deepspeed_plugin.checkpoints.errors import CheckpointError, read_together
from deepspeed_plugin.checkpoints.files import SavedCheckpoint
from deepspeed_plugin.layouts import DeepSpeedLayout
from rankwise.planning.succession import MOMENTS
from rankwise.step.portable import Vectors, merge_vectors, saved_vectors

__all__ = ["vectors_of_adamw"]

Run = tuple[str, tuple[int, ...], int, int, int]
"""Parameter, its shape, where the run begins and ends in it, and where it lies in a tensor of the optimizer."""


def vectors_of_adamw(engine: DeepSpeedEngine, saved: SavedCheckpoint, ranks: range) -> Vectors:
    """Collective: weights and moments that the files of some ranks hold, by name.

    Args:
        engine: The engine that loads; its ranks together read all files.
        saved: Written with AdamW.
        ranks: Whose files this rank reads.

    Raises:
        CheckpointError: Alike on every rank, naming the file that does not hold what its names say.
    """
    group: dist.ProcessGroup = engine.seq_data_parallel_group
    order = _whole(engine)
    return read_together(group, lambda: merge_vectors([_vectors(saved, rank, order) for rank in ranks]))


def _vectors(saved: SavedCheckpoint, rank: int, order: list[list[Run]]) -> Vectors:
    state_dict, flats = saved.optimizer(rank)
    runs = order
    if saved.zero_files:
        runs = _of_zero_3(saved, rank) if saved.partitioned_weights else _of_zero_1_and_2(saved, rank)
    if not flats:  # DeepSpeed has wrapped nothing: the model's weights are the optimizer's
        flats = [saved.content["module"][held[0][0]] for held in runs]
    states = list(_states(state_dict))
    place = saved.zero_files[rank] if saved.zero_files else saved.model_file
    if not len(states) == len(flats) == len(runs):
        raise CheckpointError(f"{place} has {len(flats)} tensors, {len(states)} states and {len(runs)} names of them.")
    for flat, state, held in zip(flats, states, runs, strict=True):
        _require(saved, place, flat, state, held)
    record = [
        {"group": 0, "runs": held, "states": {name: [run[-1] for run in held] for name in MOMENTS if state}}
        for held, state in zip(runs, states, strict=True)
    ]
    return saved_vectors({"layout": record, "state": dict(enumerate(states)), "matrix_states": {}}, flats)


def _states(state_dict: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """In the order of the tensors; some of AdamW's forms count steps by group."""
    for group in state_dict["param_groups"]:
        for key in group["params"]:
            state = state_dict["state"].get(key)
            step = float((state or {}).get("step", group.get("step", 0)))
            yield {**state, "step": torch.tensor(step)} if state else {}


def _require(
    saved: SavedCheckpoint, place: object, flat: Tensor, state: Mapping[str, Any], runs: Sequence[Run]
) -> None:
    """Refuse what is not all there, and weights that are not those of the model under their names."""
    end = max((offset + last - first for _, _, first, last, offset in runs), default=0)
    lacks = flat.numel() < end
    if state or saved.zero_files:  # at stage 0 a parameter that no gradient has reached has no state
        lacks = lacks or any(name not in state or state[name].numel() < end for name in MOMENTS)
    if state and not saved.zero_files:
        lacks = lacks or any(tuple(state[name].shape) != runs[0][1] for name in MOMENTS)
    if lacks:
        raise CheckpointError(
            f"{place} does not hold both of AdamW's moments for all of its weights; load the weights alone with "
            "load_optimizer_states=False."
        )
    for name, _, first, last, offset in () if saved.partitioned_weights else runs:
        rounded = saved.content["module"][name].reshape(-1)[first:last]
        ours = flat.reshape(-1)[offset : offset + last - first].to(rounded.dtype)
        if not torch.allclose(ours, rounded, rtol=0.0, atol=0.0, equal_nan=True):
            raise CheckpointError(
                f"what {place} holds for '{name}' is not its weight in {saved.model_file.name}: they are of different "
                "saves, or in another order; load the weights alone with load_optimizer_states=False."
            )


def _whole(engine: DeepSpeedEngine) -> list[list[Run]]:
    """At stage 0, where nothing but the order tells which parameter a state belongs to."""
    layout = engine.basic_optimizer.layout_source
    assert isinstance(layout, DeepSpeedLayout)
    return [[(name, shape, 0, prod(shape), 0)] for group in layout.order() or () for name, shape in group]


def _of_zero_3(saved: SavedCheckpoint, rank: int) -> list[list[Run]]:
    """Of each parameter every rank has an equal share, one after the other; the last ones are padded."""
    found: list[list[Run]] = []
    ranks = len(saved.zero_files)
    for shapes in saved.content["param_shapes"]:
        runs: list[Run] = []
        offset = 0
        for name, shape in shapes.items():
            share = ceil(prod(shape) / ranks)
            first, last = (min(place * share, prod(shape)) for place in (rank, rank + 1))
            if first < last:
                runs.append((name, tuple(shape), first, last, offset))
            offset += share
        found.append(runs)
    return found


def _of_zero_1_and_2(saved: SavedCheckpoint, rank: int) -> list[list[Run]]:
    """A group's parameters lie one after the other, perhaps aligned, and are cut for the ranks where they happen to be.

    What DeepSpeed notes of each rank's share (``param_slice_mappings``) is wrong with ``round_robin_gradients``; the
    order of ``param_shapes`` is right.
    """
    found: list[list[Run]] = []
    shapes, gaps = saved.content["param_shapes"], saved.alignment(rank)
    for index, (group, state) in enumerate(zip(shapes, _states(saved.optimizer(rank)[0]), strict=True)):
        share = state[MOMENTS[0]].numel() if state else 0  # weights are saved without the padding at the end
        first, last = rank * share, (rank + 1) * share
        runs: list[Run] = []
        position = 0
        for place, (name, shape) in enumerate(group.items()):
            begin, end = max(position, first), min(position + prod(shape), last)
            if begin < end:
                runs.append((name, tuple(shape), begin - position, end - position, begin - first))
            position += prod(shape) + (gaps[index][place] if gaps else 0)
        found.append(runs)
    return found
