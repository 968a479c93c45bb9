"""This module finds the key, and the place in it, under which a checkpoint has a weight that an optimizer names.

Modules of Megatron may store a weight under another name, and all layers' weights as one tensor: only a model says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.optimizer import MegatronOptimizer

__all__ = ["model_keys"]

ModelKey = tuple[str, tuple[int, ...]]


def model_keys(wrapper: MegatronOptimizer, model_state: Any) -> dict[str, ModelKey]:
    """Return the key of each weight, and the place of its layer there. A collective of the pipeline stages' ranks.

    Args:
        wrapper: Wrapper of our optimizer.
        model_state: The model's sharded state.

    Returns:
        Keys by name, without experts, whose names are each expert-parallel rank's own.
    """
    stages: list[dict[str, ModelKey]] = [{} for _ in range(dist.get_world_size(wrapper.pipeline))]
    mine = dict(_own(wrapper, model_state)) if model_state and wrapper.optimizer is not None else {}
    dist.all_gather_object(stages, mine, group=wrapper.pipeline)
    return {name: key for stage in stages for name, key in stage.items()}


def _own(wrapper: MegatronOptimizer, model_state: Any) -> Iterator[tuple[str, ModelKey]]:
    names = wrapper.optimizer.planner.source.plain_names
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    for entry in nested_values(sharded):
        name = names.get(id(entry.data))
        if name is not None:
            pieces = list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]
            if len({piece.key for piece in pieces}) == 1:
                piece = pieces[0]
                yield name, (piece.key, tuple(piece.global_offset[: piece.prepend_axis_num]))
