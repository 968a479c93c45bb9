"""What is called q, k and v is what the model's own code uses as q, k and v: read off its forward pass, not its source.

Rows of a block are set to zero, and what reaches the attention or the activation is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_rows import runs_of
from torch import Tensor, nn

from benchmarks.architectures import ARCHITECTURES
from rankwise.routing.fused_shape import FusedShape
from rankwise.routing.roles import ParameterInfo, describe

TOKENS = torch.arange(3, 9)[None]


def heads_of(fused: FusedShape, name: str) -> list[list[tuple[int, int]]]:
    """Runs of rows of each head of a part, by its number of heads."""
    position = [part for part, _ in fused.parts].index(name)
    inside = fused.heads[position]
    found = []
    for start, end in runs_of(fused, name):
        size = (end - start) // inside
        found += [[(start + head * size, start + (head + 1) * size)] for head in range(inside)]
    return found


def emptied(weight: Tensor, fused: FusedShape, runs: list[tuple[int, int]]) -> None:
    for start, end in runs:
        weight.narrow(fused.dim, start, end - start).zero_()


def fused_weights(model: nn.Module) -> dict[str, tuple[nn.Parameter, ParameterInfo]]:
    return {
        info.name: (weight, info)
        for weight, info in describe(model).items()
        if info.fused is not None and len(info.fused.parts) > 1
    }


def lone_weights(model: nn.Module) -> list[tuple[nn.Parameter, FusedShape]]:
    """Layers of queries, keys or values alone, of the first attention."""
    known = [(weight, info) for weight, info in describe(model).items() if info.fused and len(info.fused.parts) == 1]
    first = {info.name.rpartition(".")[0].rpartition(".")[2]: (weight, info.fused) for weight, info in reversed(known)}
    return [(weight, fused) for weight, fused in first.values() if fused is not None]


# --- attention: what reaches the products ----------------------------------------------------------------------------

ATTENTION = [
    *("GPT-2", "GPT-NeoX, Pythia", "CodeGen", "GPT-BigCode, StarCoder", "GPT-BigCode without multi-query", "MPT"),
    *("Phi-3, Phi-4", "Falcon 7B", "Falcon 40B, 180B", "Persimmon", "DBRX", "ModernBERT", "DeBERTa"),
    "torch.nn.MultiheadAttention",
]

Calls = list[dict[str, Tensor]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What attention was computed of, by torch's function or by hand: (batch, heads, tokens, size) each."""
    calls: Calls = []
    original: Callable[..., Tensor] = nn.functional.scaled_dot_product_attention
    matmul: Callable[..., Tensor] = torch.matmul

    def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append({"q": q.clone(), "k": k.clone(), "v": v.clone()})
        return original(q, k, v, *args, **options)

    def product(a: Tensor, b: Tensor, *args: Any, **options: Any) -> Tensor:
        if a.dim() == b.dim() == 4 and b.shape[2] > 1:
            if a.shape[-1] == b.shape[-1] == TOKENS.shape[1]:
                raise AssertionError("tokens and sizes of heads must differ")
            if calls and "v" not in calls[-1]:
                calls[-1]["v"] = b.clone()
            else:
                calls.append({"q": a.clone(), "k": b.transpose(-1, -2).clone()})
        return matmul(a, b, *args, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(torch, "matmul", product)
    return calls


def without_biases(title: str) -> nn.Module:
    torch.manual_seed(0)
    model = ARCHITECTURES[title].build()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    # torch's own attention leaves its functions in evaluation.
    return model if isinstance(model, nn.TransformerEncoderLayer) else model.eval()


@torch.no_grad()
def ran(model: nn.Module, seen: Calls) -> dict[str, Tensor]:
    seen.clear()
    if isinstance(model, nn.TransformerEncoderLayer):
        model(torch.sin(torch.arange(6.0 * 32)).view(6, 1, 32))
    else:
        model(TOKENS)
    return seen[0]


@torch.no_grad()
@pytest.mark.parametrize("title", ATTENTION)
def test_the_rows_of_a_head_are_its_own(title: str, seen: Calls) -> None:
    model = without_biases(title)
    known = [found for name, found in fused_weights(model).items() if "cross" not in name]
    weight, info = next(found for found in known if found[1].fused is not None and found[1].fused.parts[0][0] == "q")
    assert info.fused is not None
    kept, whole = weight.clone(), ran(model, seen)
    for part, _ in info.fused.parts:
        heads = heads_of(info.fused, part)
        for position, runs in enumerate(heads):
            emptied(weight, info.fused, runs)
            now = ran(model, seen)
            weight.copy_(kept)
            shared_by = now[part].shape[1] // len(heads)
            for other in "qkv":
                zero = (now[other] == 0).flatten(2).all(2)[0]
                mine = [other == part and place // shared_by == position for place in range(len(zero))]
                assert zero.tolist() == mine, (part, position, other)
                assert torch.equal(now[other][0, ~zero], whole[other][0, ~zero]), (part, position, other)


@torch.no_grad()
@pytest.mark.parametrize(
    ("title", "layers"),
    [("Llama, Mistral", 3), ("Qwen 2, Qwen 3", 3), ("gpt-oss", 3), ("BERT", 3), ("GPT-J", 3), ("DeepSeek-V2", 1)],
)
def test_the_rows_of_a_head_in_a_layer_of_its_own(title: str, layers: int, seen: Calls) -> None:
    model = without_biases(title)
    lone = lone_weights(model)
    assert len(lone) == layers
    for weight, fused in lone:
        ((part, _),) = fused.parts
        kept, heads = weight.clone(), heads_of(fused, part)
        for position, runs in enumerate(heads):
            emptied(weight, fused, runs)
            now = ran(model, seen)[part]
            weight.copy_(kept)
            zero = (now == 0).flatten(2).all(2)[0]
            shared_by = len(zero) // len(heads)
            assert zero.tolist() == [place // shared_by == position for place in range(len(zero))], (part, position)


def test_bloom_reads_its_heads_so() -> None:
    model = ARCHITECTURES["BLOOM"].build()
    ((name, (_, info)),) = fused_weights(model).items()
    assert info.fused is not None
    attention = model.get_submodule(name.removesuffix(".query_key_value.weight"))
    numbered = torch.arange(info.fused.length)[None, None]
    for part, found in zip("qkv", attention._reshape(numbered), strict=True):
        rows = [[row for start, end in runs for row in range(start, end)] for runs in heads_of(info.fused, part)]
        assert found[0, :, 0].tolist() == rows


def test_gpt2_s_cross_attention_reads_keys_first(seen: Calls) -> None:
    model = without_biases("GPT-2")
    weight, info = fused_weights(model)["transformer.h.0.crossattention.c_attn.weight"]
    assert info.fused is not None
    for part in ("k", "v"):
        kept = weight.detach().clone()
        with torch.no_grad():
            emptied(weight, info.fused, list(runs_of(info.fused, part)))
            model(TOKENS, encoder_hidden_states=torch.ones(1, 5, 32))
            weight.copy_(kept)
        assert [name for name, value in seen[-1].items() if not value.any()] == [part]


@torch.no_grad()
@pytest.mark.parametrize("title", ["DeepSeek-V2", "DeepSeek-V3, Kimi K2"])
def test_latent_attention(title: str, seen: Calls) -> None:
    model = without_biases(title)
    down, up = (
        fused_weights(model)[f"model.layers.0.self_attn.{name}.weight"] for name in ("kv_a_proj_with_mqa", "kv_b_proj")
    )
    size = 6  # of keys, before their rotary part
    for (weight, info), part, empty in (
        (down, "k_rope", {"k rotary"}),
        (down, "kv", {"k", "v"}),
        (up, "k", {"k"}),
        (up, "v", {"v"}),
    ):
        assert info.fused is not None
        kept = weight.clone()
        emptied(weight, info.fused, list(runs_of(info.fused, part)))
        now = ran(model, seen)
        weight.copy_(kept)
        views = {"k": now["k"][..., :size], "k rotary": now["k"][..., size:], "v": now["v"][..., :8], "q": now["q"]}
        assert {name for name, view in views.items() if not view.any()} == empty


@torch.no_grad()
def test_heads_of_latent_attention(seen: Calls) -> None:
    model = without_biases("DeepSeek-V3, Kimi K2")
    weight, info = fused_weights(model)["model.layers.0.self_attn.kv_b_proj.weight"]
    assert info.fused is not None
    for part, width in (("k", 6), ("v", 8)):
        for position, runs in enumerate(heads_of(info.fused, part)):
            kept = weight.clone()
            emptied(weight, info.fused, runs)
            now = ran(model, seen)[part][0, ..., :width]
            weight.copy_(kept)
            assert [place for place in range(4) if not now[place].any()] == [position]


@torch.no_grad()
@pytest.mark.parametrize("part", ["q", "gate"])
def test_gated_queries(part: str, seen: Calls) -> None:
    model = without_biases("Qwen 3 Next")
    weight, info = fused_weights(model)["model.layers.1.self_attn.q_proj.weight"]
    assert info.fused is not None
    emptied(weight, info.fused, list(runs_of(info.fused, part)))
    queries = ran(model, seen)["q"]
    assert queries.any() == (part == "gate")


# --- feed-forward layers: what reaches the activation -----------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("title", ["Phi-3, Phi-4", "GLM-4", "ModernBERT", "Mixtral", "Qwen 3 MoE", "Llama 4"])
def test_gate_and_up(title: str) -> None:
    model = without_biases(title)
    name, (weight, info) = next((n, f) for n, f in fused_weights(model).items() if f[1].fused.parts[0][0] == "gate")  # type: ignore[union-attr]
    assert info.fused is not None
    place = name.removesuffix(".weight").rpartition(".")[0]
    layer = model.get_submodule(place)
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    activation = getattr(layer, "act_fn", None) or getattr(layer, "activation_fn", None) or layer.act
    activation.register_forward_hook(lambda _, given, __: inputs.append(given[0].clone()))
    layer.register_forward_hook(lambda _, __, result: outputs.append(result.clone()))
    for part in ("gate", "up"):
        kept = weight.clone()
        emptied(weight, info.fused, list(runs_of(info.fused, part)))
        inputs.clear()
        outputs.clear()
        model(TOKENS)
        weight.copy_(kept)
        # Without a gate nothing reaches the activation; without the other, all that does is in vain.
        assert any(value.any() for value in inputs) == (part == "up")
        assert outputs and not any(value.any() for value in outputs)


def test_gpt_oss_takes_turns() -> None:
    model = ARCHITECTURES["gpt-oss"].build()
    ((name, (_, info)),) = fused_weights(model).items()
    assert info.fused is not None
    experts = model.get_submodule(name.rpartition(".")[0])
    for part, value in (("gate", 0.0), ("up", -1.0)):
        joined = torch.rand(2, info.fused.length) + 0.5
        for start, end in runs_of(info.fused, part):
            joined[:, start:end] = value
        assert not experts._apply_gate(joined).any()
        assert experts._apply_gate(joined.roll(1, -1)).all()


@torch.no_grad()
def test_experts_of_dbrx_lie_one_below_the_other() -> None:
    model = ARCHITECTURES["DBRX"].build()
    experts = model.get_submodule("transformer.blocks.0.ffn.experts")
    hidden, one = torch.rand(3, 32), torch.ones(3, 1)
    for name in ("w1", "v1", "w2"):
        weight, info = fused_weights(model)[f"transformer.blocks.0.ffn.experts.mlp.{name}"]
        assert info.fused is not None
        for empty in range(4):
            kept = weight.clone()
            emptied(weight, info.fused, list(runs_of(info.fused, f"expert{empty}")))
            idle = [not experts(hidden, torch.full((3, 1), index), one).any() for index in range(4)]
            weight.copy_(kept)
            assert idle == [index == empty for index in range(4)]


# --- state-space layers and gated delta nets ------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("title", ["Mamba 2"])
def test_time_steps_come_last(title: str) -> None:
    """What reaches the norm is the scan and its gate; without x or B or C the scan is empty but for the residual D."""
    model = without_biases(title)
    weight, info = fused_weights(model)["backbone.layers.0.mixer.in_proj.weight"]
    assert info.fused is not None
    mixer = model.get_submodule("backbone.layers.0.mixer")
    nn.init.zeros_(mixer.D)
    seen: list[tuple[Tensor, Tensor]] = []
    mixer.norm.register_forward_hook(lambda _, given, __: seen.append((given[0].clone(), given[1].clone())))
    whole = {}
    for part in ("none", "z", "x", "B", "C", "dt"):
        kept = weight.clone()
        if part != "none":
            emptied(weight, info.fused, list(runs_of(info.fused, part)))
        model(TOKENS)
        weight.copy_(kept)
        whole[part] = seen[-1]
    scanned, gate = whole["none"]
    assert scanned.any() and gate.any()
    assert not whole["z"][1].any() and torch.equal(whole["z"][0], scanned)
    for part in ("x", "B", "C"):
        assert not whole[part][0].any() and torch.equal(whole[part][1], gate), part
    assert whole["dt"][0].any() and not torch.equal(whole["dt"][0], scanned) and torch.equal(whole["dt"][1], gate)


@torch.no_grad()
def test_gated_delta_nets_keep_a_head_of_keys_together() -> None:
    model = without_biases("Qwen 3 Next")
    net = model.get_submodule("model.layers.0.linear_attn")
    infos = {info.name.split(".")[-2]: info.fused for _, info in fused_weights(model).values()}
    joined, rates = infos["in_proj_qkvz"], infos["in_proj_ba"]
    assert joined is not None and rates is not None
    numbered = [torch.arange(float(fused.length))[None, None] for fused in (joined, rates)]
    read = net.fix_query_key_value_ordering(*numbered)
    for found, name, fused in zip(read, "qkvzba", (joined,) * 4 + (rates,) * 2, strict=True):
        rows = [row for start, end in runs_of(fused, name) for row in range(start, end)]
        assert found.flatten().tolist() == rows
