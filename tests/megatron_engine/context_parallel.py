"""Context parallelism on CPU ranks: an attention of the tests' own, as Megatron's one for it needs Transformer Engine.

It gathers keys and values over the context-parallel group; all else of the model is Megatron's.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from gathered_attention import attention
from megatron.core import parallel_state as mpu
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

__all__ = ["GatheringAttention", "batch_of_this_rank", "with_gathering_attention"]


class GatheringAttention(MegatronModule):
    """Causal attention of this rank's queries to all ranks' keys and values."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """See :func:`gathered_attention.attention`."""
        return attention(query, key, value, self.softmax_scale, mpu.get_context_parallel_group())


def with_gathering_attention(layers: Any) -> Any:
    """A layer's spec, or those of several, with that attention in place of Megatron's."""
    for layer in getattr(layers, "layer_specs", [layers]):
        layer.submodules.self_attention.submodules.core_attention = GatheringAttention
    return layers


def batch_of_this_rank(**tensors: Tensor) -> dict[str, Tensor]:
    """This rank's tokens of (sequences, tokens) tensors."""
    # 0.20 asks whether samples are cut over different numbers of ranks.
    asked = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters else {}
    found: dict[str, Tensor] = get_batch_on_this_cp_rank(tensors, cp_group=mpu.get_context_parallel_group(), **asked)
    return found
