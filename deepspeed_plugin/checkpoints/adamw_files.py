"""This module gives files of AdamW and Muon the form of ours, and finds parameters in them by DeepSpeed's own names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from deepspeed_plugin.checkpoints.files import SavedCheckpoint
from deepspeed_plugin.layouts import GroupedShapes
from rankwise.layout.chunked_vectors import CheckpointError
from rankwise.saving.adamw_states import moment_names, moments_of

__all__ = ["in_our_form"]

Run = tuple[str, tuple[int, ...], int, int, int]
"""A parameter, its shape, where a run begins and ends in it, and where the run lies in a tensor of the optimizer."""


def in_our_form(
    saved: SavedCheckpoint, rank: int, order: GroupedShapes | None, keys: Collection[str]
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return what :meth:`SavedCheckpoint.optimizer` would, had an optimizer of ours written a rank's file.

    Args:
        saved: The checkpoint, written with AdamW or Muon.
        rank: Rank that wrote the file.
        order: Order of :meth:`deepspeed_plugin.layouts.DeepSpeedLayout.order`: at stage 0 nothing else says which
            parameter a state belongs to.
        keys: Keys of the weights in the run that takes over; those of a stack of matrices may be one for each.

    Raises:
        CheckpointError: The file does not hold what its names say.
    """
    state_dict, flats = saved.optimizer(rank)
    if not saved.zero_files:
        runs: list[list[Run]] = [[(name, shape, 0, prod(shape), 0)] for group in order or () for name, shape in group]
    else:
        runs = _of_zero_3(saved, rank) if saved.partitioned_weights else _of_zero_1_and_2(saved, rank)
    if not flats:  # DeepSpeed has wrapped nothing, so that the model's weights are the optimizer's
        flats = [saved.content["module"][held[0][0]] for held in runs]
    states = list(_states(state_dict))
    place = saved.zero_files[rank] if saved.zero_files else saved.model_file
    if not len(states) == len(flats) == len(runs):
        raise CheckpointError(f"{place} has {len(flats)} tensors, {len(states)} states and {len(runs)} names of them.")
    record = []
    for flat, (names, state), held in zip(flats, states, runs, strict=True):
        # Muon at ZeRO-1 and -2 keeps the whole momentum of every parameter of which a rank has any part.
        uncut = bool(saved.zero_files) and not saved.partitioned_weights and names == moment_names({"use_muon": True})
        offsets = _offsets(held, uncut)
        if state or saved.zero_files:  # at stage 0 a parameter without any gradient so far has no state
            shape = None if saved.zero_files else held[0][1]
            _require_moments(place, [state.get(name) for name in names], held, offsets, shape)
        named = [_among_all_experts(saved, rank, run) for run in held]
        _require_weights(saved, place, flat, named)
        pieces = [piece for run, at in zip(named, offsets, strict=True) for piece in _matrices_of(run, at, keys)]
        places = [at for _, at in pieces]
        states_at = {name: places for name in names if state}
        record.append({"group": 0, "runs": [run for run, _ in pieces], "states": states_at})
    states_by_index = {index: state for index, (_, state) in enumerate(states)}
    return {"layout": record, "state": states_by_index, "matrix_states": {}}, flats


def _offsets(runs: Sequence[Run], uncut: bool) -> list[int]:
    """Return where runs lie in a state: as in the weights, or in whole parameters, one after the other."""
    if not uncut:
        return [run[-1] for run in runs]
    ends = accumulate(prod(shape) for _, shape, *_ in runs)
    return [end - prod(shape) + first for end, (_, shape, first, *_) in zip(ends, runs, strict=True)]


def _states(state_dict: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield, for each tensor in order, the names of the moments that it must have, and its moments and step count."""
    for group in state_dict["param_groups"]:
        for key in group["params"]:
            state = state_dict["state"].get(key) or {}
            moments: dict[str, Any] = dict(moments_of(state, group))
            if moments:
                # Some forms of AdamW count by group; Muon does not count, and has taken at least one step.
                count = float(state.get("step", group.get("step", 1)))
                moments["step"] = torch.tensor(count, dtype=torch.float32, device="cpu")
            yield moment_names(group), moments


def _require_moments(
    place: object, moments: Sequence[Tensor | None], runs: Sequence[Run], offsets: Sequence[int], shape: Any
) -> None:
    """Refuse moments that are missing, or that have another shape than ``shape``."""
    end = max((at + last - first for (_, _, first, last, _), at in zip(runs, offsets, strict=True)), default=0)
    for value in moments:
        if value is None or value.numel() < end or shape not in (None, tuple(value.shape)):
            raise CheckpointError(
                f"{place} does not hold AdamW's moments, or Muon's, for all of its weights; load the weights alone "
                "with load_optimizer_states=False."
            )


def _matrices_of(run: Run, at: int, keys: Collection[str]) -> Iterator[tuple[Run, int]]:
    """Yield the runs of a run that have keys of their own, as matrices of a stack do, and where they lie in a state."""
    name, shape, first, last, offset = run
    if f"{name}[0]" not in keys:
        yield run, at
        return
    size = prod(shape[1:])
    for place in range(first // size, -(-last // size)):
        begin, end = max(first, place * size), min(last, (place + 1) * size)
        piece = (f"{name}[{place}]", shape[1:], begin - place * size, end - place * size, offset + begin - first)
        yield piece, at + begin - first


def _among_all_experts(saved: SavedCheckpoint, rank: int, run: Run) -> Run:
    """Return a run in terms of the stack of all experts, where AutoEP has shared the stack out."""
    name, shape, first, last, offset = run
    ways = saved.sharing(name)
    skipped = rank % ways * prod(shape)
    return name, (shape[0] * ways, *shape[1:]) if ways > 1 else shape, first + skipped, last + skipped, offset


def _require_weights(saved: SavedCheckpoint, place: object, flat: Tensor, runs: Sequence[Run]) -> None:
    """Refuse weights that differ from the model file's of the same name, where it has them."""
    for name, _, first, last, offset in runs:
        ours = flat.reshape(-1)[offset : offset + last - first]
        expected = ours if saved.partitioned_weights else saved.weight(name, first, last)
        if ours.numel() < last - first or not torch.allclose(
            ours.to(expected.dtype), expected, rtol=0.0, atol=0.0, equal_nan=True
        ):
            raise CheckpointError(
                f"what {place} holds for '{name}' is not its weight in {saved.model_file.name}: they are of different "
                "saves, or in another order; load the weights alone with load_optimizer_states=False."
            )


def _of_zero_3(saved: SavedCheckpoint, rank: int) -> list[list[Run]]:
    """Return the runs of a ZeRO-3 rank: an equal share of each parameter, in the order of ranks, padded at the end."""
    runs_by_group: list[list[Run]] = []
    ranks = len(saved.zero_files)
    for shapes in saved.content["param_shapes"]:
        runs: list[Run] = []
        offset = 0
        for name, shape in shapes.items():
            ways = saved.sharing(name)  # ranks that follow one another have other experts, and no part of these
            share = ceil(prod(shape) / (ranks // ways))
            first, last = (min(place * share, prod(shape)) for place in (rank // ways, rank // ways + 1))
            if first < last:
                runs.append((name, tuple(shape), first, last, offset))
            offset += share
        runs_by_group.append(runs)
    return runs_by_group


def _of_zero_1_and_2(saved: SavedCheckpoint, rank: int) -> list[list[Run]]:
    """Return the runs of a rank of ZeRO-1 or 2: a group's parameters lie one after the other, and ranks' cuts anywhere.

    DeepSpeed's record of each rank's share (``param_slice_mappings``) is wrong with ``round_robin_gradients``; the
    order of ``param_shapes`` is right.
    """
    runs_by_group: list[list[Run]] = []
    shapes, gaps = saved.content["param_shapes"], saved.alignment(rank)
    for index, (group, flat) in enumerate(zip(shapes, saved.optimizer(0)[1], strict=True)):
        share = flat.numel()  # the last ranks have less, as their weights are saved without the padding
        place = rank // saved.sharing(next(iter(group), ""))  # a group has experts alone, or none
        first, last = place * share, (place + 1) * share
        runs: list[Run] = []
        position = 0
        for number, (name, shape) in enumerate(group.items()):
            begin, end = max(position, first), min(position + prod(shape), last)
            if begin < end:
                runs.append((name, tuple(shape), begin - position, end - position, begin - first))
            position += prod(shape) + (gaps[index][number] if gaps else 0)
        runs_by_group.append(runs)
    return runs_by_group
