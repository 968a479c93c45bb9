"""Under Megatron the blocks of fused weights follow weights of their own, fed the same reduced gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron_cells import HEADS, HIDDEN, Cell
from megatron_harness import Trainer, opened, trained
from megatron_types import maker
from megatron_weights import reduced_gradient
from ranks import run_ranks
from torch import Tensor, nn

import megatron_patches
from megatron_patches.cpu import cpu_megatron
from rankwise.routing.roles import ParameterInfo, Role, attach_info

STEPS = 3
NAMES = ("mars-shampoo", "mars-m", "ldadam")
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


def _twin(inner: Any, weights: dict[str, Tensor]) -> tuple[dict[tuple[str, str], nn.Parameter], Any]:
    """A parameter for each block, and an optimizer like Megatron's of them."""
    parts = {}
    for name, weight in weights.items():
        for part, rows in ROWS.get(name.split(".")[-2] if "." in name else "", {}).items():
            if name.endswith("weight"):
                parts[name, part] = nn.Parameter(weight[rows].clone())
                own = f"{name}.{part}"
                attach_info(parts[name, part], ParameterInfo(own, tuple(parts[name, part].shape), Role.LINEAR))
    options = {name: getattr(inner.options, name) for name in inner.options.names()}
    return parts, type(inner)(list(parts.values()), **options)


def _gap(trainer: Trainer) -> tuple[float, set[str]]:
    """How far the weights are from their twins', in the largest change; on rank 0."""
    inner = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])[0].optimizer
    found: dict[str, Any] = {"start": trainer.weights()[0]}
    parts, twin = _twin(inner, found["start"]) if found["start"] else ({}, None)

    def follow(trainer: Trainer) -> None:
        grads, _ = trainer.weights(reduced_gradient)
        if twin is None:
            return
        for (name, part), parameter in parts.items():
            parameter.grad = grads[name][ROWS[name.split(".")[-2]][part]].clone()
        group = max(inner.param_groups, key=lambda group: group["weight_decay"])
        twin.param_groups[0].update({key: group[key] for key in inner.declared.group_options})
        twin.step()

    for _ in range(STEPS):
        trainer.train_step(follow)
    final, _ = trainer.weights()
    if twin is None:
        return 0.0, set()
    gaps, changes = [], []
    for (name, part), parameter in parts.items():
        rows = ROWS[name.split(".")[-2]][part]
        gaps.append(float((final[name][rows] - parameter.detach()).abs().max()))
        changes.append(float((final[name][rows] - found["start"][name][rows]).abs().max()))
    return max(gaps) / max(changes), {f"{name}[{part}]" for name, part in parts}


def _all(rank: int, world: int, cell: Cell) -> list[tuple[float, set[str]]]:
    found = []
    with cpu_megatron():
        for name in NAMES:
            options = {"rank": 4} if name == "ldadam" else {}
            with opened(cell, maker(name, **options)) as trainer:
                found.append(_gap(trainer))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("label", ["TP2", pytest.param("TP2 DP2", marks=pytest.mark.exhaustive)])
def test_blocks_follow_weights_of_their_own(label: str) -> None:
    world, cell = CELLS[label]
    for name, (gap, blocks) in zip(NAMES, run_ranks(world, _all, cell)[0], strict=True):
        assert len(blocks) == 2 * 5, (name, blocks)
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
