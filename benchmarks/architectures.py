"""What routing is to find in models of many kinds, by hand: which weights are one matrix, several, or none.

Every architecture is a tiny model with random weights. The table is checked against what is found without any
configuration (``tests/routing/test_architectures.py``), and ``docs/routing.md`` is written from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from benchmarks import foreign_attention as foreign
from rankwise.routing.fused_shape import FusedShape

__all__ = ["ARCHITECTURES", "Architecture"]


@dataclass(frozen=True)
class Architecture:
    """A kind of model, and where its weights of two and more dimensions go under a rule for matrices.

    Attributes:
        build: A tiny model of it.
        blocks: Weights that hold several matrices, by pattern.
        whole: Patterns of weights that are one matrix, or a stack of such.
        fallback: Patterns of weights that are none: embeddings, heads, routers, convolutions.
        heads: Weights that are one matrix, or one for each head with ``split_heads``, by pattern.
    """

    build: Callable[[], nn.Module]
    blocks: Mapping[str, FusedShape]
    whole: tuple[str, ...] = ()
    fallback: tuple[str, ...] = field(default=("*embed*", "*lm_head.*"))
    heads: Mapping[str, FusedShape] = field(default_factory=dict)


def hf(kind: str, **values: Any) -> Callable[[], nn.Module]:
    """A model of the transformers library with random weights."""

    def build() -> nn.Module:
        import transformers

        model: nn.Module = getattr(transformers, kind)
        config = model.config_class  # type: ignore[assignment]
        return model(config(**values))  # type: ignore[operator]

    return build


# Four heads of eight; two of keys, where these are fewer.
_SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
_PLAIN = {**_SMALL, "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SHARED = {**_PLAIN, "num_key_value_heads": 2}
_OLD = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
_MOE = {**_SHARED, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    **_PLAIN,
    **{"num_hidden_layers": 2, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4},
    **{"qk_nope_head_dim": 6, "v_head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1},
    **{"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8},
}

EQUAL = FusedShape((("q", 32), ("k", 32), ("v", 32)), heads=(4, 4, 4))
FEWER = FusedShape((("q", 32), ("k", 16), ("v", 16)), heads=(4, 2, 2))
SINGLE = FusedShape((("q", 32), ("k", 8), ("v", 8)), heads=(4, 1, 1))
PER_HEAD = FusedShape((("q", 8), ("k", 8), ("v", 8)), groups=4, heads=(1, 1, 1))
GROUPED = FusedShape((("q", 16), ("k", 8), ("v", 8)), groups=2, heads=(2, 1, 1))


def gated(size: int, **how: Any) -> FusedShape:
    """Gate and up projections."""
    return FusedShape((("gate", size), ("up", size)), **how)


def alone(*names: str, fewer: int = 4, size: int = 8, dim: int = -2) -> dict[str, FusedShape]:
    """Layers of queries, keys and values of their own; keys and values may have fewer heads."""
    counts = dict(zip("qkv", (4, fewer, fewer), strict=True))
    return {
        f"*.{name}.weight": FusedShape(((part, counts[part] * size),), dim, heads=(counts[part],))
        for part, name in zip("qkv", names, strict=False)
    }


_APART = alone("q_proj", "k_proj", "v_proj")
_SHARE = alone("q_proj", "k_proj", "v_proj", fewer=2)
_QKV_APART = ("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight", "*.o_proj.weight")
_MLP_APART = ("*.gate_proj.weight", "*.up_proj.weight", "*.down_proj.weight")
_DENSE = ("*.dense.weight", "*.dense_h_to_4h.weight", "*.dense_4h_to_h.weight")
_GPT2 = ("*.c_proj.weight", "*.c_fc.weight")
_HEADS = ("*embed*", "*lm_head.*")
_TABLES = ("*wte.weight", "*wpe.weight")
_ROUTED = (*_HEADS, "*.gate.weight")
_MLA = {
    "*.kv_a_proj_with_mqa.weight": FusedShape((("kv", 8), ("k_rope", 4))),
    "*.kv_b_proj.weight": FusedShape((("k", 6), ("v", 8)), groups=4, heads=(1, 1)),
    "*.experts.gate_up_proj": gated(16),
}
_MLA_WHOLE = ("*.q_a_proj.weight", "*.q_b_proj.weight", "*.o_proj.weight", *_MLP_APART, "*.experts.down_proj")
_BERT = ("*.query.weight", "*.key.weight", "*.value.weight", "*dense.weight")

ARCHITECTURES: dict[str, Architecture] = {
    "GPT-2": Architecture(
        hf("GPT2LMHeadModel", **_OLD, add_cross_attention=True),
        {
            "*.attn.c_attn.weight": FusedShape(EQUAL.parts, dim=-1, heads=EQUAL.heads),
            "*.crossattention.c_attn.weight": FusedShape((("k", 32), ("v", 32)), dim=-1, heads=(4, 4)),
        },
        (*_GPT2, "*.q_attn.weight"),
        _TABLES,
        heads=alone("q_attn", dim=-1),
    ),
    "nanoGPT": Architecture(foreign.nano_gpt, {"*.c_attn.weight": EQUAL}, ("*.c_proj.weight",), ()),
    "GPT-NeoX, Pythia": Architecture(
        hf("GPTNeoXForCausalLM", **_PLAIN), {"*.query_key_value.weight": PER_HEAD}, _DENSE
    ),
    "GPT-J": Architecture(
        hf("GPTJForCausalLM", **_OLD, rotary_dim=4),
        {},
        (*_QKV_APART[:3], "*.out_proj.weight", "*.fc_in.weight", "*.fc_out.weight"),
        ("*wte.weight", "*lm_head.*"),
        heads=_APART,
    ),
    "CodeGen": Architecture(
        hf("CodeGenForCausalLM", **{**_OLD, "n_head": 8}, rotary_dim=2),
        {"*.qkv_proj.weight": FusedShape((("q", 8), ("v", 8), ("k", 8)), groups=4, heads=(2, 2, 2))},
        ("*.out_proj.weight", "*.fc_in.weight", "*.fc_out.weight"),
        ("*wte.weight", "*lm_head.*"),
    ),
    "GPT-BigCode, StarCoder": Architecture(
        hf("GPTBigCodeForCausalLM", **_OLD, multi_query=True), {"*.c_attn.weight": SINGLE}, _GPT2, _TABLES
    ),
    "GPT-BigCode without multi-query": Architecture(
        hf("GPTBigCodeForCausalLM", **_OLD, multi_query=False), {"*.c_attn.weight": PER_HEAD}, _GPT2, _TABLES
    ),
    "Llama, Mistral": Architecture(hf("LlamaForCausalLM", **_SHARED), {}, (*_QKV_APART, *_MLP_APART), heads=_SHARE),
    "Llama, Qwen with fused projections": Architecture(
        foreign.fused_llama,
        {"*.qkv_proj.weight": FEWER, "*.gate_up_proj.weight": gated(48)},
        ("*.o_proj.weight", "*.down_proj.weight"),
        (),
    ),
    "Qwen (first)": Architecture(foreign.qwen, {"*.c_attn.weight": EQUAL}, ("*.c_proj.weight",), ()),
    "Qwen 2, Qwen 3": Architecture(
        hf("Qwen3ForCausalLM", **_SHARED, head_dim=8), {}, (*_QKV_APART, *_MLP_APART), heads=_SHARE
    ),
    "Phi-3, Phi-4": Architecture(
        hf("Phi3ForCausalLM", **_SHARED),
        {"*.qkv_proj.weight": FEWER, "*.gate_up_proj.weight": gated(48)},
        ("*.o_proj.weight", "*.down_proj.weight"),
    ),
    "GLM-4": Architecture(
        hf("Glm4ForCausalLM", **_SHARED, head_dim=8),
        {"*.gate_up_proj.weight": gated(48)},
        (*_QKV_APART, "*.down_proj.weight"),
        heads=_SHARE,
    ),
    "ChatGLM 2, 3": Architecture(foreign.chat_glm, {"*.query_key_value.weight": FEWER}, ("*.dense.weight",), ()),
    "Baichuan": Architecture(foreign.baichuan, {"*.W_pack.weight": EQUAL}, ("*.o_proj.weight",), ()),
    "InternLM 2": Architecture(foreign.intern_lm, {"*.wqkv.weight": GROUPED}, ("*.wo.weight",), ()),
    "Falcon 7B": Architecture(
        hf("FalconForCausalLM", **_SMALL, multi_query=True, new_decoder_architecture=False),
        {"*.query_key_value.weight": SINGLE},
        _DENSE,
    ),
    "Falcon 40B, 180B": Architecture(
        hf("FalconForCausalLM", **_SMALL, num_kv_heads=2, new_decoder_architecture=True),
        {"*.query_key_value.weight": GROUPED},
        _DENSE,
    ),
    "Falcon RW": Architecture(
        hf("FalconForCausalLM", **_SMALL, multi_query=False, new_decoder_architecture=False, alibi=True),
        {"*.query_key_value.weight": PER_HEAD},
        _DENSE,
    ),
    "MPT": Architecture(
        hf("MptForCausalLM", d_model=32, n_heads=4, n_layers=1, vocab_size=64, expansion_ratio=2),
        {"*.Wqkv.weight": EQUAL},
        ("*.out_proj.weight", "*.up_proj.weight", "*.down_proj.weight"),
        ("*wte.weight",),
    ),
    "BLOOM": Architecture(
        hf("BloomForCausalLM", hidden_size=32, n_layer=1, n_head=4, vocab_size=64),
        {"*.query_key_value.weight": PER_HEAD},
        _DENSE,
    ),
    "Persimmon": Architecture(hf("PersimmonForCausalLM", **_PLAIN), {"*.query_key_value.weight": PER_HEAD}, _DENSE),
    "StableLM": Architecture(hf("StableLmForCausalLM", **_SHARED), {}, (*_QKV_APART, *_MLP_APART), heads=_SHARE),
    "OLMo": Architecture(hf("OlmoForCausalLM", **_SHARED), {}, (*_QKV_APART, *_MLP_APART), heads=_SHARE),
    "Nemotron": Architecture(hf("NemotronForCausalLM", **_SHARED), {}, (*_QKV_APART, *_MLP_APART[1:]), heads=_SHARE),
    "DBRX": Architecture(
        hf(
            "DbrxForCausalLM",
            **{"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 64},
            attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        ),
        {
            "*.Wqkv.weight": FEWER,
            **{
                f"*.mlp.{name}": FusedShape(tuple((f"expert{index}", 16) for index in range(4)))
                for name in ("w1", "v1", "w2")
            },
        },
        ("*.out_proj.weight",),
        ("*wte.weight", "*lm_head.*", "*.router.*"),
    ),
    "Mixtral": Architecture(
        hf("MixtralForCausalLM", **_SHARED, num_local_experts=4),
        {"*.experts.gate_up_proj": gated(48)},
        (*_QKV_APART, "*.experts.down_proj"),
        _ROUTED,
        heads=_SHARE,
    ),
    "Qwen 2 MoE": Architecture(
        hf("Qwen2MoeForCausalLM", **_MOE, num_experts=4, shared_expert_intermediate_size=16),
        {"*.experts.gate_up_proj": gated(16)},
        (*_QKV_APART, *_MLP_APART, "*.experts.down_proj"),
        (*_ROUTED, "*.shared_expert_gate.weight"),
        heads=_SHARE,
    ),
    "Qwen 3 MoE": Architecture(
        hf("Qwen3MoeForCausalLM", **_MOE, num_experts=4, head_dim=8),
        {"*.experts.gate_up_proj": gated(16)},
        (*_QKV_APART, "*.experts.down_proj"),
        _ROUTED,
        heads=_SHARE,
    ),
    "Qwen 3 Next": Architecture(
        hf("Qwen3NextForCausalLM", **{**_MOE, **_DELTA}, num_experts=4, shared_expert_intermediate_size=16),
        {
            "*.in_proj_qkvz.weight": FusedShape(
                (("q", 8), ("k", 8), ("v", 16), ("z", 16)), groups=2, heads=(1, 1, 2, 2)
            ),
            "*.in_proj_ba.weight": FusedShape((("b", 2), ("a", 2)), groups=2),
            "*.q_proj.weight": FusedShape((("q", 8), ("gate", 8)), groups=4, heads=(1, 1)),
            "*.experts.gate_up_proj": gated(16),
        },
        (*_QKV_APART[1:], "*.out_proj.weight", *_MLP_APART, "*.experts.down_proj"),
        (*_ROUTED, "*.shared_expert_gate.weight", "*.conv1d.weight"),
        heads=_SHARE,
    ),
    "Qwen 3.5": Architecture(
        hf("Qwen3_5ForCausalLM", **{**_SHARED, **_DELTA}),
        {
            "*.in_proj_qkv.weight": FusedShape((("q", 16), ("k", 16), ("v", 32)), heads=(2, 2, 4)),
            "*.q_proj.weight": FusedShape((("q", 8), ("gate", 8)), groups=4, heads=(1, 1)),
        },
        (*_QKV_APART[1:], "*.in_proj_[zab].weight", "*.out_proj.weight", *_MLP_APART),
        (*_HEADS, "*.conv1d.weight"),
        heads=_SHARE,
    ),
    "gpt-oss": Architecture(
        hf("GptOssForCausalLM", **_SHARED, num_local_experts=4, num_experts_per_tok=2, head_dim=8),
        {"*.experts.gate_up_proj": gated(1, dim=-1, groups=48)},
        (*_QKV_APART, "*.experts.down_proj"),
        (*_HEADS, "*.router.weight", "*_bias"),
        heads=_SHARE,
    ),
    "Llama 4": Architecture(
        hf(
            "Llama4ForCausalLM",
            **_SHARED,
            **{"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1},
        ),
        {"*.experts.gate_up_proj": gated(48, dim=-1)},
        (*_QKV_APART, *_MLP_APART, "*.experts.down_proj"),
        (*_HEADS, "*.router.weight"),
        heads=_SHARE,
    ),
    "DeepSeek-V2": Architecture(
        hf("DeepseekV2ForCausalLM", **_LATENT), _MLA, _MLA_WHOLE, _ROUTED, heads=alone("q_b_proj", size=10)
    ),
    "DeepSeek-V3, Kimi K2": Architecture(
        hf("DeepseekV3ForCausalLM", **_LATENT), _MLA, _MLA_WHOLE, _ROUTED, heads=alone("q_b_proj", size=10)
    ),
    "Mamba": Architecture(
        hf("MambaForCausalLM", vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4),
        {"*.in_proj.weight": FusedShape((("x", 64), ("z", 64)))},
        ("*.x_proj.weight", "*.dt_proj.weight", "*.out_proj.weight"),
        (*_HEADS, "*.A_log", "*.conv1d.weight"),
    ),
    "Mamba 2": Architecture(
        hf(
            "Mamba2ForCausalLM",
            **{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4},
            **{"num_heads": 8, "head_dim": 8, "n_groups": 2, "expand": 2},
        ),
        {"*.in_proj.weight": FusedShape((("z", 64), ("x", 64), ("B", 8), ("C", 8), ("dt", 8)), heads=(8, 8, 2, 2, 0))},
        ("*.out_proj.weight",),
        (*_HEADS, "*.conv1d.weight"),
    ),
    "LFM 2": Architecture(
        hf("Lfm2ForCausalLM", **{**_SHARED, "num_hidden_layers": 2}, layer_types=["conv", "full_attention"]),
        {"*.conv.in_proj.weight": FusedShape((("B", 32), ("C", 32), ("x", 32)))},
        (*_QKV_APART[:3], "*.out_proj.weight", "*.w[123].weight"),
        (*_HEADS, "*.conv.conv.weight"),
        heads=_SHARE,
    ),
    "BERT": Architecture(hf("BertForMaskedLM", **_PLAIN), {}, _BERT, heads=alone("query", "key", "value")),
    "ModernBERT": Architecture(
        hf("ModernBertForMaskedLM", **_PLAIN),
        {"*.Wqkv.weight": EQUAL, "*.Wi.weight": gated(48)},
        ("*.Wo.weight", "*dense.weight"),
    ),
    "DeBERTa": Architecture(
        hf("DebertaModel", **_PLAIN), {"*.in_proj.weight": PER_HEAD}, ("*dense.weight",), ("*embed*",)
    ),
    "T5": Architecture(
        hf("T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64),
        {},
        ("*.[qkvo].weight", "*.w[io].weight"),
        ("shared.weight", "*relative_attention_bias*"),
        heads=alone("q", "k", "v"),
    ),
    "ViT of transformers": Architecture(
        hf("ViTModel", **{**_PLAIN, "image_size": 8, "patch_size": 4}),
        {},
        ("*.[qkvo]_proj.weight", "*.fc[12].weight", "*dense.weight"),
        ("*embed*",),
        heads=_APART,
    ),
    "ViT of timm": Architecture(foreign.vision, {"*.qkv.weight": EQUAL}, ("*.proj.weight",), ()),
    "SAM": Architecture(
        hf(
            "SamVisionModel",
            **{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16},
            **{"patch_size": 4, "output_channels": 8, "mlp_dim": 48, "global_attn_indexes": [0]},
        ),
        {"*.qkv.weight": EQUAL},
        ("*.proj.weight", "*.lin[12].weight"),
        ("*embed*", "*rel_pos_[hw]", "*.neck.*"),
    ),
    "torch.nn.MultiheadAttention": Architecture(
        lambda: nn.TransformerEncoderLayer(32, 4, 48),
        {"*.in_proj_weight": EQUAL},
        ("*.out_proj.weight", "linear[12].weight"),
        (),
    ),
}
