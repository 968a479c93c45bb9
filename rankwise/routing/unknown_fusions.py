"""What is said of weights that are called as if they held several matrices, where nobody knows how these lie."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatch

from rankwise.routing.fused_layers import looks_fused
from rankwise.routing.roles import ParameterInfo, Role

__all__ = ["unknown_parts"]


def unknown_parts(owner: str, infos: Iterable[ParameterInfo], said: Collection[str]) -> list[str]:
    """A line for every name of a layer that looks fused and is taken for one matrix.

    Args:
        owner: The optimizer.
        infos: Weights whose logical matrices would be matrices to its rule.
        said: Patterns of the option ``blocks``: what the user has decided is not asked again.
    """
    found: dict[str, list[ParameterInfo]] = {}
    for info in infos:
        if info.fused is None and looks_fused(info.own_name, info.shape, info.role):
            if not any(fnmatch(info.own_name, pattern) for pattern in said):
                found.setdefault(_layer(info.own_name), []).append(info)
    return [_line(owner, layer, weights) for layer, weights in found.items()]


def _layer(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _line(owner: str, layer: str, weights: list[ParameterInfo]) -> str:
    first, others = weights[0], len(weights) - 1
    which = first.own_name if not others else f"{first.own_name} and {others} more"
    shape = "x".join(map(str, first.shape))
    # Roles come from modules: without one, nobody has shown them.
    unseen = (
        "rankwise.annotate(model) before the optimizer is built may tell, or " if first.role is Role.UNKNOWN else ""
    )
    return (
        f"rankwise {owner}: by its name {which} ({shape}) holds several matrices, and how they lie is not known: it is "
        f'taken for one. {unseen}"blocks": {{"*{layer}*": "qkv"}} or the sizes of its parts say it; "none" keeps it so.'
    )
