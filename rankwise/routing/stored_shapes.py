"""Recognises how weights are stored and fused, where only names and shapes are known and leave no doubt."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rankwise.routing.fused_shape import FusedShape
from rankwise.routing.roles import ParameterInfo, Role

__all__ = ["parts_by_name", "transposed_by_name"]

_GPT2 = re.compile(
    r"(?P<model>(?:.*\.)?)h\.\d+\.(?P<block>attn|crossattention|mlp)\.(?P<layer>c_attn|q_attn|c_fc|c_proj)\.weight"
)


def transposed_by_name(infos: Iterable[ParameterInfo]) -> list[str]:
    """Find weights of GPT-2's ``Conv1D``, by their names and by the orientation of their model's joined projections.

    Other models use the same names for ``torch.nn.Linear``: there ``c_attn`` has three times as many rows as columns.

    Args:
        infos: All parameters of an optimizer; those whose role is known are left out.

    Returns:
        The names of these weights.
    """
    named: dict[str, list[ParameterInfo]] = {}
    transposed: set[str] = set()
    for info in infos:
        match = _GPT2.fullmatch(info.own_name)
        if match is None or info.role is not Role.UNKNOWN or len(info.shape) != 2:
            continue
        named.setdefault(match["model"], []).append(info)
        if match["layer"] == "c_attn" and info.shape[1] == 3 * info.shape[0]:
            transposed.add(match["model"])
    return [info.name for model in sorted(transposed) for info in named[model]]


def parts_by_name(info: ParameterInfo) -> FusedShape | None:
    """The logical matrices of GPT-2's ``c_attn`` and of ``torch.nn.MultiheadAttention``'s ``in_proj_weight``.

    They are those that modules would tell, so that plain PyTorch and an engine that sees the model do the same.
    """
    if info.role is not Role.UNKNOWN or info.fused is not None or len(info.shape) != 2:
        return None
    outputs, inputs = info.logical_matrix_shape
    match = _GPT2.fullmatch(info.own_name)
    names = ""
    if info.own_name.rpartition(".")[2] == "in_proj_weight" and not info.transposed:
        names = "qkv"
    elif match is not None and match["layer"] == "c_attn" and info.transposed:
        names = "kv" if match["block"] == "crossattention" else "qkv"
    if not names or outputs != len(names) * inputs:
        return None
    return FusedShape(tuple((name, inputs) for name in names), -1 if info.transposed else -2)
