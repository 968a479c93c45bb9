"""Whether tensor-parallel ranks hold alike what they are said to hold alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_patches.groups import ParallelGroups
from megatron_patches.parameters import ModelParameter, bare_model
from rankwise.sharding.dtensors import local_view

__all__ = ["differing_copies"]

_SHOWN = 3


def differing_copies(
    parameters: Mapping[Parameter, ModelParameter], groups: ParallelGroups, chunks: Sequence[nn.Module]
) -> str | None:
    """What is wrong with the copies of weights that no rank has a part of. A collective of all ranks.

    Args:
        parameters: The model's, in its order.
        groups: This rank's process groups.
        chunks: The model's chunks, whose weights mean nothing where Megatron was told not to initialise them.
    """
    wrong: dict[str, None] = {}
    for expert in (False, True):
        group = groups.sharing(expert)
        if group is None:
            continue
        mine = dict(_signs(parameters, expert)) if _are_initialised(chunks) else {}
        everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, mine, group=group)
        for name, sign in everyone[0].items():
            if any(theirs.get(name, sign) != sign for theirs in everyone):
                wrong[name] = None
    if not wrong:
        return None
    shown = ", ".join(map(repr, list(wrong)[:_SHOWN])) + (f" and {len(wrong) - _SHOWN} more" * (len(wrong) > _SHOWN))
    return (
        f"the tensor-parallel ranks have different values of {shown}, which they are said to hold alike: neither its "
        "module's sharded_state_dict nor a mark says that it is cut, and checkpoints would have the first rank's "
        "alone. If each has its own part, set tensor_model_parallel=True and partition_dim on the parameter, and "
        "declare it in sharded_state_dict (make_sharded_tensors_for_checkpoint with its tensor-parallel axis); if all "
        "are to have the same, initialise it from one seed (outside the fork of get_cuda_rng_tracker()) or broadcast "
        "it over the tensor-parallel group before the optimizer is built"
    )


def _are_initialised(chunks: Sequence[nn.Module]) -> bool:
    configs = (getattr(bare_model(chunk), "config", None) for chunk in chunks)
    return all(getattr(config, "perform_initialization", True) for config in configs)


def _signs(parameters: Mapping[Parameter, ModelParameter], expert: bool) -> Iterator[tuple[str, str]]:
    for parameter, known in parameters.items():
        if known.expert == expert and known.dim is None and known.ways > 1 and not parameter.is_meta:
            yield known.info.name, _sign(local_view(parameter))


def _sign(values: Tensor) -> str:
    flat = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest()
