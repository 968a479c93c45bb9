"""Attention of models whose code comes with their weights: classes, names and attributes as published, written anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

__all__ = ["baichuan", "chat_glm", "fused_llama", "intern_lm", "nano_gpt", "qwen", "vision"]

WIDTH, HEADS, KEY_HEADS, INNER = 32, 4, 2, 48


def _of_class(name: str, layers: dict[str, nn.Module], **attributes: Any) -> nn.Module:
    """A module of a class of this name."""
    module: nn.Module = type(name, (nn.Module,), {})()
    for local, layer in layers.items():
        module.add_module(local, layer)
    for local, value in attributes.items():
        setattr(module, local, value)
    return module


def _linear(outputs: int) -> nn.Linear:
    return nn.Linear(WIDTH, outputs, bias=False)


def _attention(kind: str, fused: str, outputs: int, last: str, **attributes: Any) -> nn.Module:
    layers: dict[str, nn.Module] = {fused: _linear(outputs), last: _linear(WIDTH)}
    return nn.ModuleDict({"attn": _of_class(kind, layers, **attributes)})


def nano_gpt() -> nn.Module:
    """Karpathy's: queries, keys, values."""
    return _attention("CausalSelfAttention", "c_attn", 3 * WIDTH, "c_proj", n_head=HEADS, n_embd=WIDTH)


def qwen() -> nn.Module:
    """The first Qwen: queries, keys, values."""
    return _attention("QWenAttention", "c_attn", 3 * WIDTH, "c_proj", num_heads=HEADS, head_dim=WIDTH // HEADS)


def baichuan() -> nn.Module:
    """Queries, keys, values."""
    return _attention("Attention", "W_pack", 3 * WIDTH, "o_proj", num_heads=HEADS, head_dim=WIDTH // HEADS)


def chat_glm() -> nn.Module:
    """Since its second version: queries, keys, values; fewer heads of these."""
    return _attention(
        "SelfAttention",
        "query_key_value",
        WIDTH + 2 * KEY_HEADS * WIDTH // HEADS,
        "dense",
        multi_query_attention=True,
        num_attention_heads_per_partition=HEADS,
        num_multi_query_groups_per_partition=KEY_HEADS,
        hidden_size_per_attention_head=WIDTH // HEADS,
    )


def intern_lm() -> nn.Module:
    """The second InternLM: for each head of keys its queries, it, its values."""
    outputs = WIDTH + 2 * KEY_HEADS * WIDTH // HEADS
    sizes = {"num_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": WIDTH // HEADS}
    return _attention("InternLM2FlashAttention2", "wqkv", outputs, "wo", **sizes)


def vision() -> nn.Module:
    """That of timm: queries, keys, values."""
    return _attention("Attention", "qkv", 3 * WIDTH, "proj", num_heads=HEADS, head_dim=WIDTH // HEADS)


def fused_llama() -> nn.Module:
    """Llama's layers as inference engines join them."""
    config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, hidden_size=WIDTH)
    size = WIDTH // HEADS
    attention = {"qkv_proj": _linear(WIDTH + 2 * KEY_HEADS * size), "o_proj": _linear(WIDTH)}
    layer = nn.ModuleDict(
        {
            "self_attn": _of_class("LlamaAttention", {**attention}, config=config, head_dim=size),
            "mlp": _of_class("LlamaMLP", {"gate_up_proj": _linear(2 * INNER), "down_proj": nn.Linear(INNER, WIDTH)}),
        }
    )
    return nn.ModuleDict({"layers": nn.ModuleList([layer])})
