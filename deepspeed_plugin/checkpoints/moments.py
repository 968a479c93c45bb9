"""AdamW's moments from a checkpoint of the same ranks and stage, whose tensors hold the runs that ours hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from deepspeed_plugin.checkpoints.errors import CheckpointError, read_together
from deepspeed_plugin.checkpoints.files import SavedCheckpoint
from deepspeed_plugin.checkpoints.moving import open_engine
from rankwise.planning.succession import MOMENTS
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.portable import inherit

__all__ = ["require_moments", "take_moments"]


def require_moments(engine: DeepSpeedEngine, saved: SavedCheckpoint) -> None:
    """Refuse on all ranks what one rank could not take; a collective, before anything changes.

    Raises:
        CheckpointError: Names the file without AdamW's two moments for all of its weights.
    """
    group: dist.ProcessGroup = engine.seq_data_parallel_group
    if saved.zero_files:
        read_together(group, lambda: _require(saved, dist.get_rank(group)))


def _require(saved: SavedCheckpoint, rank: int) -> None:
    state_dict, flats = saved.optimizer(rank)
    held = [min(values[name].numel() if name in values else 0 for name in MOMENTS) for values in _states(state_dict)]
    # Moments are saved with the padding of the partition, weights without it.
    if len(held) != len(flats) or any(size < flat.numel() for size, flat in zip(held, flats, strict=True)):
        raise CheckpointError(
            f"{saved.zero_files[rank]} does not hold both of AdamW's moments for all of its weights; load the weights "
            "alone with load_optimizer_states=False."
        )


def _states(state_dict: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """In the order of the tensors."""
    return [state_dict["state"].get(key, {}) for group in state_dict["param_groups"] for key in group["params"]]


@torch.no_grad()
def take_moments(engine: DeepSpeedEngine, saved: SavedCheckpoint) -> None:
    """Full-precision weights, and moments that mean the same to the engine's optimizer; a collective.

    Args:
        engine: Whose model has the weights.
        saved: Of as many ranks at the same stage.
    """
    optimizer: ShardedOptimizer = engine.basic_optimizer
    rank = dist.get_rank(engine.seq_data_parallel_group) if saved.zero_files else 0
    state_dict, flats = saved.optimizer(rank)
    with open_engine(engine) as layout:
        tensors: list[Tensor] = [tensor for unit in layout.units() for tensor, _ in unit]
        for tensor, flat in zip(tensors, flats, strict=False):
            # What DeepSpeed loads without states has been rounded to the model's type.
            tensor.data.view(-1)[: flat.numel()].copy_(flat.reshape(-1))
        inherit(optimizer, tensors, _states(state_dict))
