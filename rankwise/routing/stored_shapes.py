"""How weights are stored and what they hold, where only names and shapes are known and leave no doubt."""

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
    """Weights of GPT-2's ``Conv1D``, by their names and by which way the joined projections of their model lie.

    Other models use the same names for ``torch.nn.Linear``: there ``c_attn`` has three times as many rows as columns.

    Args:
        infos: All parameters of an optimizer; those whose role is known are passed over.

    Returns:
        Their names.
    """
    named: dict[str, list[ParameterInfo]] = {}
    lying: set[str] = set()
    for info in infos:
        found = _GPT2.fullmatch(info.own_name)
        if found is None or info.role is not Role.UNKNOWN or len(info.shape) != 2:
            continue
        named.setdefault(found["model"], []).append(info)
        if found["layer"] == "c_attn" and info.shape[1] == 3 * info.shape[0]:
            lying.add(found["model"])
    return [info.name for model in sorted(lying) for info in named[model]]


def parts_by_name(info: ParameterInfo) -> FusedShape | None:
    """The logical matrices of GPT-2's ``c_attn`` and of ``torch.nn.MultiheadAttention``'s ``in_proj_weight``.

    As modules would tell them, so that a run in plain PyTorch does what one under an engine does, which sees the model.

    Args:
        info: A parameter of which no module is known; whether it is transposed is.
    """
    if info.role is not Role.UNKNOWN or info.fused is not None or len(info.shape) != 2:
        return None
    outputs, inputs = info.logical_matrix_shape
    found = _GPT2.fullmatch(info.own_name)
    names = ""
    if info.own_name.rpartition(".")[2] == "in_proj_weight" and not info.transposed:
        names = "qkv"
    elif found is not None and found["layer"] == "c_attn" and info.transposed:
        names = "kv" if found["block"] == "crossattention" else "qkv"
    if not names or outputs != len(names) * inputs:
        return None
    return FusedShape(tuple((name, inputs) for name in names), -1 if info.transposed else -2)
