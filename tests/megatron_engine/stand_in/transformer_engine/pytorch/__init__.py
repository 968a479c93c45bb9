"""STAND-IN: Transformer Engine's layers for PyTorch."""

from transformer_engine.pytorch import distributed, module, ops, optimizers
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.module import GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm
from transformer_engine.pytorch.padding import Fp8Padding, Fp8Unpadding

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8_autocast",
    "fp8_model_init",
    "module",
    "ops",
    "optimizers",
]
