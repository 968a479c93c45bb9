"""Process groups that only their own ranks create."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["host_group", "local_group"]


def _import_without_default_group() -> None:
    """Import what torch imports with the first optimizer, before its default arguments can hold the default group.

    They would hold it for ever. A group that outlives its destruction has threads that outlive the interpreter, and an
    abort (SIGABRT) at the process's end.
    """
    default = dist.group.WORLD
    dist.group.WORLD = None
    try:
        importlib.import_module("torch.distributed.nn.functional")
    finally:
        dist.group.WORLD = default


_import_without_default_group()


def local_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """Create a group; all of its ranks must call this, and other ranks need not.

    Where the default group is bound to a device, as DeepSpeed binds it, torch splits new groups off it, which takes
    every rank of the world: the ranks of a smaller group would wait for ever. During the call it is therefore unbound,
    and the new group connects by itself when it is first used.

    Args:
        ranks: Ranks of the default group.
        options: Further options of :func:`torch.distributed.new_group`.
    """
    world = _world()
    bound = getattr(world, "bound_device_id", None)
    if bound is not None:
        world.bound_device_id = None
    try:
        group = dist.new_group(list(ranks), use_local_synchronization=True, **options)
    finally:
        if bound is not None:
            world.bound_device_id = bound
    assert isinstance(group, dist.ProcessGroup)
    return group


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group, or one of the same ranks that can send tensors of the host; all of them must call this."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return local_group(dist.get_process_group_ranks(group), backend="gloo")
    return group


def _world() -> Any:
    return dist.group.WORLD
