"""STAND-IN: attention, unfused; keys and values of context-parallel ranks are gathered."""

from __future__ import annotations

from typing import Any

from gathered_attention import attention
from torch import Tensor

from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


class DotProductAttention(TransformerEngineBaseModule):
    """Causal attention of (tokens, sequences, heads, width); has no parameters, but a state of its own in 8 bits."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        super().__init__()
        assert attn_mask_type == "causal" and attention_dropout == 0.0
        width = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = softmax_scale or width**-0.5
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type
        self.register_load_state_dict_post_hook(_forgive)

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Any = None, **_: Any
    ) -> Tensor:
        """One head after the other in the last dimension."""
        return attention(query_layer, key_layer, value_layer, self.softmax_scale, self.cp_group)


def _forgive(module: Any, incompatible: Any) -> None:
    """Checkpoints of earlier versions have no state of attention."""
    for key in [key for key in incompatible.missing_keys if "core_attention._extra_state" in key]:
        incompatible.missing_keys.remove(key)
