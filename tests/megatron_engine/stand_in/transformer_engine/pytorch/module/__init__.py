"""STAND-IN: layers."""

from transformer_engine.pytorch.module.grouped_linear import GroupedLinear
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.norms import LayerNorm, RMSNorm

__all__ = ["GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm"]
