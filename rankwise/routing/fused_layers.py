"""Recognises fused weights by the class of their module, and tells how their logical matrices lie.

A name alone does not tell: ``query_key_value`` holds three matrices one below the other in one model, and the rows of
every head together in the next. A weight that is not in the table, or does not fit its sizes, is taken for one matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import nn

from rankwise.routing.fused_shape import FusedShape
from rankwise.routing.name_roles import Role
from rankwise.routing.weight_view import WeightView

__all__ = ["fused_parts", "looks_fused"]

Layout = Callable[[WeightView], FusedShape | None]
_QKV = ("q", "k", "v")


class FusedLayer(NamedTuple):
    """One row of the table.

    Attributes:
        name: Name of the layer or parameter (a whole match).
        owner: Class of the module that the layer belongs to (a whole match).
        layout: Returns the fused shape of a weight, or None where sizes are missing.
        kind: Class of the layer (a whole match).
    """

    name: str
    owner: str
    layout: Layout
    kind: str = ".*"

    def knows(self, weight: WeightView) -> bool:
        """Whether this row describes a weight of this name."""
        if not re.fullmatch(self.kind, weight.kind):
            return False
        return any(re.fullmatch(self.owner, kind) for kind in weight.owner_kinds)


# --- layouts ---------------------------------------------------------------------------------------------------------


def _equal(names: Sequence[str], dim: int = -2, with_heads: bool = False) -> Layout:
    """Parts of one size lie one after the other."""

    def layout(weight: WeightView) -> FusedShape | None:
        size, left = divmod(weight.shape[dim], len(names))
        heads = weight.heads if with_heads else None
        fitting = heads is not None and size % heads == 0
        return (
            None if left else FusedShape(tuple((name, size) for name in names), dim, heads=_each(heads, names, fitting))
        )

    return layout


def _each(heads: int | None, names: Sequence[str], fitting: bool) -> tuple[int, ...]:
    return (heads,) * len(names) if heads is not None and fitting else ()


def _alternating(names: Sequence[str], dim: int = -2) -> Layout:
    """Rows, or columns, of the parts alternate."""

    def layout(weight: WeightView) -> FusedShape | None:
        groups, left = divmod(weight.shape[dim], len(names))
        return None if left else FusedShape(tuple((name, 1) for name in names), dim, groups)

    return layout


def _per_head(*names: str) -> Layout:
    """Each head has its rows of all parts."""

    def layout(weight: WeightView) -> FusedShape | None:
        if weight.heads is None or weight.head_size is None:
            return None
        parts = tuple((name, weight.head_size) for name in names)
        return FusedShape(parts, groups=weight.heads, heads=(1,) * len(names))

    return layout


def _attention(weight: WeightView) -> FusedShape | None:
    """Queries, keys and values follow each other; keys and values may have fewer heads."""
    heads, key_heads, size = weight.heads, weight.key_heads, weight.head_size
    if heads is None or key_heads is None or size is None:
        return None
    parts = (("q", heads * size), ("k", key_heads * size), ("v", key_heads * size))
    return FusedShape(parts, heads=(heads, key_heads, key_heads))


def _grouped(weight: WeightView) -> FusedShape | None:
    """Each head of keys has the queries that share it, its keys, and its values."""
    heads, key_heads, size = weight.heads, weight.key_heads, weight.head_size
    if heads is None or key_heads is None or size is None or heads % key_heads:
        return None
    shared = heads // key_heads
    return FusedShape((("q", shared * size), ("k", size), ("v", size)), groups=key_heads, heads=(shared, 1, 1))


def _grouped_by_share(weight: WeightView) -> FusedShape | None:
    """Groups as in :func:`_grouped`, where the module tells the queries of a key head, and not the number of heads."""
    shared, size = weight.number("heads_per_kv"), weight.number("head_dim")
    if shared is None or size is None:
        return None
    groups = weight.rows // ((shared + 2) * size)
    return FusedShape((("q", shared * size), ("k", size), ("v", size)), groups=groups, heads=(shared, 1, 1))


def _one_key(weight: WeightView) -> FusedShape | None:
    """Queries of all heads come first, and then the keys and values that they all share."""
    heads, size = weight.heads, weight.head_size
    if heads is None or size is None:
        return None
    return FusedShape((("q", heads * size), ("k", size), ("v", size)), heads=(heads, 1, 1))


def _by_flag(name: str, yes: Layout, no: Layout) -> Layout:
    """An attribute of the model decides between two layouts; without it nothing is known."""

    def layout(weight: WeightView) -> FusedShape | None:
        value = weight.flag(name)
        return None if value is None else (yes if value else no)(weight)

    return layout


_falcon = _by_flag("new_decoder_architecture", _grouped, _by_flag("multi_query", _one_key, _per_head(*_QKV)))


def _vision(weight: WeightView) -> FusedShape | None:
    """Queries, keys and values of vision transformers follow each other, unless an attribute says otherwise."""
    keys, values = weight.number("key_dim"), weight.number("val_dim")
    if keys is not None and values is not None and weight.heads is not None:
        return FusedShape((("q", keys), ("k", keys), ("v", values)), groups=weight.heads, heads=(1, 1, 1))
    return (_per_head(*_QKV) if weight.flag("head_first") else _equal(_QKV, with_heads=True))(weight)


def _conv1d_attention(weight: WeightView) -> FusedShape | None:
    """GPT-2 joins queries, keys and values; in cross-attention the queries have a layer of their own."""
    names = _QKV[1:] if weight.flag("is_cross_attention") else _QKV
    return _equal(names, dim=-1, with_heads=True)(weight)


def _bigcode(weight: WeightView) -> FusedShape | None:
    """GPT-BigCode joins queries, keys and values; its cross-attention splits other sizes than it stores."""
    if weight.flag("is_cross_attention"):
        return None
    return _by_flag("multi_query", _one_key, _per_head(*_QKV))(weight)


def _codegen(weight: WeightView) -> FusedShape | None:
    """CodeGen has four groups of queries, values and keys, whatever the model was trained on."""
    if weight.heads is None or weight.heads % 4 or weight.columns % 4:
        return None
    size, heads = weight.columns // 4, weight.heads // 4
    return FusedShape((("q", size), ("v", size), ("k", size)), groups=4, heads=(heads, heads, heads))


def _latents(*names: tuple[str, str]) -> Layout:
    """Parts follow each other, of sizes that attributes of the model tell."""

    def layout(weight: WeightView) -> FusedShape | None:
        sizes = [weight.number(attribute) for _, attribute in names]
        if None in sizes:
            return None
        return FusedShape(tuple((name, size) for (name, _), size in zip(names, sizes, strict=True) if size is not None))

    return layout


def _heads_apart(part: str) -> Layout:
    """A layer of its own for queries, keys or values has one head below the other."""

    def layout(weight: WeightView) -> FusedShape | None:
        heads = weight.heads if part == "q" else weight.key_heads
        positions, others = weight.number("qk_rope_head_dim"), weight.number("qk_nope_head_dim")
        size = positions + others if part == "q" and positions and others else weight.head_size
        dim = -1 if weight.is_transposed else -2
        length = weight.shape[dim]
        if size is None or length % size or (heads is not None and length != heads * size):
            return None
        return FusedShape(((part, length),), dim, heads=(length // size,))

    return layout


def _keys_and_values(weight: WeightView) -> FusedShape | None:
    """Each head of multi-head latent attention has its keys, without their rotary part, and its values."""
    heads, keys, values = weight.heads, weight.number("qk_nope_head_dim"), weight.number("v_head_dim")
    if heads is None or keys is None or values is None:
        return None
    return FusedShape((("k", keys), ("v", values)), groups=heads, heads=(1, 1))


def _experts(weight: WeightView) -> FusedShape | None:
    """Gate and up projections of stacked experts lie as attributes of their class tell."""
    if weight.flag("has_gate") is False:
        return None
    concatenated, transposed = weight.flag("is_concatenated"), weight.flag("is_transposed")
    if concatenated is None or transposed is None:
        return None
    return (_equal if concatenated else _alternating)(("gate", "up"), -1 if transposed else -2)(weight)


def _stacked_experts(weight: WeightView) -> FusedShape | None:
    """Experts lie one below the other."""
    count, size = weight.number("moe_num_experts"), weight.number("ffn_hidden_size")
    if count is None or size is None or count < 2:
        return None
    return FusedShape(tuple((f"expert{index}", size) for index in range(count)))


def _mamba2(weight: WeightView) -> FusedShape | None:
    """Gate, input, B, C and time steps are five projections that meet in the state-space equations alone.

    Each becomes another quantity there, at a scale of its own; the time steps have one row for each head.
    """
    heads, groups = weight.number("num_heads", "nheads"), weight.number("n_groups", "ngroups")
    inner, state = weight.number("intermediate_size", "d_ssm", "d_inner"), weight.number("ssm_state_size", "d_state")
    if heads is None or groups is None or inner is None or state is None or inner % heads:
        return None
    parts = (("z", inner), ("x", inner), ("B", groups * state), ("C", groups * state), ("dt", heads))
    return FusedShape(parts, heads=(heads, heads, groups, groups, 0))


def _delta_net(*names: str) -> Layout:
    """Gated delta nets may keep everything of a head of keys together."""

    def layout(weight: WeightView) -> FusedShape | None:
        keys, values = weight.number("num_k_heads"), weight.number("num_v_heads")
        sizes = weight.number("head_k_dim"), weight.number("head_v_dim")
        if keys is None or values is None or sizes[0] is None or sizes[1] is None or values % keys:
            return None
        shared = values // keys
        known = {"q": (sizes[0], 1), "k": (sizes[0], 1), "v": (shared * sizes[1], shared)}
        known |= {"z": known["v"], "b": (shared, 0), "a": (shared, 0)}
        heads = tuple(known[name][1] for name in names)
        return FusedShape(
            tuple((name, known[name][0]) for name in names), groups=keys, heads=heads if any(heads) else ()
        )

    return layout


def _delta_net_in_parts(weight: WeightView) -> FusedShape | None:
    """Gated delta nets may keep queries, keys and values one below the other."""
    keys, values = weight.number("num_k_heads"), weight.number("num_v_heads")
    key_size, value_size = weight.number("head_k_dim"), weight.number("head_v_dim")
    if keys is None or values is None or key_size is None or value_size is None:
        return None
    parts = (("q", keys * key_size), ("k", keys * key_size), ("v", values * value_size))
    return FusedShape(parts, heads=(keys, keys, values))


# --- the table -------------------------------------------------------------------------------------------------------

_VISION = (
    r"(Blip|Blip2|InstructBlip|InstructBlipVideo|Mgpstr|SegGpt|VitDet|PPOCRV\d\w*Rec)Attention|\w*Vision\w*Attention"
    r"|TimesformerSelfAttention|HieraMaskUnitAttention|Sam2MultiScaleAttention"
    # Class names of vision models in other packages.
    r"|Attention(Rope|Cl)?|(Window|Eva|MaskUnit|RelPos|MultiScale|Diff|WindowMultiHead)Attention|XCA"
    r"|CrossCovarianceAttn|TalkingHeadAttn|LocallyGroupedAttn|FactorAttnConvRelPosEnc|ChannelAttention(V2)?"
)
_LLAMA = r"(Llama|Mistral|Qwen\d?|Gemma\d?|Phi[34]\w*|GLM\d?|Glm\d?|Internlm|Yi|StableLm|Olmo\d?|Nemotron)"
_SEPARATE = r"\w*Attention\w*|QKVLinear"  # the latter is torchtitan's
_GATED = r"(Qwen3Next|Qwen3_5|Qwen3_5Moe|Qwen4Exp|Qwen4ExpText)"
_MAMBA2 = r"(Mamba2|Bamba|FalconH1|NemotronHMamba2|Zamba2Mamba)Mixer|GraniteMoeHybridMambaLayer|Mamba2(Simple)?"

TABLE = (
    FusedLayer("c_attn", ".*", _conv1d_attention, kind="Conv1D"),
    FusedLayer("c_attn", "GPTBigCode\\w*Attention\\w*", _bigcode),
    FusedLayer("c_attn", "QWenAttention|CausalSelfAttention", _equal(_QKV, with_heads=True), kind="Linear"),
    FusedLayer("query_key_value", "(GPTNeoX|GPTNeoXJapanese|Bloom|Persimmon)\\w*Attention\\w*", _per_head(*_QKV)),
    FusedLayer("query_key_value", "Falcon\\w*Attention\\w*", _falcon),
    FusedLayer(
        "query_key_value", "SelfAttention", _by_flag("multi_query_attention", _attention, _per_head(*_QKV))
    ),  # ChatGLM's
    FusedLayer("qkv_proj", "CodeGenAttention", _codegen),
    FusedLayer("qkv_proj", "MiniMaxLightningAttention", _per_head(*_QKV)),
    FusedLayer("qkv_proj", _LLAMA + "(Flash|Sdpa)?Attention\\w*", _attention),
    FusedLayer("qkv", "Exaone4_5_VisionAttention", _attention),
    FusedLayer("(to_)?qkv", _VISION, _vision, kind="Linear"),
    FusedLayer("qkv_linear", "LayoutLMv2SelfAttention", _equal(_QKV, with_heads=True)),
    FusedLayer("att_proj", "BarkSelf\\w*Attention\\w*", _equal(_QKV, with_heads=True)),
    FusedLayer("in_proj", "DisentangledSelfAttention", _per_head(*_QKV)),
    FusedLayer("W_pack", "(Baichuan)?Attention", _equal(_QKV, with_heads=True)),
    FusedLayer("wqkv", "InternLM2\\w*Attention\\w*", _grouped),
    FusedLayer("wqkv", "(AllGather)?FusedQKVLinear", _grouped_by_share),  # torchtitan's
    FusedLayer(
        "Wqkv", "(Mpt|Dbrx|ModernBert)\\w*Attention\\w*|MHA|(Multihead|GroupedQuery|MultiQuery)Attention", _attention
    ),
    FusedLayer("q_proj", _GATED + "Attention", _per_head("q", "gate")),
    *(
        FusedLayer(f"{part}_proj(_weight)?|w{part}|to_{part}|{part}|{word}" + extra, _SEPARATE, _heads_apart(part))
        for part, word, extra in (("q", "query", "|q_b_proj|wq_b|q_attn"), ("k", "key", ""), ("v", "value", ""))
    ),
    FusedLayer("in_proj_qkvz", "Qwen3NextGatedDeltaNet", _delta_net("q", "k", "v", "z")),
    FusedLayer("in_proj_ba", "Qwen3NextGatedDeltaNet", _delta_net("b", "a")),
    FusedLayer("in_proj_qkv", _GATED + "GatedDeltaNet", _delta_net_in_parts),
    FusedLayer("kv_a_proj_with_mqa|wkv_a", ".*", _latents(("kv", "kv_lora_rank"), ("k_rope", "qk_rope_head_dim"))),
    FusedLayer(
        "fused_qkv_a_proj_with_mqa",
        ".*",
        _latents(("q", "q_lora_rank"), ("kv", "kv_lora_rank"), ("k_rope", "qk_rope_head_dim")),
    ),
    FusedLayer("kv_b_proj|wkv_b", ".*", _keys_and_values),
    FusedLayer("gate_up_proj", "Phi4MultimodalAudioMLP", _equal(("up", "gate"))),
    FusedLayer("gate_up_proj", "\\w*(MLP|FeedForward|SwiGLU)", _equal(("gate", "up")), kind="Linear"),
    FusedLayer("gate_up_proj", "Llama4TextExperts", _equal(("gate", "up"), dim=-1)),
    FusedLayer("gate_up_proj", "LongcatFlashExperts", _equal(("gate", "up"))),
    FusedLayer("gate_up_proj", "\\w*Experts", _experts),
    FusedLayer("input_linear", "GraniteMoe\\w*MLP", _equal(("gate", "up")), kind="Linear"),
    FusedLayer("Wi", "ModernBert\\w*MLP", _equal(("gate", "up"))),
    FusedLayer("fc1", "GluMlp", _by_flag("gate_last", _equal(("up", "gate")), _equal(("gate", "up"))), kind="Linear"),
    FusedLayer("w12|weights_in", "\\w*SwiGLU\\w*", _equal(("gate", "up"))),
    FusedLayer("w1|v1|w2", "DbrxExpertGLU", _stacked_experts),
    FusedLayer("in_proj", _MAMBA2, _mamba2),
    FusedLayer("in_proj", "(Falcon)?MambaMixer|JambaMambaMixer|Mamba(Simple)?", _equal(("x", "z"))),
    FusedLayer("in_proj", "ZambaMambaMixer", _alternating(("x", "z"))),
    FusedLayer("in_proj", "Lfm\\w*ShortConv", _equal(("B", "C", "x"))),
)

_FUSED_NAMES = re.compile(
    r"(.*_)?(qkvz?|qkvg)(_.*)?|query_key_value|w_?qkv|w_pack|c_attn|in_proj_weight|(mixer|mamba)\.in_proj"
    r"|gate_(and_)?up(_.*)?|up_gate(_.*)?|w12|w13|kv_b_proj|(to_)?kv_proj_fused|key_value",
    re.IGNORECASE,
)


def fused_parts(weight: WeightView) -> FusedShape | None:
    """The logical matrices of a weight; None if it is one matrix, or nothing certain is known."""
    if not 2 <= len(weight.shape) <= 3:
        return None
    if isinstance(weight.owner, nn.MultiheadAttention) and weight.name == "in_proj_weight":
        return _fitting(_equal(_QKV, with_heads=True)(weight), weight.shape)
    row = next((row for row in _rows_of(weight.name) if row.knows(weight)), None)
    return None if row is None else _fitting(row.layout(weight), weight.shape)


@lru_cache(maxsize=1024)
def _rows_of(name: str) -> tuple[FusedLayer, ...]:
    """Rows of the table that match a name; cached, because every layer has the same names."""
    return tuple(row for row in TABLE if re.fullmatch(row.name, name))


def _fitting(fused: FusedShape | None, shape: Sequence[int]) -> FusedShape | None:
    return fused if fused is not None and fused.length == shape[fused.dim] else None


def looks_fused(name: str, shape: Sequence[int], role: Role) -> bool:
    """Whether a weight without known parts has a name that fused weights have."""
    if not 2 <= len(shape) <= 3 or role not in (Role.LINEAR, Role.EXPERT, Role.UNKNOWN) or name.endswith("bias"):
        return False
    parts = name.removesuffix(".weight").split(".")
    return any(_FUSED_NAMES.fullmatch(text) for text in (parts[-1], ".".join(parts[-2:])))
