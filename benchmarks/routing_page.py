"""The page that says which weights of which model take which rule, from the table that tests hold it to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.architectures import ARCHITECTURES, Architecture
from rankwise.routing.fused_shape import FusedShape

__all__ = ["routing_page", "words"]

_HEAD = """# Which weights take which rule

Written by `python -m benchmarks routing` from the table in
[benchmarks/architectures.py](../benchmarks/architectures.py). Tests hold a tiny model of every row to it, without any
configuration, and check against the forward passes of most that the rows of a block are what the model uses as it.

Weights of two dimensions and stacks of such take the rule for matrices, as what they are in the model; norms, biases
and other vectors take the first-order fallback, as do embeddings, output heads, routers and convolutions. (MARS-AdamW,
MARS-Lion and SONew treat all weights alike; `"exclude"` and a param group's `"fallback"` overrule the table.)

## Fused weights

A weight may hold several matrices: queries, keys and values, a gate and what it multiplies, experts: its blocks. Where
they lie is read from the classes of the modules and from their numbers (heads, sizes), those of the model's `config`
included; under Megatron from its `TransformerConfig`. Nothing is guessed: a weight whose module's class is not known,
or whose size is not the sum of its parts, stays one matrix. In plain PyTorch, `rankwise.annotate(model)` before the
optimizer is built shows it the modules; under DeepSpeed and Megatron that happens by itself. Fused weights
[end where separate ones do](blocks.md).

Another model is a row of the table in [fused_layers.py](../rankwise/routing/fused_layers.py): the name of the layer,
the class of the module that uses it, and how its parts lie.

- *per head*: the rows of one head together, then those of the next;
- *per key head*: the same, with all the queries that share a head of keys;
- *per group of heads*: the same of several heads, as CodeGen was laid out over four processors;
- *in turns*: row by row (or column by column);
- *columns*: of weights that are stored as (inputs, outputs), as GPT-2's `Conv1D` and some experts are.

A state-space layer's `in_proj` is one weight for the sake of one product: gate (`z`), input (`x`), `B`, `C` and time
steps (`dt`) meet in the state-space equations alone, and each has another scale there. They are blocks of their own,
like the queries, gates and decays of gated delta nets.

Latent attention's `kv_a_proj_with_mqa` holds what keys and values are made of, and the part of all heads' keys that has
positions. Its `q_b_proj` is one matrix: both of its parts are queries.

| model | fused weights and their blocks | one matrix (or a stack) | fallback |
|---|---|---|---|
"""

_TAIL = """
## Megatron

| weight | blocks |
|---|---|
| `linear_qkv` | per key head: q, k, v; with `attention_output_gate`: q, gate, k, v |
| `linear_kv` of cross-attention | per head: k, v |
| `linear_kv_down_proj` | kv, k_rope |
| `linear_kv_up_proj` | per head: k, v |
| `linear_fc1` with a gated unit, of experts and shared experts, too | gate, up |
| `in_proj` of Mamba layers | z, x, B, C, dt |
| `in_proj` of gated delta nets | q, k, v, gate, beta, alpha |

These are the blocks of the whole weight, whatever the tensor-parallel size; with `rankwise_tp_mode="block"` those of
every rank's own shard, as far as whole groups of heads lie in it. A legacy `GroupedMLP`'s joined experts are not split.
"""

_LOSSES = Path(__file__).resolve().parent.parent / "docs/data/fused-weights.json"
_TRIED = """
## What it does to the loss

Validation loss of the small GPT of `make train`, whose fused weights are the `c_attn`s alone
({command}; commit {commit}):

| type | blocks: q, k, v | one matrix | a matrix for each head |
|---|---|---|---|
{rows}
One seed and no search of rates: differences below 0.01 say nothing. Heads have 32 rows here, of which LDAdam at rank 32
saves nothing, so its weights keep their blocks.
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
