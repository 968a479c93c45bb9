"""These functions say which expert layers can be trained, and give their weights a role."""

from __future__ import annotations

from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from rankwise.routing.roles import Role, assign_role, info_of

__all__ = ["are_cut_alike", "are_native", "name_experts"]


def are_native(model: nn.Module) -> bool:
    """Whether all experts of a model are those of :class:`deepspeed.moe.layer.MoE`, not of DeepSpeed's AutoEP."""
    inside = {id(weight) for layer in model.modules() if isinstance(layer, MoE) for weight in layer.parameters()}
    return all(id(weight) in inside for weight in model.parameters() if is_moe_param(weight))


def are_cut_alike(engine: DeepSpeedEngine) -> bool:
    """Whether all weights of a ``step()`` call are cut over one group of ranks, as under ZeRO-1 and 2."""
    return isinstance(engine.optimizer, DeepSpeedZeroOptimizer)


def name_experts(model: nn.Module) -> None:
    """Give the linear weights of experts their role."""
    experts = [weight for weight in model.parameters() if is_moe_param(weight)]
    linear = (Role.LINEAR, Role.UNKNOWN)
    assign_role([weight for weight in experts if info_of(weight, None, "").role in linear], Role.EXPERT)
