"""Models are made on the meta device from a few numbers, a configuration or a function: shapes without weights."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["CONFIGS", "KNOWN", "Sizes", "active_parameters", "build", "from_config", "sizes_of", "with_function"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder language model.

    Attributes:
        family: ``"gpt2"`` (learned positions, biases, tied head) or ``"llama"`` (SwiGLU, no biases).
        layers: Number of transformer blocks.
        hidden: Width.
        heads: Number of attention heads.
        kv_heads: Number of key-value heads.
        ffn: Width inside the MLP.
        vocab: Number of token ids.
        positions: Longest sequence.
        tied: Whether head and embedding are one weight.
        experts: Number of experts in every block, in place of its MLP; 0: none.
        expert_ffn: Width inside an expert.
        per_token: Number of experts that a token is sent to.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int
    tied: bool
    experts: int = 0
    expert_ffn: int = 0
    per_token: int = 2

    def config(self) -> dict[str, Any]:
        """Return the sizes as a Hugging Face configuration."""
        if self.family == "gpt2":
            return {
                **{"model_type": "gpt2", "vocab_size": self.vocab, "n_positions": self.positions},
                **{"n_embd": self.hidden, "n_layer": self.layers, "n_head": self.heads, "n_inner": self.ffn},
                **{"tie_word_embeddings": self.tied, "bos_token_id": None, "eos_token_id": None},
            }
        config: dict[str, Any] = {
            **{"model_type": "llama", "vocab_size": self.vocab, "max_position_embeddings": self.positions},
            **{"hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads},
            **{"num_key_value_heads": self.kv_heads, "intermediate_size": self.ffn, "tie_word_embeddings": self.tied},
        }
        if self.experts:
            chosen = {"num_local_experts": self.experts, "num_experts_per_tok": self.per_token}
            config |= {"model_type": "mixtral", "intermediate_size": self.expert_ffn, **chosen}
        return config


def _gpt2(layers: int, hidden: int, heads: int) -> Sizes:
    return Sizes("gpt2", layers, hidden, heads, heads, 4 * hidden, 50257, 1024, True)


KNOWN: Mapping[str, Sizes] = {
    "gpt2-small": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-1b": Sizes("llama", 16, 2048, 32, 8, 8192, 128256, 131072, True),
    "llama-8b": Sizes("llama", 32, 4096, 32, 8, 14336, 128256, 131072, False),
    "llama-70b": Sizes("llama", 80, 8192, 64, 8, 28672, 128256, 131072, False),
    "llama-405b": Sizes("llama", 126, 16384, 128, 8, 53248, 128256, 131072, False),
    "mixtral-8x7b": Sizes("llama", 32, 4096, 32, 8, 14336, 32000, 32768, False, 8, 14336, 2),
    "mixtral-8x22b": Sizes("llama", 56, 6144, 48, 8, 16384, 32768, 65536, False, 8, 16384, 2),
}
"""Sizes of GPT-2, Llama 3.1 and 3.2, and Mixtral, by name."""
_LATENT = {
    **{"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432},
    **{"moe_intermediate_size": 2048, "q_lora_rank": 1536, "kv_lora_rank": 512, "num_experts_per_tok": 8},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_shared_experts": 1},
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-8b": {
        **{"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    },
    "gpt-oss-20b": {
        **{"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "intermediate_size": 2880},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088},
        **{"num_local_experts": 32, "num_experts_per_tok": 4},
    },
    "deepseek-v3": {
        **_LATENT,
        **{"num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256},
        **{"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
    },
    "kimi-k2": {
        **_LATENT,
        **{"num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, "n_routed_experts": 384},
        **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    },
}
"""Hugging Face's configurations of models of other families, by name; Megatron's names for them are not known here."""


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """Return the sizes in a configuration of GPT-2's or Llama's kind.

    Args:
        config: Configuration of Hugging Face.

    Raises:
        ValueError: The configuration is of another kind.
    """
    kind = config.get("model_type")
    if kind == "gpt2":
        hidden = config.get("n_embd", 768)
        heads = config.get("n_head", 12)
        ffn = config.get("n_inner") or 4 * hidden
        vocab, positions = config.get("vocab_size", 50257), config.get("n_positions", 1024)
        tied = config.get("tie_word_embeddings", True)
        return Sizes("gpt2", config.get("n_layer", 12), hidden, heads, heads, ffn, vocab, positions, tied)
    if kind not in ("llama", "mistral", "mixtral"):
        raise ValueError(
            f"model is of type {kind!r}: under Megatron it must be 'gpt2', 'llama', 'mistral' or 'mixtral', or sizes"
        )
    heads = config["num_attention_heads"]
    experts = kind == "mixtral"
    return Sizes(
        "llama",
        config["num_hidden_layers"],
        config["hidden_size"],
        heads,
        config.get("num_key_value_heads") or heads,
        config["intermediate_size"],
        config["vocab_size"],
        config.get("max_position_embeddings", 2048),
        config.get("tie_word_embeddings", False),
        config.get("num_local_experts", 8) if experts else 0,
        config["intermediate_size"] if experts else 0,
        config.get("num_experts_per_tok", 2),
    )


def active_parameters(model: nn.Module, config: Mapping[str, Any] | None) -> int:
    """Return the number of elements that a token meets, with a share of the experts if the configuration has one.

    Args:
        model: Model on the meta device or elsewhere.
        config: Configuration of Hugging Face, if there is one.
    """
    config = config or {}
    every = next((config[key] for key in _EXPERTS if config.get(key)), 0)
    chosen = config.get("num_experts_per_tok") or every
    elements = 0.0
    for name, parameter in model.named_parameters():
        share = chosen / every if every and ".experts." in f".{name}" else 1.0
        elements += share * parameter.numel()
    return round(elements)


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def with_function(text: str) -> bool:
    """Whether a model is named as ``module:function``."""
    module, _, function = text.partition(":")
    return function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def build(text: str) -> tuple[nn.Module, Mapping[str, Any] | None]:
    """Return a model on the meta device.

    Args:
        text: A name of :data:`KNOWN`, a Hugging Face configuration or a folder with one, or ``module:function`` of a
            function without arguments that returns the model; the working directory is searched, too.

    Returns:
        The model, and its configuration if there is one.

    Raises:
        ValueError: There is no such model.
    """
    if text in KNOWN:
        return from_config(KNOWN[text].config())
    if text in CONFIGS:
        return from_config(CONFIGS[text])
    if with_function(text):
        return _from_function(text), None
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"model is {text!r}: it must be {', '.join((*KNOWN, *CONFIGS))}, the path of a Hugging Face config.json, "
            "or module:function of a function that returns the model"
        ) from error
    except ValueError as error:
        raise ValueError(f"model is {text!r}, which is no readable JSON file: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"model is {text!r}, which has no 'model_type': it must be a Hugging Face config.json")
    return from_config(config)


def from_config(config: Mapping[str, Any]) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return a model of a Hugging Face configuration on the meta device, and the configuration."""
    import transformers

    config_object = transformers.AutoConfig.for_model(**config)
    names = config.get("architectures") or []
    kind = next((candidate for name in names if (candidate := getattr(transformers, name, None))), None)
    with torch.device("meta"):
        model: nn.Module = kind(config_object) if kind else transformers.AutoModelForCausalLM.from_config(config_object)
    return model, config


def _from_function(text: str) -> nn.Module:
    name, _, function = text.partition(":")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model is {text!r}: {error}") from error
    finally:
        sys.path.remove("")
    with torch.device("meta"):
        model = made()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {text!r}, which returned a {type(model).__name__}: it must return a torch module")
    return model
