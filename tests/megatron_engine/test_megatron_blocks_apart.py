"""Under Megatron the blocks of fused weights follow weights of their own, fed the same reduced gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_cells import HEADS, HIDDEN, Cell
from megatron_harness import Trainer, opened, trained
from megatron_statistics import Seen, inner_optimizers, watch
from megatron_types import maker
from ranks import run_ranks
from torch import Tensor, nn

import megatron_patches
from megatron_patches.cpu import cpu_megatron
from rankwise.routing.roles import ParameterInfo, Role, attach_info

STEPS = 3
NAMES = ("mars-shampoo", "mars-m", "ldadam", "mkor")
OPTIONS = {"ldadam": {"rank": 4}, "mkor": {"update_interval": 1}}
CELLS = {"TP2": (2, Cell(tp=2, clip=0.0)), "TP2 DP2": (4, Cell(tp=2, clip=0.0, use_distributed_optimizer=True))}
_HEAD, _GROUPS = HIDDEN // HEADS, HEADS // 2
# For each group of query heads, two of these, a key and a value; then a gate over what it multiplies.
ROWS = {
    "linear_qkv": {
        "q": [4 * _HEAD * group + row for group in range(_GROUPS) for row in range(2 * _HEAD)],
        "k": [4 * _HEAD * group + 2 * _HEAD + row for group in range(_GROUPS) for row in range(_HEAD)],
        "v": [4 * _HEAD * group + 3 * _HEAD + row for group in range(_GROUPS) for row in range(_HEAD)],
    },
    "linear_fc1": {"gate": [*range(2 * HIDDEN)], "up": [*range(2 * HIDDEN, 4 * HIDDEN)]},
}


class _Twin:
    """A linear layer for each block, and an optimizer like Megatron's of them."""

    def __init__(self, inner: Any, weights: dict[str, Tensor]) -> None:
        self.inner, self.layers = inner, nn.ModuleDict()
        self.rows: dict[str, tuple[str, list[int]]] = {}
        for name, weight in weights.items():
            for part, rows in ROWS.get(name.split(".")[-2] if "." in name else "", {}).items():
                if name.endswith("weight"):
                    self._add(f"{name}[{part}]", name, rows, weight)
        options = {name: getattr(inner.options, name) for name in inner.options.names()}
        self.optimizer = type(inner)([layer.weight for layer in self.layers.values()], **options)
        self.optimizer.capture(self.layers)

    def _add(self, block: str, name: str, rows: list[int], weight: Tensor) -> None:
        layer = nn.Linear(weight.shape[1], len(rows), bias=False)
        layer.weight.data.copy_(weight[rows])
        attach_info(layer.weight, ParameterInfo(block, tuple(layer.weight.shape), Role.LINEAR))
        self.layers[block.replace(".", " ")] = layer
        self.rows[block] = name, rows

    def step(self, seen: Seen) -> None:
        """With the gradients and statistics of a step of Megatron's."""
        for layer, (name, rows) in zip(self.layers.values(), self.rows.values(), strict=True):
            if name in seen.vectors:  # One token whose input and output gradient are what Megatron's average to.
                inputs, outputs, _ = seen.vectors[name]
                layer(inputs[None]).backward(outputs[None, rows])
            layer.weight.grad = seen.gradients[name][rows].clone()
        self.optimizer.step()

    def follow_rate(self) -> None:
        """Of the weights' group, before a step."""
        group = max(self.inner.param_groups, key=lambda group: group["weight_decay"])
        self.optimizer.param_groups[0].update({key: group[key] for key in self.inner.declared.group_options})

    def gap(self, start: dict[str, Tensor], final: dict[str, Tensor]) -> float:
        """Of Megatron's weights, in the largest change."""
        gaps, changes = [], []
        for layer, (name, rows) in zip(self.layers.values(), self.rows.values(), strict=True):
            gaps.append(float((final[name][rows] - layer.weight.detach()).abs().max()))
            changes.append(float((final[name][rows] - start[name][rows]).abs().max()))
        return max(gaps) / max(changes)


def _gap(trainer: Trainer) -> tuple[float, set[str], int]:
    """How far the weights are from their twins', their names, and of how many weights statistics came; on rank 0."""
    start, _ = trainer.weights()
    twin = _Twin(inner_optimizers(trainer)[0], start) if start else None
    for _ in range(STEPS):
        seen = watch(trainer, None if twin is None else lambda trainer: twin.follow_rate())
        if twin is not None:
            twin.step(seen)
    final, _ = trainer.weights()
    return (0.0, set(), 0) if twin is None else (twin.gap(start, final), set(twin.rows), len(seen.vectors))


def _all(rank: int, world: int, cell: Cell) -> list[tuple[float, set[str], int]]:
    found = []
    with cpu_megatron():
        for name in NAMES:
            with opened(cell, maker(name, **OPTIONS.get(name, {}))) as trainer:
                found.append(_gap(trainer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("label", ["TP2", pytest.param("TP2 DP2", marks=pytest.mark.exhaustive)])
def test_blocks_follow_weights_of_their_own(label: str) -> None:
    world, cell = CELLS[label]
    for name, (gap, blocks, watched) in zip(NAMES, run_ranks(world, _all, cell)[0], strict=True):
        assert len(blocks) == 2 * 5, (name, blocks)
        assert watched == (2 * 4 if name == "mkor" else 0), (name, watched)
        assert gap <= 1e-5, (name, gap)


def _divided_otherwise(rank: int, world: int, folder: Path) -> dict[str, set[str]]:
    """Saved with fused weights as one matrix each, continued with their blocks."""
    cell, found = CELLS["TP2"][1], {}
    megatron_patches.apply()
    with cpu_megatron():
        for name in ("ldadam", "mkor"):
            (folder / name).mkdir(exist_ok=True)
            options = {"rank": 4} if name == "ldadam" else {}
            with opened(cell, maker(name, blocks={"*": "none"}, **options)) as trainer:
                trained(trainer, 1)
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
                trained(trainer, 1)
    return found


@pytest.mark.slow
def test_a_checkpoint_of_other_matrices_continues(tmp_path: Path) -> None:
    found = [ranks for ranks in run_ranks(2, _divided_otherwise, tmp_path)]
    for name in ("ldadam", "mkor"):
        states = set().union(*(ranks[name] for ranks in found))
        assert any("linear_proj" in key for key in states), (name, states)
        own = {key.rpartition(" ")[2] for key in states if "linear_qkv" in key}
        # All blocks see the same inputs; else what blocks keep starts afresh.
        assert own == ({"right"} if name == "mkor" else set()), (name, own)
