"""Under Megatron the blocks of fused weights follow weights of their own, fed the same reduced gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from megatron_cells import DISTRIBUTED, DTYPES, HEADS, HIDDEN, LATENT, Cell
from megatron_harness import Trainer, opened
from megatron_latent import LatentTrainer, any_megatron
from megatron_statistics import Seen, inner_optimizers, watch
from megatron_types import TYPES, maker
from ranks import run_ranks
from torch import Tensor, nn

import megatron_patches
from megatron_patches.cpu import cpu_megatron
from rankwise.routing.roles import ParameterInfo, Role, attach_info

STEPS = 3
NAMES = ("mars-shampoo", "mars-m", "ldadam", "mkor")
OPTIONS = {"ldadam": {"rank": 2}, "mkor": {"update_interval": 1}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, {"tp": 2, "clip": 0.0}),
    "TP2 DP2": (4, {"tp": 2, "clip": 0.0, **DISTRIBUTED}),
}
FUSED = ("linear_qkv", "linear_fc1", "linear_kv_down_proj", "linear_kv_up_proj", "linear_q_proj")
_HEAD, _GROUPS = HIDDEN // HEADS, HEADS // 2
_KEY, _VALUE = LATENT["qk_head_dim"], LATENT["v_head_dim"]


def rows_of(name: str, shape: torch.Size, heads: bool) -> dict[str, list[int]]:
    """The rows of each matrix in a weight of Megatron's; none where it is one."""
    if not name.endswith(".weight"):
        return {}
    layer = name.split(".")[-2]
    if layer == "linear_fc1":  # a gate over what it multiplies
        return {"gate": [*range(shape[0] // 2)], "up": [*range(shape[0] // 2, shape[0])]}
    if layer == "linear_kv_down_proj":
        kv = LATENT["kv_lora_rank"]
        return {"kv": [*range(kv)], "k_rope": [*range(kv, shape[0])]}
    if layer == "linear_qkv":  # for each group of query heads two of these, a key and a value
        order = [f"{part}.{head}" for group in range(_GROUPS) for part, head in _of_group(group)]
        return _together([(block, _HEAD) for block in order], heads)
    if layer == "linear_kv_up_proj":
        sizes = [(f"{part}.{head}", size) for head in range(HEADS) for part, size in (("k", _KEY), ("v", _VALUE))]
        return _together(sizes, heads)
    if layer == "linear_q_proj" and heads:
        return _together([(f"q.{head}", _KEY + LATENT["qk_pos_emb_head_dim"]) for head in range(HEADS)], heads)
    return {}


def _of_group(group: int) -> list[tuple[str, int]]:
    return [("q", 2 * group), ("q", 2 * group + 1), ("k", group), ("v", group)]


def _together(sizes: list[tuple[str, int]], heads: bool) -> dict[str, list[int]]:
    """Rows of blocks that follow each other, those of a part's heads in one if heads are not apart."""
    found: dict[str, list[int]] = {}
    start = 0
    for block, size in sizes:
        found.setdefault(block if heads else block.partition(".")[0], []).extend(range(start, start + size))
        start += size
    return found


@dataclass(frozen=True)
class Kind:
    """A model whose fused weights are watched, and how it is divided.

    Attributes:
        blocks: How many matrices fused weights hold in it, and how many weights are linear layers with statistics.
        moved: Whether rows are given to other parts than theirs.
    """

    model: dict[str, Any]
    blocks: tuple[int, int]
    heads: bool = False
    moved: bool = False

    def options(self, name: str) -> dict[str, Any]:
        wrong = {"*linear_qkv.weight": {"q": 33, "k": 15, "v": 16, "groups": 2}, "*linear_fc1.weight": [129, 127]}
        return {**OPTIONS.get(name, {}), "split_heads": self.heads, "blocks": wrong if self.moved else None}


KINDS = {
    "parts and experts": Kind({"moe": 4, "dense_layers": 1, "sp": True}, (2 * 3 + 5 * 2, 2 * 2 + 5 * 2)),
    "heads": Kind({"layers": 1}, (8 + 2, 4), heads=True),
    "latent": Kind({"layers": 1, "latent": True}, (2 + 2 + 2, 6)),
    "latent heads": Kind({"layers": 1, "latent": True}, (2 + 8 + 2 + HEADS, 6), heads=True),
    "moved": Kind({"layers": 1}, (3 + 2, 4), moved=True),
}


class _Twin:
    """A linear layer for each block, and an optimizer like Megatron's of them, in ``dtype``."""

    def __init__(self, inner: Any, weights: dict[str, Tensor], heads: bool, dtype: torch.dtype) -> None:
        self.inner, self.layers = inner, nn.ModuleDict()
        self.rows: dict[str, tuple[str, list[int]]] = {}
        for name, weight in weights.items():
            for part, rows in rows_of(name, weight.shape, heads).items():
                self._add(f"{name}[{part}]", name, rows, weight.to(dtype))
        options = {
            name: getattr(inner.options, name)
            for name in inner.options.names()
            if name not in ("blocks", "split_heads")
        }
        inside = str(dtype).removeprefix("torch.")
        options |= {name: inside for name, value in options.items() if name.endswith("dtype") and value == "float32"}
        self.optimizer = type(inner)([layer.weight for layer in self.layers.values()], **options)
        self.optimizer.capture(self.layers)

    def _add(self, block: str, name: str, rows: list[int], weight: Tensor) -> None:
        layer = nn.Linear(weight.shape[1], len(rows), bias=False, dtype=weight.dtype)
        layer.weight.data.copy_(weight[rows])
        attach_info(layer.weight, ParameterInfo(block, tuple(layer.weight.shape), Role.LINEAR))
        self.layers[block.replace(".", " ")] = layer
        self.rows[block] = name, rows

    def step(self, seen: Seen) -> None:
        """With the gradients and statistics of a step of Megatron's."""
        for layer, (name, rows) in zip(self.layers.values(), self.rows.values(), strict=True):
            if name in seen.vectors:  # One token whose input and output gradient are what Megatron's average to.
                inputs, outputs = (vector.to(layer.weight.dtype) for vector in seen.vectors[name][:2])
                layer(inputs[None]).backward(outputs[None, rows])
            layer.weight.grad = seen.gradients[name][rows].to(layer.weight.dtype)
        self.optimizer.step()

    def follow_rate(self) -> None:
        """Of the weights' group, before a step."""
        group = max(self.inner.param_groups, key=lambda group: group["weight_decay"])
        self.optimizer.param_groups[0].update({key: group[key] for key in self.inner.spec.group_options})

    def change(self, start: dict[str, Tensor]) -> float:
        """The largest of all weights."""
        found = ((layer.weight - start[name][rows]).abs().max() for layer, name, rows in self._places())
        return float(max(found))

    def gaps(self, final: dict[str, Tensor]) -> dict[str, float]:
        """Of each block of Megatron's weights."""
        found = [(final[name][rows] - layer.weight).abs().max() for layer, name, rows in self._places()]
        return dict(zip(self.rows, map(float, found), strict=True))

    def rounding(self, other: _Twin) -> float:
        """The largest difference of two twins."""
        both = zip(self.layers.values(), other.layers.values(), strict=True)
        return max(float((mine.weight - theirs.weight).abs().max()) for mine, theirs in both)

    def _places(self) -> Iterator[tuple[nn.Module, str, list[int]]]:
        for layer, (name, rows) in zip(self.layers.values(), self.rows.values(), strict=True):
            yield layer, name, rows


class Figures(NamedTuple):
    """How far each block is from its twin, in the largest change, and how far the twin is from one in float64 that is
    fed the same; how many weights statistics came of, and of what type weights were."""

    gaps: dict[str, float]
    rounding: float
    watched: int
    dtype: torch.dtype


@torch.no_grad()
def _small(trainer: Trainer) -> None:
    """Divide fused weights, or a step would be lost in their rounding in fp32."""
    for name, weight in trainer.chunks[0].named_parameters():
        if any(layer in name for layer in FUSED):
            weight.div_(16.0)


def _figures(trainer: Trainer, heads: bool) -> Figures | None:
    """On rank 0."""
    _small(trainer)
    start, _ = trainer.weights()
    inner, dtype = inner_optimizers(trainer)[0], next(trainer.chunks[0].parameters()).dtype
    twins = [_Twin(inner, start, heads, own) for own in (dtype, torch.float64)] if start else []

    def follow(trainer: Trainer) -> None:
        for twin in twins:
            twin.follow_rate()

    for _ in range(STEPS):
        seen = watch(trainer, follow)
        for twin in twins:
            twin.step(seen)
    final, _ = trainer.weights()
    if not twins:
        return None
    twin, wide = twins
    with torch.no_grad():
        change = twin.change(start)
        gaps = {block: gap / change for block, gap in twin.gaps(final).items()}
        return Figures(gaps, twin.rounding(wide) / change, len(seen.vectors), final["output_layer.weight"].dtype)


def _all(
    rank: int, world: int, layout: dict[str, Any], precision: str, labels: list[str]
) -> dict[tuple[str, str], Figures | None]:
    found = {}
    with any_megatron(precision):
        for label in labels:
            kind = KINDS[label]
            cell = Cell(**layout, **kind.model, precision=precision)
            for name in NAMES:
                wide = {key: "float64" for key in TYPES[name] if key.endswith("dtype") and precision == "fp64"}
                make = maker(name, **wide, **kind.options(name))
                with opened(cell, make, LatentTrainer if cell.latent else None) as trainer:
                    found[label, name] = _figures(trainer, kind.heads)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "precision", "labels"),
    [
        ("TP2", "fp32", [*KINDS]),
        ("TP2 DP2", "fp64", ["latent heads"]),
        pytest.param("TP2", "fp64", [*KINDS], marks=pytest.mark.exhaustive),
        pytest.param("TP2 DP2", "fp64", [*KINDS], marks=pytest.mark.exhaustive),
        pytest.param("TP2 DP2", "fp32", [*KINDS], marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: "all" if value == [*KINDS] else "heads" if isinstance(value, list) else value,
)
def test_blocks_follow_weights_of_their_own(layout: str, precision: str, labels: list[str]) -> None:
    world, cell = LAYOUTS[layout]
    for (label, name), found in run_ranks(world, _all, cell, precision, labels)[0].items():
        blocks, linear = KINDS[label].blocks
        assert len(found.gaps) == blocks and found.dtype is DTYPES[precision], (label, name, found)
        assert found.watched == (linear if name == "mkor" else 0), (label, name, found)
        if KINDS[label].moved:
            assert min(gap for block, gap in found.gaps.items() if not block.endswith("[v]")) > 1e-4, (name, found)
        else:
            # Small singular values make more of the rounding of fp32: no more than in the twin itself.
            allowed = 1e-10 if precision == "fp64" else max(1e-6, 2.0 * found.rounding)
            assert max(found.gaps.values()) <= allowed, (label, name, found)


def _divided_otherwise(rank: int, world: int, folder: Path) -> dict[str, set[str]]:
    """Saved with fused weights as one matrix each, continued with their blocks."""
    cell, found = Cell(**LAYOUTS["TP2"][1]), {}
    megatron_patches.apply()
    with cpu_megatron():
        for name in ("ldadam", "mkor"):
            (folder / name).mkdir(exist_ok=True)
            options = {"rank": 4} if name == "ldadam" else {}
            with opened(cell, maker(name, blocks={"*": "none"}, **options)) as trainer:
                trainer.advance(1)
                trainer.save(folder / name)
            with opened(cell, maker(name, **options)) as trainer:
                trainer.load(folder / name)
                inner = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])[0].optimizer
                found[name] = {
                    f"{key.removeprefix('decoder.layers.')} {state}"
                    for key, states in inner.matrix_states.everything().items()
                    for state in states
                    if key.startswith("decoder.layers.0") and bool(states[state].count_nonzero())
                }
                trainer.advance(1)
    return found


@pytest.mark.slow
def test_a_checkpoint_of_other_matrices_continues(tmp_path: Path) -> None:
    found = [ranks for ranks in run_ranks(2, _divided_otherwise, tmp_path)]
    for name in ("ldadam", "mkor"):
        states = set().union(*(ranks[name] for ranks in found))
        assert any("linear_proj" in key for key in states), (name, states)
        own = {key.rpartition(" ")[2] for key in states if "linear_qkv" in key}
        # All blocks see the same inputs; else what blocks keep starts afresh.
        assert own == ({"right_vectors", "right_weights"} if name == "mkor" else set()), (name, own)
