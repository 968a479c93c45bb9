"""What parameters of a model of Transformer Engine's layers are called, and how they are cut, in one of Megatron's own.

Said here once more, and by name alone, so that the tests do not ask what they test.
"""

from __future__ import annotations

import re

from torch import nn

_INNER_NORMS = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}
_GROUPED = re.compile(r"experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
_CUT = {"linear_qkv": 0, "linear_q_proj": 0, "linear_q_up_proj": 0, "linear_kv_up_proj": 0, "linear_fc1": 0}
_CUT |= {"linear_proj": 1, "linear_fc2": 1}


def local_name(name: str) -> str:
    """The name that Megatron's own layers give a parameter of Transformer Engine's; other names stay."""
    for layer, norm in _INNER_NORMS.items():
        name = re.sub(rf"{re.escape(layer)}\.layer_norm_(weight|bias)$", rf"{norm}.\1", name)
    return _GROUPED.sub(r"experts.local_experts.\3.\1.\2", name)


def is_of_transformer_engine(model: nn.Module, name: str) -> bool:
    """Whether a parameter's module is one of Megatron's wrappers of Transformer Engine's linear layers."""
    return hasattr(model.get_submodule(name.rpartition(".")[0]), "te_return_bias")


def cut_by_name(model: nn.Module, name: str) -> tuple[int | None, int]:
    """Dimension along which tensor parallelism cuts such a parameter, and sections that are each cut."""
    path, _, local = name.rpartition(".")
    layer, kind = path.rpartition(".")[2], local.rstrip("0123456789")
    dim = _CUT.get(layer)
    if dim is None or kind not in ("weight", "bias") or (kind == "bias" and dim == 1):
        return None, 1
    return dim, 2 if layer == "linear_fc1" and model.config.gated_linear_unit else 1
