"""Roles of parameters, and how names tell them where a module's type is unknown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

__all__ = ["Role", "is_head", "is_router", "role_by_name", "unwrapped"]

_EMBEDDING_NAMES = ("embed", "wte", "wpe", "word_embeddings", "position_embeddings")
_HEAD_NAMES = frozenset({"lm_head", "embed_out", "output_layer", "classifier", "score"})
# These are heads at the end of a model, but other things inside its layers.
_END_NAMES = frozenset({"head", "output", "decoder"})
_INNER_NAMES = ("attn", "attention", "mlp", "ffn", "expert")
_NORM_NAMES = ("norm", "ln_")
_TABLE_NAMES = ("bias_table", "position_table", "relative_position_bias", "relative_attention_bias")
# Words that stand between underscores in names.
_ROUTER_WORDS = frozenset({"router", "routers"})
_POSITION_WORDS = frozenset({"position", "positions", "positional", "pos"})
_POSITION_ENDS = _POSITION_WORDS | {"encoding", "encodings", "enc", "table"}
_ROW_WORDS = frozenset({"emb", "embs", "table", "token", "tokens"})
# Layers with these words multiply their input, whatever it is.
_LAYER_WORDS = frozenset({"proj", "projection", "linear", "dense", "fc", "mlp", "ffn", "kernel"})
_GATE_NAMES = frozenset({"gate", "wg", "gating"})
_KEPT_GATE_NAMES = frozenset({"gating", "gate_logits"})
# Values per channel of state-space and linear-attention layers, kept as tables; they multiply no vector.
_CHANNEL_NAMES = frozenset(
    {"a_log", "a_logs", "dt_bias", "log_dt", "inv_dt", "log_a_real", "inv_a_real", "a_imag"}
    | {"time_decay", "time_first", "time_faaaa", "log_state_decay"}
)
# PEFT puts these between a module's name and the module: a trained copy, the original, the base of an adapter.
_WRAPPER = re.compile(r"\.(modules_to_save\.[^.]+|original_module|base_layer)(?=\.|$)")


class Role(StrEnum):
    """What a parameter does in its model."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    CONV = "conv"
    EXPERT = "expert"
    ROUTER = "router"
    VECTOR = "vector"
    UNKNOWN = "unknown"


def role_by_name(name: str, shape: Sequence[int]) -> Role:
    """The role of a parameter of which only name and shape are known; UNKNOWN if they do not tell."""
    path, _, own = name.rpartition(".")
    module, local, lowered = unwrapped(path.lower()), own.lower(), name.lower()
    kept = local not in ("weight", "bias")
    if is_router(module, shape) or (kept and _is_kept_router(local, shape)):
        return Role.ROUTER
    if local.endswith("bias") or local in _CHANNEL_NAMES or own == "D":
        return Role.VECTOR
    last = module.rpartition(".")[2]
    if last.startswith("conv") and len(shape) > 2:
        return Role.CONV
    if module == "shared" or any(hint in lowered for hint in _TABLE_NAMES):  # T5 shares its embedding under that name
        return Role.EMBEDDING
    if _is_kept_table(last, local) if kept else _is_table(last):
        return Role.EMBEDDING
    if not _HEAD_NAMES.isdisjoint(module.split(".")) or _ends_the_model(module):
        return Role.HEAD
    if any(hint in lowered for hint in _EMBEDDING_NAMES):
        return Role.EMBEDDING
    if any(hint in lowered for hint in _NORM_NAMES):
        return Role.NORM
    return Role.UNKNOWN


def unwrapped(module: str) -> str:
    """The name a module had before it was wrapped."""
    return _WRAPPER.sub("", module)


def is_head(module: str) -> bool:
    """Whether a module is called like an output head."""
    return module.rpartition(".")[2] in _HEAD_NAMES or _ends_the_model(module)


def is_router(module: str, shape: Sequence[int]) -> bool:
    """Whether a module sends tokens to experts. Other gates are called so too, but they have no fewer outputs.

    Args:
        module: Name of the module, in lower case.
        shape: Shape of its weight, (outputs, inputs).
    """
    parts = module.split(".")
    if any(not _ROUTER_WORDS.isdisjoint(part.split("_")) for part in parts):
        return True
    return parts[-1] in _GATE_NAMES | _KEPT_GATE_NAMES and _narrows(shape)


def _is_kept_router(local: str, shape: Sequence[int]) -> bool:
    """Whether a parameter that a module keeps itself sends tokens to experts; ``gate`` may be a matrix there."""
    return not _ROUTER_WORDS.isdisjoint(local.split("_")) or (local in _KEPT_GATE_NAMES and _narrows(shape))


def _narrows(shape: Sequence[int]) -> bool:
    return len(shape) == 2 and shape[0] < shape[1]


def _is_table(module: str) -> bool:
    """Whether a module with this name looks up rows of its weight."""
    words = module.split("_")
    if not _LAYER_WORDS.isdisjoint(words):
        return False
    has_positions = not _POSITION_WORDS.isdisjoint(words)
    return words[-1] in ("emb", "embs") or (has_positions and words[-1] in _POSITION_ENDS)


def _is_kept_table(module: str, local: str) -> bool:
    """Whether a parameter that a module keeps itself has a row for every position or token."""
    words = set(local.split("_"))
    if not _LAYER_WORDS.isdisjoint(words):
        return False
    return not words.isdisjoint(_ROW_WORDS | _POSITION_WORDS) or not _POSITION_WORDS.isdisjoint(module.split("_"))


def _ends_the_model(module: str) -> bool:
    """Whether a module is called like an output head and lies outside the layers of the model."""
    *outer, name = module.split(".")
    inner = (part.isdigit() or any(hint in part for hint in _INNER_NAMES) for part in map(str.lower, outer))
    return name in _END_NAMES and not any(inner)
