"""The page that says which weights of which model take which rule, from the table that tests hold it to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.architectures import ARCHITECTURES, Architecture
from rankwise.routing.fused_shape import FusedShape

__all__ = ["routing_page", "words"]

_HEAD = """# Which weights take which rule

This page says which weights of a model the optimizer treats as matrices, and how it divides fused weights into their
matrices. The short answer:

- Two-dimensional weights and stacks of them use the matrix rule.
- Norms, biases and other vectors, embeddings, output heads, routers and convolutions use the first-order fallback.
- A fused weight (QKV, gate and up) is several matrices, without any configuration.
- MARS-AdamW, MARS-Lion and SONew treat all weights alike.
- `"exclude"` and a param group's `"fallback"` overrule the table.

`rankwise explain` prints the rule of every parameter of your model. `python -m benchmarks routing` writes this page
from the table in [benchmarks/architectures.py](../benchmarks/architectures.py). Tests build a tiny model for every row
and compare. For most rows they also check, with the forward pass, that the rows of a block are what the model uses as
it.

## Fused weights

A fused weight holds several matrices, its *blocks*: queries, keys and values; a gate and what it multiplies; experts.
rankwise reads where the blocks lie from the classes of the modules, from their numbers (heads, sizes) and from the
model's `config`; under Megatron from its `TransformerConfig`. It does not guess: a weight stays one matrix if the class
of its module is unknown, or if its size is not the sum of its parts. In plain PyTorch, call `rankwise.annotate(model)`
before the optimizer is built, so that it sees the modules. Under DeepSpeed and Megatron this happens by itself. Fused
weights [end where separate ones do](blocks.md).

To support another model, add a row to the table in [fused_layers.py](../rankwise/routing/fused_layers.py): the name of
the layer, the class of the module that uses it, and how its parts lie. The table below uses these words:

- *per head*: the rows of one head together, then those of the next;
- *per key head*: the same, with all the queries that share a head of keys;
- *per group of heads*: the same for several heads, as CodeGen was laid out over four processors;
- *in turns*: row by row (or column by column);
- *columns*: of weights that are stored as (inputs, outputs), as GPT-2's `Conv1D` and some experts are.

A state-space layer's `in_proj` is one weight only to make one product. Gate (`z`), input (`x`), `B`, `C` and time steps
(`dt`) meet in the state-space equations alone, and each has another scale there. So each is a block of its own, like
the queries, gates and decays of gated delta nets.

Latent attention's `kv_a_proj_with_mqa` has two blocks: what keys and values are made of, and the part of all heads'
keys that has positions. Its `q_b_proj` is one matrix, because both of its parts are queries.

With `"split_heads": true` each attention head is a matrix, in fused weights and in layers of queries, keys or values
alone (`q_proj`, `wq`, `query`, `q_b_proj`, Megatron's `linear_q_up_proj` and their like), where the modules tell the
number of heads. One line at the start says how many heads of which layers became matrices; if none did, that is an
error. A head's keys and values in `kv_b_proj` or `wkv_b` are two matrices; `"blocks": {"*kv_b_proj.weight": "groups"}`
makes one of them, as DeepSeek's and Kimi's recipes in DeepSpeed and torchtitan do.

| model | fused weights and their blocks | one matrix (or a stack) | fallback |
|---|---|---|---|
"""

_TAIL = """
## Megatron

| weight | blocks |
|---|---|
| `linear_qkv` | per key head: q, k, v; with `attention_output_gate`: q, gate, k, v |
| `linear_q`; `linear_q_proj`, `linear_q_up_proj` of latent attention | one; with `split_heads` one per head |
| `linear_kv` of cross-attention | per head: k, v |
| `linear_kv_down_proj` | kv, k_rope |
| `linear_kv_up_proj` | per head: k, v |
| `linear_fc1` with a gated unit, of experts and shared experts, too | gate, up |
| `in_proj` of Mamba layers | z, x, B, C, dt |
| `in_proj` of gated delta nets | q, k, v, gate, beta, alpha |

These are the blocks of the whole weight, whatever the tensor-parallel size. With `rankwise_tp_mode="block"` they are
the blocks of each rank's own shard, as far as whole groups of heads lie in it. The joined experts of a legacy
`GroupedMLP` are not split.
"""

_LOSSES = Path(__file__).resolve().parent.parent / "docs/data/fused-weights.json"
_TRIED = """
## What it does to the loss

The table shows the validation loss of the small GPT of `make train`. Its only fused weights are the `c_attn`s
({command}; commit {commit}).

| type | blocks: q, k, v | one matrix | a matrix for each head |
|---|---|---|---|
{rows}
This is one seed without a search of rates: differences below 0.01 say nothing. Heads have 32 rows here. LDAdam at rank
32 saves nothing on such a matrix, so its weights kept their blocks; `split_heads` is refused today where no weight has
heads that fit the rule.
"""


def words(fused: FusedShape) -> str:
    """The blocks of a weight, in words."""
    names = [name for name, _ in fused.parts]
    if all(name.startswith("expert") for name in names):
        names = ["expert 0", "expert 1", "…"]
    text = ", ".join(names)
    if fused.groups > 1:
        by = _repeated([each for each in fused.heads if each])
        text = f"{text} in turns" if {size for _, size in fused.parts} == {1} else f"{by}: {text}"
    return f"columns: {text}" if fused.dim == -1 else text


def _repeated(heads: Sequence[int]) -> str:
    if not heads:
        return "per group"
    if set(heads) == {1}:
        return "per head"
    return "per key head" if 1 in heads else "per group of heads"


def routing_page(table: Mapping[str, Architecture] = ARCHITECTURES) -> str:
    """The whole page."""
    return _HEAD + "".join(f"| {title} | {_row(each)} |\n" for title, each in table.items()) + _TAIL + _tried()


def _tried() -> str:
    known = json.loads(_LOSSES.read_text())
    rows = "".join(
        f"| {name} | " + " | ".join(f"{loss:.4f}" for loss in losses.values()) + " |\n"
        for name, losses in known["validation_loss"].items()
    )
    return _TRIED.format(command=known["command"], commit=known["commit"], rows=rows)


def _row(architecture: Architecture) -> str:
    fused = "; ".join(f"`{_short(name)}` {words(each)}" for name, each in architecture.blocks.items())
    return " | ".join((fused or "none", _listed(architecture.whole), _listed(architecture.fallback)))


def _listed(patterns: Iterable[str]) -> str:
    return ", ".join(f"`{_short(pattern)}`" for pattern in patterns) or "none"


def _short(pattern: str) -> str:
    return pattern.removeprefix("*.").removesuffix(".weight").strip("*").removesuffix(".")
