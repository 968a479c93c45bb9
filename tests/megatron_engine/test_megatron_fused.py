"""Which matrices Megatron's weights hold, uncut and cut: by a table, and by Megatron's own forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_rows import runs_of
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from ranks import run_ranks
from torch import Tensor, nn

from megatron_patches.cpu import cpu_megatron
from megatron_patches.fused_weights import fused_parts
from megatron_patches.groups import ParallelGroups
from megatron_patches.parameters import ModelParameter, describe_chunks
from rankwise.routing.fused_shape import FusedShape

# Four heads of eight share two keys; with them, the latent sizes of attention are all different.
WIDTH, INNER = 32, 24
_OFF = dict.fromkeys(
    ("bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion", "apply_rope_fusion"), False
)
SMALL: dict[str, Any] = {
    **{
        "num_layers": 1,
        "hidden_size": WIDTH,
        "ffn_hidden_size": INNER,
        "num_attention_heads": 4,
        "num_query_groups": 2,
    },
    **{"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False, "normalization": "RMSNorm"},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "gradient_accumulation_fusion": False, **_OFF},
}
LATENT: dict[str, Any] = {
    **{"multi_latent_attention": True, "num_query_groups": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_head_dim": 6},
    **{"qk_pos_emb_head_dim": 4, "v_head_dim": 8, "rope_type": "rope"},
}
MOE: dict[str, Any] = {
    **{"num_moe_experts": 2, "moe_ffn_hidden_size": INNER, "moe_token_dispatcher_type": "alltoall"},
    **{"moe_shared_expert_intermediate_size": 2 * INNER},
}
GROUPED = FusedShape((("q", 16), ("k", 8), ("v", 8)), groups=2, heads=(2, 1, 1))
GATES = FusedShape((("q", 16), ("gate", 16), ("k", 8), ("v", 8)), groups=2, heads=(2, 2, 1, 1))
HALVES = FusedShape((("gate", INNER), ("up", INNER)))
LATENTS = {
    "self_attention.linear_q_up_proj.weight": FusedShape((("q", 40),), heads=(4,)),
    "self_attention.linear_kv_down_proj.weight": FusedShape((("kv", 10), ("k_rope", 4))),
    "self_attention.linear_kv_up_proj.weight": FusedShape((("k", 6), ("v", 8)), groups=4, heads=(1, 1)),
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, FusedShape]]] = {
    "groups": ({}, {"self_attention.linear_qkv.weight": GROUPED, "mlp.linear_fc1.weight": HALVES}),
    "one group": (
        {"num_query_groups": 1, "gated_linear_unit": False},
        {"self_attention.linear_qkv.weight": FusedShape((("q", 32), ("k", 8), ("v", 8)), heads=(4, 1, 1))},
    ),
    "output gates": (
        {"attention_output_gate": True},
        {"self_attention.linear_qkv.weight": GATES, "mlp.linear_fc1.weight": HALVES},
    ),
    "latent": (LATENT, {**LATENTS, "mlp.linear_fc1.weight": HALVES}),
    "experts": (
        MOE,
        {
            "self_attention.linear_qkv.weight": GROUPED,
            "mlp.experts.local_experts.0.linear_fc1.weight": HALVES,
            "mlp.experts.local_experts.1.linear_fc1.weight": HALVES,
            "mlp.shared_experts.linear_fc1.weight": FusedShape((("gate", 2 * INNER), ("up", 2 * INNER))),
        },
    ),
}
PREFIX = "decoder.layers.0."


class _NoCore(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()


@contextmanager
def built(
    changed: dict[str, Any], ways: int, blocks: bool = False
) -> Iterator[tuple[nn.Module, dict[str, ModelParameter]]]:
    """A model on this rank, and what is known of its parameters, by their names."""
    mpu.initialize_model_parallel(tensor_model_parallel_size=ways)
    try:
        model_parallel_cuda_manual_seed(1)
        latent = "kv_lora_rank" in changed
        config = (MLATransformerConfig if latent else TransformerConfig)(
            **{**SMALL, **changed, "tensor_model_parallel_size": ways}
        )
        spec = get_gpt_layer_local_spec(
            num_experts=changed.get("num_moe_experts"), multi_latent_attention=latent, normalization="RMSNorm"
        )
        if latent:  # The only core attention there is without Transformer Engine is not made for it, and not asked.
            spec.submodules.self_attention.submodules.core_attention = _NoCore
            multi_latent_attention.TELinear = _NoCore
        model = GPTModel(config, spec, vocab_size=64, max_sequence_length=8, position_embedding_type="rope")
        found = describe_chunks([model], ParallelGroups(blocks=blocks))
        yield model.decoder.layers[0], {name: found[weight] for name, weight in model.named_parameters()}
    finally:
        mpu.destroy_model_parallel()


@torch.no_grad()
def emptied(weight: Tensor, described: ModelParameter, part: str) -> None:
    """Set the rows of a block to zero, as far as this rank has them."""
    fused, width = described.info.fused, weight.shape[1]
    assert fused is not None
    wanted = {row for start, end in runs_of(fused, part) for row in range(start, end)}
    for piece in described.slices(0, weight.numel(), 0):
        for row in range((piece.end - piece.start) // width):
            if piece.start // width + row in wanted:
                weight[piece.offset // width + row].zero_()


def attention_of(layer: nn.Module) -> dict[str, Tensor]:
    hidden = torch.sin(torch.arange(6.0 * WIDTH)).view(6, 1, WIDTH)
    attention = layer.self_attention
    if attention.config.multi_latent_attention:
        query, key, value, *_ = attention.get_query_key_value_tensors(hidden, position_ids=torch.arange(6)[None])
        return {"q": query, "k": key[..., :6], "k_rope": key[..., 6:], "v": value}
    names = ("q", "k", "v", "gate") if attention.config.attention_output_gate else ("q", "k", "v")
    gated = {"output_gate": True} if len(names) == 4 else {}
    return dict(zip(names, attention.get_query_key_value_tensors(hidden, **gated), strict=True))


def empty_parts(
    read: Callable[[], dict[str, Tensor]], weight: Tensor, described: ModelParameter
) -> dict[str, list[str]]:
    """What the forward pass finds empty once a block is, for every block."""
    found = {}
    assert described.info.fused is not None
    for part, _ in described.info.fused.parts:
        kept = weight.detach().clone()
        emptied(weight, described, part)
        with torch.no_grad():
            found[part] = sorted(name for name, value in read().items() if not value.any())
            weight.copy_(kept)
    return found


def feed_forward_of(mlp: nn.Module) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}

    def watched(gate: Tensor) -> Tensor:
        seen["gate"] = gate.clone()
        return F.silu(gate)

    mlp.config.activation_func = watched
    seen["output"] = mlp(torch.sin(torch.arange(6.0 * WIDTH)).view(6, 1, WIDTH))[0]
    return seen


def _checked(rank: int, world: int) -> None:
    with cpu_megatron():
        for label, (changed, table) in MODELS.items():
            with built(changed, world) as (layer, described):
                found = {name: each.info.fused for name, each in described.items() if each.info.fused is not None}
                assert found == {PREFIX + name: fused for name, fused in table.items()}, (label, world)
                if changed.get("num_query_groups", 2) < world:
                    continue
                weights = {PREFIX + name: weight for name, weight in layer.named_parameters()}
                for name in found:
                    _read(label, layer, name, weights[name], described[name])


def _read(label: str, layer: nn.Module, name: str, weight: Tensor, described: ModelParameter) -> None:
    if "linear_fc1" in name and "experts" not in name:
        empty = empty_parts(lambda: feed_forward_of(layer.mlp), weight, described)
        assert empty == {"gate": ["gate", "output"], "up": ["output"]}, label
    elif "kv_down" in name:
        empty = empty_parts(lambda: attention_of(layer), weight, described)
        assert empty == {"kv": ["k", "v"], "k_rope": ["k_rope"]}, label
    elif "linear_fc1" not in name:
        empty = empty_parts(lambda: attention_of(layer), weight, described)
        assert described.info.fused is not None
        assert empty == {part: [part] for part, _ in described.info.fused.parts}, label


@pytest.mark.parametrize("world", [1, 2])
def test_what_megatron_reads(world: int) -> None:
    run_ranks(world, _checked)


def _shards(rank: int, world: int) -> dict[str, FusedShape]:
    with cpu_megatron(), built({}, world, blocks=True) as (_, described):
        return {name: each.info.fused for name, each in described.items() if each.info.fused is not None}


def test_shards_that_are_matrices_of_their_own() -> None:
    half = FusedShape(GROUPED.parts, groups=1, heads=GROUPED.heads)
    gated = FusedShape((("gate", INNER // 2), ("up", INNER // 2)))
    table = {"self_attention.linear_qkv.weight": half, "mlp.linear_fc1.weight": gated}
    assert run_ranks(2, _shards) == [{PREFIX + name: fused for name, fused in table.items()}] * 2


def owner(**values: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=8, **values))


def test_layers_that_cannot_be_built_here() -> None:
    mixer = SimpleNamespace(config=None, d_inner_local_tp=8, ngroups_local_tp=1, nheads_local_tp=2, d_state=3)
    parts = (("z", 8), ("x", 8), ("B", 3), ("C", 3), ("dt", 2))
    assert fused_parts("in_proj", mixer, (48, 4), 2, 1) == FusedShape(parts, groups=2, heads=(2, 2, 1, 1, 0))
    delta = SimpleNamespace(config=None, qk_dim=8, v_dim=16, num_key_heads=2, num_value_heads=4, tp_size=2)
    parts = (("q", 4), ("k", 4), ("v", 8), ("gate", 8), ("beta", 2), ("alpha", 2))
    assert fused_parts("in_proj", delta, (56, 4), 2, 1) == FusedShape(parts, groups=2, heads=(1, 1, 2, 2, 0, 0))
    both = FusedShape((("k", 8), ("v", 8)), groups=4, heads=(1, 1))
    assert fused_parts("linear_kv", owner(), (64, 4), 2, 1) == both
    # Halves that Megatron does not mark: every rank has both.
    glu = owner(gated_linear_unit=True, ffn_hidden_size=12)
    assert fused_parts("linear_fc1", glu, (24, 4), 2, 1) == FusedShape((("gate", 6), ("up", 6)), groups=2)
    assert fused_parts("linear_fc1", glu, (24, 4), 2, 2) == FusedShape((("gate", 12), ("up", 12)))


@pytest.mark.parametrize(
    ("layer", "rows"),
    [
        ("linear_qkv", 63),
        ("linear_qkv", 96),
        ("linear_qkv", 16),
        ("linear_fc1", 26),
        ("linear_kv", 60),
        ("in_proj", 64),
    ],
)
def test_sizes_that_do_not_fit_are_not_guessed(layer: str, rows: int) -> None:
    sizes = {"gated_linear_unit": True, "ffn_hidden_size": 12, "kv_lora_rank": 10, "qk_pos_emb_head_dim": 4}
    assert fused_parts(layer, owner(**sizes), (rows, 4), 1, 1) is None
    mixer = SimpleNamespace(config=None, d_inner_local_tp=8, ngroups_local_tp=1, nheads_local_tp=2, d_state=3)
    assert fused_parts("in_proj", mixer, (25, 4), 1, 1) is None
