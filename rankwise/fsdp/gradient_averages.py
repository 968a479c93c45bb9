"""What ``fully_shard`` does to gradients: the one place that reads its states."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from math import prod
from typing import Any

from torch import nn

from rankwise.options.validation import OptionError

__all__ = ["averaged_over", "managed_parameters", "seen_alike", "sharded_modules"]


def managed_parameters() -> set[int]:
    """Identities of the parameters that ``fully_shard`` reduces gradients of, which are missing on all ranks alike."""
    modules = (found for found in gc.get_objects() if issubclass(type(found), nn.Module))
    return {id(parameter.sharded_param) for group in _groups_of(modules) for parameter in group.fsdp_params}


def sharded_modules(model: nn.Module) -> list[Any]:
    """The parameter groups that ``fully_shard`` has made of a model's modules."""
    return _groups_of(model.modules())


def _groups_of(modules: Iterable[nn.Module]) -> list[Any]:
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    found: list[Any] = []
    for module in modules:
        if issubclass(type(module), FSDPModule):
            state = module._get_fsdp_state()  # type: ignore[operator]
            groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.10 has one
            found += [state._fsdp_param_group] if groups is None else groups
    return [group for group in found if group is not None]


def _ranks(group: Any) -> int:
    """Data-parallel ranks of a parameter group."""
    mesh = group.mesh_info
    return int(getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1))


def seen_alike(groups: list[Any], meshes: list[Any], world: int) -> tuple[int, int]:
    """This rank's place among those that see the same tokens, and their number: tensor parallelism's.

    Args:
        groups: Groups of :func:`sharded_modules`.
        meshes: Meshes of the optimizer's parameters.
        world: Ranks of all of these together.
    """
    widest = max(groups, key=_ranks, default=None)
    ways = world // (1 if widest is None else _ranks(widest))
    data = () if widest is None else widest.mesh_info.mesh.mesh_dim_names or ()
    for mesh in meshes:
        others = [dim for dim, name in enumerate(mesh.mesh_dim_names or range(mesh.ndim)) if name not in data]
        sizes = [mesh.size(dim) for dim in others]
        if ways > 1 and prod(sizes) == ways:
            position = 0
            for dim, size in zip(others, sizes, strict=True):
                position = position * size + mesh.get_local_rank(dim)
            return position, ways
    return 0, 1


def averaged_over(groups: list[Any]) -> float:
    """What the sum of all ranks' gradients is divided by; 1 where nothing of a model is sharded.

    Raises:
        OptionError: It is not the same for all of them.
    """
    factors = set()
    for group in groups:
        factor = getattr(group, "gradient_divide_factor", None)
        factors.add(float(_ranks(group) if factor is None else factor))
    if len(factors) > 1:
        raise OptionError(
            f"MKOR: gradients divided by {sorted(factors)} are invalid: its layers' must all be divided by the same; "
            "call set_gradient_divide_factor with one value, or exclude the other layers"
        )
    return factors.pop() if factors else 1.0
