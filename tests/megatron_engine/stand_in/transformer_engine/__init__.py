"""STAND-IN, of the tests' own, for NVIDIA's Transformer Engine, which does not install without CUDA.

Constructors, attributes, marks on parameters, state dictionaries and where gradients appear follow its published
source (2.6 to 2.20); nothing is fused and nothing is quantized. Megatron's real wrappers run on top of it.
"""

from transformer_engine import common, pytorch

__version__ = "2.6.0"
__all__ = ["common", "pytorch"]
