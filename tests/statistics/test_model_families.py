"""Routes of the parameters of models as Hugging Face builds them: by module type, and by name and shape alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rankwise.routing.roles import ParameterInfo, RoutingPolicy, describe, route

transformers = pytest.importorskip("transformers")
MATRICES = RoutingPolicy(embeddings=False)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
LM = {**SMALL, "vocab_size": 64}
GROUPED = {**LM, "num_key_value_heads": 2, "tie_word_embeddings": False}
LATENT = {
    **LM,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
SHARED_EXPERT = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WHISPER = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 64,
    "num_mel_bins": 8,
    **{f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "decoder_start")},
}
EMBEDDING, HEAD, ROUTER, VECTOR, CONV = "embedding", "head", "router", "vector", "convolution"

# Of each family: the model's class, its config, and what of it takes no matrix rule, by name pattern, with the reason
# by module type. A tied embedding is the head.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "GPT2": (
        "LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
        {"wte": HEAD, "wpe": EMBEDDING},
    ),
    "Llama": ("ForCausalLM", GROUPED, {"embed_tokens": EMBEDDING, "lm_head": HEAD}),
    "Mixtral": (
        "ForCausalLM",
        {**GROUPED, "num_local_experts": 4},
        {"embed_tokens": EMBEDDING, "lm_head": HEAD, r"\.gate\.": ROUTER},
    ),
    "GptOss": (
        "ForCausalLM",
        {**GROUPED, "head_dim": 8, "num_local_experts": 4},
        {"embed_tokens": EMBEDDING, "lm_head": HEAD, r"\.router\.": ROUTER, "experts.*_bias$": VECTOR},
    ),
    "Qwen2Moe": (
        "ForCausalLM",
        {**GROUPED, **SHARED_EXPERT, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
        {"embed_tokens": EMBEDDING, "lm_head": HEAD, r"mlp\.gate\.": ROUTER, "shared_expert_gate": VECTOR},
    ),
    "DeepseekV2": ("ForCausalLM", LATENT, {"embed_tokens": EMBEDDING, "lm_head": HEAD, r"\.gate\.": ROUTER}),
    "DeepseekV3": ("ForCausalLM", LATENT, {"embed_tokens": EMBEDDING, "lm_head": HEAD, r"\.gate\.": ROUTER}),
    "Falcon": (
        "ForCausalLM",
        {key: value for key, value in LM.items() if key != "intermediate_size"},
        {"word_embeddings": HEAD},
    ),
    "Bloom": ("ForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, {"embeddings": HEAD}),
    "Mamba": (
        "ForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 8},
        {"embeddings": HEAD, "A_log": VECTOR, "conv1d": VECTOR},
    ),
    "Rwkv": (
        "ForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64},
        {"embeddings": EMBEDDING, "^head": HEAD, "time_mix": VECTOR},
    ),
    "Swin": (
        "ForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        {"bias_table": EMBEDDING, "projection": CONV, "^classifier": HEAD},
    ),
    "ViT": (
        "ForImageClassification",
        {**SMALL, "image_size": 16, "patch_size": 4},
        {"cls_token": VECTOR, "position_embeddings": EMBEDDING, "projection": CONV, "^classifier": HEAD},
    ),
    "Bert": ("ForMaskedLM", LM, {"word_embeddings": HEAD, "(position|token_type)_embeddings": EMBEDDING}),
    "T5": ("ForConditionalGeneration", T5, {"^shared": HEAD, "relative_attention_bias": EMBEDDING}),
    "Whisper": (
        "ForConditionalGeneration",
        WHISPER,
        {r"\.conv\d": CONV, "embed_positions": EMBEDDING, "embed_tokens": HEAD},
    ),
}


def parameters(family: str) -> Iterator[tuple[ParameterInfo, str | None]]:
    """What is known of each parameter of more than one dimension, and why it is to take no matrix rule."""
    kind, settings, special = FAMILIES[family]
    build: Callable[..., nn.Module] = getattr(transformers, family + kind)
    config = getattr(transformers, f"{family}Config")(**settings)
    with torch.device("meta"):
        model = build(config)
    unused = set(special)
    for info in describe(model).values():
        if len(info.shape) > 1:
            matching = [pattern for pattern in special if re.search(pattern, info.name)]
            unused.difference_update(matching)
            yield info, special[matching[0]] if matching else None
    assert not unused


@pytest.mark.parametrize("family", FAMILIES)
def test_routes(family: str) -> None:
    matrices = 0
    for info, reason in parameters(family):
        chosen = route(info, MATRICES)
        assert (chosen.rule == "matrix", chosen.reason) == (reason is None, reason or chosen.reason), info
        # Names and shapes alone come to the same.
        by_name = route(ParameterInfo(info.name, info.shape), MATRICES)
        assert by_name.rule == chosen.rule, (info, by_name)
        matrices += reason is None
    assert matrices >= 7
