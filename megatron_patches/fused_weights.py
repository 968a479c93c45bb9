"""This module says which of Megatron's weights hold several matrices, and how these lie in the uncut weight.

If tensor parallelism cuts a weight by rows, the whole is the shards one below the other. Attention is cut between (or
within) its groups of heads, so that the whole is what one rank would hold. State-space layers and gated units have all
their parts on every rank. If that is known of a weight, its whole has each part once, joined from the shards; otherwise
it repeats the parts once for each shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rankwise.routing.fused_shape import FusedShape

__all__ = ["fused_parts"]


@dataclass(frozen=True)
class _Weight:
    """A weight: its layer's parent module, rows of the whole, how often these repeat its parts, number of shards."""

    owner: object
    rows: int
    copies: int
    ways: int

    def number(self, name: str) -> int:
        """Return a size from the module or its config; 0 if there is none."""
        of_owner = getattr(self.owner, name, None)
        value = getattr(self.config, name, None) if of_owner is None else of_owner
        return value if isinstance(value, int) else 0

    @property
    def config(self) -> Any:
        return getattr(self.owner, "config", None)


def fused_parts(layer: str, owner: object, shape: tuple[int, ...], ways: int, strips: int) -> FusedShape | None:
    """Return the logical matrices of a weight; None if it is one, or its sizes contradict its config.

    Args:
        layer: Name of the layer in its module.
        owner: That module, or any object with its config.
        shape: Shape of the whole weight, or of a shard that counts as a matrix of its own.
        ways: Number of shards that the whole consists of, one below the other.
        strips: Number of sections of the whole that are cut so; several sections are parts of the weight.
    """
    layout = _LAYOUTS.get(layer)
    if layout is None or len(shape) != 2:
        return None
    parts = layout(_Weight(owner, shape[0], ways if strips == 1 else 1, ways))
    return parts if parts is not None and parts.length == shape[0] else None


def _attention(weight: _Weight) -> FusedShape | None:
    """Return, for each group, the queries that share a key, their output gates if there are any, key and value."""
    heads, groups, size = (
        weight.number("num_attention_heads"),
        weight.number("num_query_groups"),
        weight.number("kv_channels"),
    )
    groups = groups or heads
    if not heads or not size or heads % groups:
        return None
    shared = heads // groups
    gates = [("gate", shared * size)] if getattr(weight.config, "attention_output_gate", False) else []
    parts = (("q", shared * size), *gates, ("k", size), ("v", size))
    here, left = divmod(weight.rows, sum(rows for _, rows in parts))
    if left or groups % here:
        return None
    return FusedShape(parts, groups=here, heads=(shared,) * (1 + len(gates)) + (1, 1))


def _cross_attention(weight: _Weight) -> FusedShape | None:
    """Return, for each head, its key and value."""
    return _per_head(weight, ("k", weight.number("kv_channels")), ("v", weight.number("kv_channels")))


def _latent_up(weight: _Weight) -> FusedShape | None:
    """Return, for each head, its key without the rotary part, and its value."""
    return _per_head(weight, ("k", weight.number("qk_head_dim")), ("v", weight.number("v_head_dim")))


def _queries(weight: _Weight) -> FusedShape | None:
    """Return the queries of cross-attention, one head below the other."""
    return _one_part(weight, weight.number("kv_channels"))


def _latent_queries(weight: _Weight) -> FusedShape | None:
    """Return the queries of latent attention, each with its rotary part, one head below the other."""
    return _one_part(weight, weight.number("qk_head_dim") + weight.number("qk_pos_emb_head_dim"))


def _one_part(weight: _Weight, size: int) -> FusedShape | None:
    heads = weight.number("num_attention_heads")
    here, left = divmod(weight.rows, size) if size else (0, 1)
    return None if left or not here or heads % here else FusedShape((("q", weight.rows),), heads=(here,))


def _per_head(weight: _Weight, *parts: tuple[str, int]) -> FusedShape | None:
    if not all(size for _, size in parts) or weight.rows % sum(size for _, size in parts):
        return None
    here = weight.rows // sum(size for _, size in parts)
    heads = weight.number("num_attention_heads")
    return FusedShape(parts, groups=here, heads=(1,) * len(parts)) if heads and heads % here == 0 else None


def _latent_down(weight: _Weight) -> FusedShape | None:
    """Return the latent part that keys and values are made of, and the rotary part of the keys."""
    parts = ("kv", weight.number("kv_lora_rank")), ("k_rope", weight.number("qk_pos_emb_head_dim"))
    return FusedShape(parts) if all(size for _, size in parts) else None


def _gated(weight: _Weight) -> FusedShape | None:
    """Return gate and up projections."""
    if not getattr(weight.config, "gated_linear_unit", False):
        return None
    half, left = divmod(weight.rows, 2)
    names = ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
    inner = [size for size in map(weight.number, names) if size]
    # The weight may be a fraction of the whole: a shard that counts as a matrix of its own.
    if left or not half or half % weight.copies or not any(size % half == 0 for size in inner):
        return None
    return FusedShape((("gate", half // weight.copies), ("up", half // weight.copies)), groups=weight.copies)


def _projection(weight: _Weight) -> FusedShape | None:
    """Return the parts of the input projection of a state-space layer or a gated delta net, which share its name."""
    return _state_space(weight) if weight.number("d_inner_local_tp") else _delta_net(weight)


def _state_space(weight: _Weight) -> FusedShape | None:
    shards = weight.ways // weight.copies
    inner, groups = shards * weight.number("d_inner_local_tp"), shards * weight.number("ngroups_local_tp")
    heads, state = shards * weight.number("nheads_local_tp"), weight.number("d_state")
    if not (inner and groups and heads and state):
        return None
    parts = (("z", inner), ("x", inner), ("B", groups * state), ("C", groups * state), ("dt", heads))
    return FusedShape(parts, groups=weight.copies, heads=(heads, heads, groups, groups, 0))


def _delta_net(weight: _Weight) -> FusedShape | None:
    ways = weight.number("tp_size")
    sizes = [weight.number(name) for name in ("qk_dim", "v_dim", "num_key_heads", "num_value_heads")]
    if not ways or not all(sizes) or any(size % ways for size in sizes):
        return None
    shards = weight.ways // weight.copies
    queries, values, key_heads, value_heads = (size // ways * shards for size in sizes)
    parts = (
        ("q", queries),
        ("k", queries),
        ("v", values),
        ("gate", values),
        ("beta", value_heads),
        ("alpha", value_heads),
    )
    return FusedShape(parts, groups=weight.copies, heads=(key_heads, key_heads, value_heads, value_heads, 0, 0))


_LAYOUTS: dict[str, Callable[[_Weight], FusedShape | None]] = {
    "linear_qkv": _attention,
    "linear_q": _queries,
    "linear_q_proj": _latent_queries,
    "linear_q_up_proj": _latent_queries,
    "linear_kv": _cross_attention,
    "linear_kv_down_proj": _latent_down,
    "linear_kv_up_proj": _latent_up,
    "linear_fc1": _gated,
    "in_proj": _projection,
}
