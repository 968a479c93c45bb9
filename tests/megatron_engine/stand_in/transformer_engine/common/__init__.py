"""STAND-IN: the part of Transformer Engine that knows no framework."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
