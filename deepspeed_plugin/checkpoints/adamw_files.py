"""Files of AdamW and Muon in the form of ours: which run of which parameter lies where, by DeepSpeed's own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
"""Parameter, its shape, where the run begins and ends in it, and where it lies in a tensor of the optimizer."""


def in_our_form(saved: SavedCheckpoint, rank: int, order: GroupedShapes | None) -> tuple[dict[str, Any], list[Tensor]]:
    """What :meth:`SavedCheckpoint.optimizer` would say of one rank, had one of ours written these weights and moments.

    Args:
        saved: The checkpoint, written with AdamW or Muon.
        rank: Rank that wrote the file.
        order: See :meth:`deepspeed_plugin.layouts.DeepSpeedLayout.order`: at stage 0 nothing else tells which parameter
            a state belongs to.

    Raises:
        CheckpointError: The file does not hold what its names say.
    """
    state_dict, flats = saved.optimizer(rank)
    if not saved.zero_files:
        runs: list[list[Run]] = [[(name, shape, 0, prod(shape), 0)] for group in order or () for name, shape in group]
    else:
        runs = _of_zero_3(saved, rank) if saved.partitioned_weights else _of_zero_1_and_2(saved, rank)
    if not flats:  # DeepSpeed has wrapped nothing: the model's weights are the optimizer's
        flats = [saved.content["module"][held[0][0]] for held in runs]
    states = list(_states(state_dict))
    place = saved.zero_files[rank] if saved.zero_files else saved.model_file
    if not len(states) == len(flats) == len(runs):
        raise CheckpointError(f"{place} has {len(flats)} tensors, {len(states)} states and {len(runs)} names of them.")
    record = []
    for flat, (names, state), held in zip(flats, states, runs, strict=True):
        # Muon at ZeRO-1 and -2 keeps the momentum of every parameter of which a rank has any part.
        uncut = bool(saved.zero_files) and not saved.partitioned_weights and names == moment_names({"use_muon": True})
        offsets = _offsets(held, uncut)
        if state or saved.zero_files:  # at stage 0 a parameter that no gradient has reached has no state
            shape = None if saved.zero_files else held[0][1]
            _require_moments(place, [state.get(name) for name in names], held, offsets, shape)
        _require_weights(saved, place, flat, held)
        record.append({"group": 0, "runs": held, "states": {name: offsets for name in names if state}})
    found = {index: state for index, (_, state) in enumerate(states)}
    return {"layout": record, "state": found, "matrix_states": {}}, flats


def _offsets(runs: Sequence[Run], uncut: bool) -> list[int]:
    """Where the runs lie in a state: as in the weights, or each in its whole parameter, one after the other."""
    if not uncut:
        return [run[-1] for run in runs]
    ends = accumulate(prod(shape) for _, shape, *_ in runs)
    return [end - prod(shape) + first for end, (_, shape, first, *_) in zip(ends, runs, strict=True)]


def _states(state_dict: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """In the order of the tensors: the moments there must be, and those there are with the count of steps, if any."""
    for group in state_dict["param_groups"]:
        for key in group["params"]:
            state = state_dict["state"].get(key) or {}
            found: dict[str, Any] = dict(moments_of(state, group))
            if found:
                # Some forms of AdamW count by group; Muon does not count, and has taken a step at least.
                count = float(state.get("step", group.get("step", 1)))
                found["step"] = torch.tensor(count, dtype=torch.float32, device="cpu")
            yield moment_names(group), found


def _require_moments(
    place: object, moments: Sequence[Tensor | None], runs: Sequence[Run], offsets: Sequence[int], shape: Any
) -> None:
    """Refuse what is not all there, or not of the ``shape`` that is known."""
    end = max((at + last - first for (_, _, first, last, _), at in zip(runs, offsets, strict=True)), default=0)
    for value in moments:
        if value is None or value.numel() < end or shape not in (None, tuple(value.shape)):
            raise CheckpointError(
                f"{place} does not hold AdamW's moments, or Muon's, for all of its weights; load the weights alone "
                "with load_optimizer_states=False."
            )


def _require_weights(saved: SavedCheckpoint, place: object, flat: Tensor, runs: Sequence[Run]) -> None:
    """Refuse what are not the model's weights under their names, where the model file has them."""
    for name, _, first, last, offset in runs:
        ours = flat.reshape(-1)[offset : offset + last - first]
        known = ours if saved.partitioned_weights else saved.content["module"][name].reshape(-1)[first:last]
        if ours.numel() < last - first or not torch.allclose(
            ours.to(known.dtype), known, rtol=0.0, atol=0.0, equal_nan=True
        ):
            raise CheckpointError(
                f"what {place} holds for '{name}' is not its weight in {saved.model_file.name}: they are of different "
                "saves, or in another order; load the weights alone with load_optimizer_states=False."
            )


def _of_zero_3(saved: SavedCheckpoint, rank: int) -> list[list[Run]]:
    """Runs of a ZeRO-3 rank: an equal share of each parameter, in the order of ranks; the last ones are padded."""
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
    for index, (group, flat) in enumerate(zip(shapes, saved.optimizer(0)[1], strict=True)):
        share = flat.numel()  # of any rank but the last ones, whose weights are saved without the padding
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
