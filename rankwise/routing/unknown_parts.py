"""Tells of weights that look fused by their names, where nobody has said how their matrices lie."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatch

from rankwise.routing.fused_layers import looks_fused
from rankwise.routing.roles import ParameterInfo, Role

__all__ = ["unknown_parts"]


def unknown_parts(owner: str, infos: Iterable[ParameterInfo], said: Collection[str]) -> list[str]:
    """A line for every layer name that looks fused and whose weights are taken for one matrix.

    Args:
        owner: Name of the optimizer.
        infos: Weights whose logical matrices would be matrices to its rule.
        said: Patterns of the option ``blocks``: the user has decided about these.
    """
    weights_of: dict[str, list[ParameterInfo]] = {}
    for info in infos:
        if info.fused is None and looks_fused(info.own_name, info.shape, info.role):
            if not any(fnmatch(info.own_name, pattern) for pattern in said):
                weights_of.setdefault(_layer(info.own_name), []).append(info)
    return [_line(owner, layer, weights) for layer, weights in weights_of.items()]


def _layer(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _line(owner: str, layer: str, weights: list[ParameterInfo]) -> str:
    first, further = weights[0], len(weights) - 1
    which = first.own_name if not further else f"{first.own_name} and {further} more"
    shape = "x".join(map(str, first.shape))
    # Roles come from modules, so an unknown one means that the modules were never shown.
    unseen = (
        "rankwise.annotate(model) before the optimizer is built may tell, or " if first.role is Role.UNKNOWN else ""
    )
    return (
        f"rankwise {owner}: by its name {which} ({shape}) holds several matrices, and how they lie is not known: it is "
        f'taken for one. {unseen}"blocks": {{"*{layer}*": "qkv"}} or the sizes of its parts say it; "none" keeps it so.'
    )
