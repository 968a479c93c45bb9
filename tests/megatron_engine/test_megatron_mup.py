"""MuP's overrides of rates and eps, made for Adam: what they become for ours, and that every layout follows."""

from __future__ import annotations

from functools import partial
from typing import Any

import megatron.core.optimizer as core
import pytest
from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron_cells import DISTRIBUTED, MAX_LR, MIN_LR, Cell
from megatron_harness import move, opened, trained
from megatron_types import EPS, TYPES
from megatron_weights import initial
from ranks import run_ranks
from torch import nn

from megatron_patches.cpu import cpu_megatron
from megatron_patches.registry import RankwiseConfig, get_megatron_optimizer

WIDTH = 4.0
CELLS = {"TP2": Cell(tp=2, **DISTRIBUTED), "DP2": Cell(**DISTRIBUTED), "PP2": Cell(pp=2)}
ORTHOGONAL = ("mars-shampoo", "mars-m")


def mup(config: OptimizerConfig, kind: str) -> dict[ParamKey, Any]:
    """Megatron's own from 0.18 on; before, the same for Adam."""
    if hasattr(core, "get_mup_config_overrides"):
        return core.get_mup_config_overrides(config, WIDTH, kind)
    predicate = ParamWithNamePredicate(
        "mup_hidden_and_output", lambda parameter, name: parameter.dim() > 1 and "embedding" not in name.lower()
    )
    rates = {"max_lr": config.lr / WIDTH, "min_lr": config.min_lr / WIDTH}
    eps = {"eps": config.adam_eps / WIDTH} if "adam" in kind else {}
    return {ParamKey(with_name_predicate=predicate): {**rates, **eps}}


def _make(name: str, kind: str, config: dict[str, Any], chunks: list[nn.Module]) -> Any:
    """As ``megatron.training`` and Megatron-Bridge: the standard overrides, and MuP's for the optimizer's name."""
    given = RankwiseConfig(**{**config, "optimizer": name, "rankwise": {"eps": EPS / 2, **TYPES[name]}})
    overrides = {**get_standard_config_overrides(given), **mup(given, kind)}
    return get_megatron_optimizer(given, chunks, config_overrides=overrides)


def _groups(rank: int, world: int, cases: tuple[tuple[str, str], ...]) -> Any:
    found = {}
    with cpu_megatron():
        for name, kind in cases:
            with opened(Cell(), partial(_make, name, kind)) as trainer:
                (wrapper,) = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
                inner = wrapper.optimizer
                names = {id(p): n for n, p in inner.table.parameters.items()}
                trainer.advance(1)
                found[name, kind] = {
                    names[id(p)]: (group["max_lr"], group["min_lr"], group["lr"] / group["max_lr"], group.get("eps"))
                    for group in inner.param_groups
                    for p in group["params"]
                }
    return found


def test_matrices_take_their_share_of_rates_and_eps() -> None:
    cases = (("ldadam", "ldadam"), ("mars-m", "mars-m"), ("mars-m", "adam"))
    for (name, kind), groups in run_ranks(1, _groups, cases)[0].items():
        for parameter, (high, low, schedule, eps) in groups.items():
            hidden = "layers" in parameter and "layernorm" not in parameter
            scaled = parameter.startswith("output_layer") or (hidden and name not in ORTHOGONAL)
            share = WIDTH if scaled else 1.0
            assert (high, low) == (MAX_LR / share, MIN_LR / share), (name, kind, parameter)
            assert 0.9 < schedule < 1.0
            assert eps == EPS / 2 / (WIDTH if scaled and "adam" in kind else 1.0), (name, kind, parameter)


def _all(rank: int, world: int, names: tuple[str, ...], cells: dict[str, Cell]) -> Any:
    with cpu_megatron():
        found = {}
        for name in names:
            for label, cell in cells.items():
                with opened(cell, partial(_make, name, name)) as trainer:
                    found[name, label] = trained(trainer, 3)
        return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TYPES)
def test_every_layout_follows_one_process(name: str) -> None:
    (one,) = run_ranks(1, _all, (name,), {"one": Cell()})[0].values()
    start = {key: initial(key, weight.shape) for key, weight in one.weights.items()}
    for key, result in run_ranks(2, _all, (name,), CELLS)[0].items():
        found = move(result.weights, one.weights, start)
        print(key, found)
        assert found.largest < 2e-2 and found.mean < 1e-4, (key, found)
