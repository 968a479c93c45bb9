"""These functions say which expert layers can be trained, and give their weights a role."""

from __future__ import annotations

from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from deepspeed_plugin.affine_maps import expert_shard, is_stack
from rankwise.layout.tensor_parallel_shards import TensorParallelShard
from rankwise.routing.roles import Role, assign_role, info_of

__all__ = ["are_cut_alike", "are_known", "are_native", "expert_shards", "name_experts", "stacks_of"]


def are_native(model: nn.Module) -> bool:
    """Whether a model has experts of :class:`deepspeed.moe.layer.MoE`, whose names count those of one rank."""
    return any(is_moe_param(weight) and not is_stack(weight) for weight in model.parameters())


def are_known(model: nn.Module) -> bool:
    """Whether all experts of a model are those of :class:`deepspeed.moe.layer.MoE`, or of DeepSpeed's AutoEP."""
    inside = {id(weight) for layer in model.modules() if isinstance(layer, MoE) for weight in layer.parameters()}
    return all(id(weight) in inside or is_stack(weight) for weight in model.parameters() if is_moe_param(weight))


def are_cut_alike(engine: DeepSpeedEngine) -> bool:
    """Whether all weights of a ``step()`` call are cut over one group of ranks, as under ZeRO."""
    return isinstance(engine.optimizer, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3)


def expert_shards(model: nn.Module) -> dict[int, TensorParallelShard]:
    """Return this rank's experts of every stack that AutoEP has shared out, by identity.

    Raises:
        LayoutError: A stack is shared out in a way that cannot be followed.
    """
    shards = ((id(weight), expert_shard(name, weight)) for name, weight in model.named_parameters())
    return {identity: shard for identity, shard in shards if shard is not None}


def stacks_of(model: nn.Module) -> set[str]:
    """Return the names of a model's stacks of experts that AutoEP has shared out."""
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if is_stack(weight)}


def name_experts(model: nn.Module) -> None:
    """Give the linear weights of experts their role."""
    experts = [weight for weight in model.parameters() if is_moe_param(weight)]
    linear = (Role.LINEAR, Role.UNKNOWN)
    assign_role([weight for weight in experts if info_of(weight, None, "").role in linear], Role.EXPERT)
