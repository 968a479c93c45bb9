"""This module checks that tensor-parallel ranks hold equal copies of weights that are not cut."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_patches.groups import ParallelGroups
from megatron_patches.parameters import ModelParameter, bare_model
from rankwise.layout.dtensors import local_view

__all__ = ["differing_copies", "warn_of_drift"]

_SHOWN = 3
# Differences below this share of the largest value may come from sums in other orders, in bfloat16 over a long run.
_ROUNDING = 0.05
_CONSEQUENCE = "checkpoints have the first rank's alone"
_WAY_OUT = (
    "If each has its own part, set tensor_model_parallel=True and partition_dim on the parameter, and declare it in "
    "sharded_state_dict (make_sharded_tensors_for_checkpoint with its tensor-parallel axis)"
)
logger = logging.getLogger(__name__)


def differing_copies(
    parameters: Mapping[Parameter, ModelParameter], groups: ParallelGroups, chunks: Sequence[nn.Module]
) -> str | None:
    """Return what is wrong with copies of weights that are not cut, or None. A collective of all ranks.

    Args:
        parameters: The model's parameters, in its order.
        groups: This rank's process groups.
        chunks: Chunks of the model, whose weights have no meaning if Megatron was told not to initialise them.
    """
    wrong: list[str] = []
    for expert in (False, True):
        wrong += _unequal(parameters if _are_initialised(chunks) else {}, groups, expert)
    if not wrong:
        return None
    return (
        f"the tensor-parallel ranks have different values of {_shown(wrong)}, which they are said to hold alike: "
        f"neither its module's sharded_state_dict nor a mark says that it is cut, and {_CONSEQUENCE}. {_WAY_OUT}; if "
        "all are to have the same, initialise it from one seed (outside the fork of get_cuda_rng_tracker()) or "
        "broadcast it over the tensor-parallel group before the optimizer is built"
    )


def warn_of_drift(parameters: Mapping[Parameter, ModelParameter], groups: ParallelGroups, expert: bool) -> None:
    """Warn of weights that differ between tensor-parallel ranks, of which the first rank's would be saved for all.

    Copies that were equal come apart if each is really a part of its own. They also do, by a few roundings, if they are
    summed in different orders; no warning is given then. A collective of the tensor-parallel ranks.

    Args:
        parameters: The model's parameters, in its order.
        groups: This rank's process groups.
        expert: Whether weights of experts are compared, instead of others.
    """
    names = _unequal(parameters, groups, expert)
    group = groups.sharing(expert)
    if not names or group is None:
        return
    mine = {facts.info.name: local_view(weight) for weight, facts in parameters.items() if facts.info.name in names}
    everyone: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, {n: v.detach().cpu().float() for n, v in mine.items()}, group=group)
    apart = [name for name in names if _gap([values[name] for values in everyone]) > _ROUNDING]
    if apart and dist.get_rank(group) == 0:
        logger.warning(
            "rankwise: the tensor-parallel ranks have come to hold different values of %s, of which nothing says that "
            "it is cut: %s. %s",
            *(_shown(apart), _CONSEQUENCE, _WAY_OUT),
        )


def _unequal(parameters: Mapping[Parameter, ModelParameter], groups: ParallelGroups, expert: bool) -> list[str]:
    group = groups.sharing(expert)
    if group is None:
        return []
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, dict(_signs(parameters, expert)), group=group)
    first = everyone[0]
    return [name for name in first if any(theirs.get(name, first[name]) != first[name] for theirs in everyone)]


def _gap(copies: Sequence[Tensor]) -> float:
    """Return the largest difference between copies, divided by the largest value."""
    largest = max(float(values.abs().max()) for values in copies)
    return max(float((values - copies[0]).abs().max()) for values in copies) / (largest or 1.0)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN])) + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)


def _are_initialised(chunks: Sequence[nn.Module]) -> bool:
    configs = (getattr(bare_model(chunk), "config", None) for chunk in chunks)
    return all(getattr(config, "perform_initialization", True) for config in configs)


def _signs(parameters: Mapping[Parameter, ModelParameter], expert: bool) -> Iterator[tuple[str, str]]:
    for parameter, facts in parameters.items():
        if facts.expert == expert and facts.dim is None and facts.ways > 1 and not parameter.is_meta:
            yield facts.info.name, _sign(local_view(parameter))


def _sign(values: Tensor) -> str:
    # A copy, because memory that numpy has seen cannot be freed as Megatron's FSDP frees that of gathered weights.
    flat = values.detach().cpu().contiguous().clone().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest()
