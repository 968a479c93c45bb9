"""ZeRO-3's sub-groups end here between layers, because MKOR steps a bias together with its weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from rankwise.routing.roles import info_of
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["sub_groups_of", "sub_groups_with_whole_layers"]

SubGroups = list[list[Tensor]]


def sub_groups_of(
    original: Callable[..., SubGroups], wrapper: DeepSpeedZeroOptimizer_Stage3, parameters: list[Tensor]
) -> SubGroups:
    """Run DeepSpeed's ``_create_fp16_sub_groups``, and keep layers whole for an optimizer that needs it.

    Args:
        original: DeepSpeed's method.
        wrapper: ZeRO-3's optimizer.
        parameters: Parameters of one param group that are partitioned over the same ranks.
    """
    sub_groups = original(wrapper, parameters)
    inner = wrapper.optimizer
    whole = isinstance(inner, ShardedOptimizer) and inner.needs_capture
    return sub_groups_with_whole_layers(sub_groups) if whole else sub_groups


def sub_groups_with_whole_layers(sub_groups: SubGroups) -> SubGroups:
    """Let a sub-group that ends between a weight and its bias end later; the order of parameters stays.

    Args:
        sub_groups: Sub-groups of parameters that :func:`rankwise.routing.roles.annotate` has annotated.
    """
    parameters = [parameter for sub_group in sub_groups for parameter in sub_group]
    open_until = list(accumulate(_layer_ends(parameters), max))
    ends = [0]
    for end in accumulate(map(len, sub_groups)):
        while open_until[end - 1] >= end:
            end = open_until[end - 1] + 1
        if end > ends[-1]:
            ends.append(end)
    return [parameters[start:end] for start, end in pairwise(ends)]


def _layer_ends(parameters: Sequence[Tensor]) -> list[int]:
    """Return, for each parameter, the position of the last parameter of the layer that begins with it."""
    infos = [info_of(parameter, None, str(position)) for position, parameter in enumerate(parameters)]
    positions = {info.name: position for position, info in enumerate(infos)}
    ends = list(range(len(parameters)))
    for position, info in enumerate(infos):
        bias = positions.get(info.bias or "", position)
        first, last = sorted((position, bias))
        ends[first] = max(ends[first], last)
    return ends
