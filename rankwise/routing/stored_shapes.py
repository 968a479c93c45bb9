"""Which weights are stored as (inputs, outputs), where only names and shapes are known."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rankwise.routing.roles import ParameterInfo, Role

__all__ = ["transposed_by_name"]

_GPT2 = re.compile(
    r"(?P<model>(?:.*\.)?)h\.\d+\.(?:attn|crossattention|mlp)\.(?P<layer>c_attn|q_attn|c_fc|c_proj)\.weight"
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
