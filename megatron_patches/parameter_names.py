"""Names of parameters are compared over the pipeline, because two weights under one name would share their states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from megatron_patches.copies import differing_copies
from megatron_patches.groups import ParallelGroups
from megatron_patches.parameters import ModelParameter, describe_chunks
from rankwise.layout.layout import LayoutError

__all__ = ["describe_model"]

_SHOWN = 3


def describe_model(chunks: Sequence[nn.Module], groups: ParallelGroups) -> dict[Parameter, ModelParameter]:
    """Do :func:`~megatron_patches.parameters.describe_chunks`, and agree on it. A collective of all ranks.

    Args:
        chunks: The chunks passed to ``get_megatron_optimizer``.
        groups: This rank's process groups.

    Raises:
        LayoutError: On every rank: a rank cannot describe its parameters, two stages give different weights one name,
            or tensor-parallel ranks have different values of a weight that each holds whole.
    """
    parameters: dict[Parameter, ModelParameter] = {}
    failure = None
    try:
        parameters = describe_chunks(chunks, groups)
    except LayoutError as error:
        failure = str(error)
    stages = _stages(parameters, groups.pipeline)
    failure = failure or _equal_names(stages)
    apart = differing_copies(parameters, groups, chunks)
    _refuse_together(failure or apart, chunks)
    stage = dist.get_rank(groups.pipeline)
    earlier = Counter(name for names in stages[:stage] for name, _ in names)
    return {parameter: replace(facts, stage_copy=earlier[facts.info.name]) for parameter, facts in parameters.items()}


def _stages(found: Mapping[Parameter, ModelParameter], pipeline: dist.ProcessGroup) -> list[list[tuple[str, bool]]]:
    stages: list[list[tuple[str, bool]]] = [[] for _ in range(dist.get_world_size(pipeline))]
    dist.all_gather_object(stages, [(facts.info.name, facts.shared) for facts in found.values()], group=pipeline)
    return stages


def _equal_names(stages: Sequence[Sequence[tuple[str, bool]]]) -> str | None:
    """Return what is wrong with the stages' names, or None."""
    holders: dict[str, list[int]] = {}
    unshared: set[str] = set()
    for stage, names in enumerate(stages):
        for name, shared in names:
            holders.setdefault(name, []).append(stage)
            if not shared:
                unshared.add(name)
    twice = {name: places for name, places in holders.items() if len(places) > 1 and name in unshared}
    if not twice:
        return None
    shown = "; ".join(f"'{name}' on stages {places}" for name, places in list(twice.items())[:_SHOWN])
    return (
        f"{len(twice)} names stand for several weights each ({shown}): their states would be taken for one another. "
        "Number the layers over the whole model by an attribute layer_number, counted from 1, of every module in the "
        "list that holds them, as Megatron's layers do"
    )


def _refuse_together(failure: str | None, chunks: Sequence[nn.Module]) -> None:
    device = next((parameter.device for chunk in chunks for parameter in chunk.parameters()), torch.device("cpu"))
    failed = torch.tensor(float(failure is not None), dtype=torch.float32, device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if failed.item():
        everyone: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, failure)
        raise LayoutError(next(text for text in everyone if text is not None))
