"""Some of Megatron's checkpoint formats save one rank's dictionary, and are refused here if it does not suffice."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_patches.fsdp_checkpoint import FORMAT
from megatron_patches.layouts import MegatronLayout
from megatron_patches.megatron_fsdp import UNSAVED
from megatron_patches.support import SupportError
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["holder", "refuse_format", "refuse_holder"]

_FIX = "use --ckpt-format torch_dist, which also resumes on other parallel sizes"


def refuse_format(args: Any, name: str, cls: type[ShardedOptimizer]) -> None:
    """Check ``--ckpt-format`` before training, and not at the first save.

    Args:
        args: Megatron's arguments, validated.
        name: The optimizer's name.
        cls: Class of the optimizer.

    Raises:
        SupportError: With this layout the ``torch`` format would lose states, or could never be loaded.
    """
    saves = getattr(args, "save", None) and not getattr(args, "no_save_optim", False)
    if saves and getattr(args, "ckpt_format", None) == "torch_dcp":
        raise SupportError(
            f"--ckpt-format torch_dcp is invalid with --optimizer {name}: Megatron gives it every rank's "
            f"optimizer.state_dict() under the same keys, so it would write only one rank's; {_FIX}"
        )
    if saves and getattr(args, "use_megatron_fsdp", False) and args.ckpt_format != FORMAT:
        raise SupportError(
            f"--ckpt-format {args.ckpt_format} is invalid with --use-megatron-fsdp and --optimizer {name}: Megatron "
            f"writes the weights of its FSDP in no other format; use --ckpt-format {FORMAT}"
        )
    if saves and getattr(args, "use_megatron_fsdp", False) and getattr(args, "megatron_fsdp_version", 1) == 2:
        raise SupportError(f"--save is invalid with --megatron-fsdp-version 2 and --optimizer {name}: {UNSAVED}")
    if not saves or getattr(args, "ckpt_format", None) != "torch":
        return
    copies = args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
    reason = None
    if getattr(args, "use_distributed_optimizer", False):
        reason = "with --use-distributed-optimizer it has room for the two moments of Adam alone"
    elif getattr(args, "rankwise_layer_wise", False):
        reason = "of the layer-wise optimizer it would hold one data-parallel rank's parameters alone"
    elif copies > 1 and cls.spec_class.matrix_states:
        reason = f"{copies} ranks share the states of the matrices, of which it would hold one rank's alone"
    if reason is not None:
        raise SupportError(f"--ckpt-format torch is invalid with --optimizer {name}: {reason}; {_FIX}")


def holder(wrapper: MegatronOptimizer) -> tuple[int, int] | None:
    """Return this rank's number among ranks that hold different parts, and their number; None if one part suffices.

    Args:
        wrapper: Wrapper of our optimizer, with its layout.
    """
    inner: ShardedOptimizer = wrapper.optimizer
    layout = inner.planner.source
    assert isinstance(layout, MegatronLayout)
    world = dist.get_world_size(layout.group)
    dealt = layout.layer_wise or layout.sharded or isinstance(wrapper, DistributedOptimizer)
    return (inner.planner.rank, world) if world > 1 and (dealt or inner.spec.matrix_states) else None


def refuse_holder(wrapper: MegatronOptimizer, saved: tuple[int, int] | None) -> None:
    """Refuse a dictionary of another rank. A collective of the ranks that share the parameters, if they hold parts.

    Args:
        wrapper: Wrapper of our optimizer, with its layout.
        saved: Result of :func:`holder` on the rank that wrote the dictionary.

    Raises:
        ValueError: On all these ranks: one of them was given another rank's dictionary.
    """
    mine = holder(wrapper)
    if mine is None:
        return
    everyone: list[Any] = [None] * mine[1]
    layout = wrapper.optimizer.planner.source
    dist.all_gather_object(everyone, saved, group=layout.group)
    wrong = {rank: given for rank, given in enumerate(everyone) if given is not None and given != (rank, mine[1])}
    if wrong:
        rank, given = next(iter(wrong.items()))
        raise ValueError(
            f"{wrapper.optimizer.spec.name}: rank {rank} of the {mine[1]} that share these parameters was given "
            f"the states of rank {given[0]} of {given[1]}, and every one holds others. Save every rank's state_dict() "
            f"and load it there, or {_FIX}"
        )
