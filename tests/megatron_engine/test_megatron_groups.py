"""Param groups with rates of their own: every group of a resumed run gets its own back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer import ParamKey
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron_cells import DISTRIBUTED, MAX_LR, MIN_LR, Cell
from megatron_harness import opened, trained
from megatron_types import TYPES
from ranks import run_ranks
from torch import nn

import megatron_patches
from megatron_patches.cpu import cpu_megatron
from megatron_patches.param_groups import Group, match_groups
from megatron_patches.registry import RankwiseConfig, get_megatron_optimizer
from megatron_patches.resuming import overriding_rates

Overrides = dict[str, dict[str, float]] | None
DECOUPLED: dict[str, Any] = {"decoupled_lr": 5e-2, "decoupled_min_lr": 1e-3}
BY_NAME: Overrides = {
    "*linear_fc1.weight": {"max_lr": 0.02, "min_lr": 0.01},
    "*linear_qkv.weight": {"max_lr": 0.1, "min_lr": 0.002},
    "*norm.weight": {"wd_mult": 0.0},
}
RUNS: dict[str, tuple[Cell, Overrides]] = {
    "DP2 distributed": (Cell(**DISTRIBUTED), BY_NAME),
    "DP2 bf16": (Cell(precision="bf16", optimizer=DECOUPLED), None),
    "PP2": (Cell(pp=2, optimizer=DECOUPLED), None),
    "EP2 distributed": (Cell(ep=2, moe=4, **DISTRIBUTED), {"*fc2*": {"max_lr": 0.01}, "*fc1*": {"max_lr": 0.03}}),
    "DP2 layer-wise": (Cell(optimizer={"rankwise_layer_wise": True}), BY_NAME),
}


class _Maker:
    """Builds LDAdam with some parameters' settings overridden."""

    def __init__(self, overrides: Overrides, **changed: Any) -> None:
        self.overrides, self.changed = overrides, changed

    def __call__(self, config: dict[str, Any], chunks: list[nn.Module]) -> MegatronOptimizer:
        overrides = self.overrides and {ParamKey(name=name): dict(values) for name, values in self.overrides.items()}
        given = {**config, "optimizer": "ldadam", **self.changed}
        return get_megatron_optimizer(RankwiseConfig(**given, rankwise=TYPES["ldadam"]), chunks, overrides)


def _groups(optimizer: MegatronOptimizer) -> list[Any]:
    keys = ("lr", "weight_decay", "max_lr", "min_lr", "wd_mult", "betas")
    return [
        (len(group["params"]), *map(group.get, keys))
        for wrapper in getattr(optimizer, "chained_optimizers", [optimizer])
        for group in wrapper.optimizer.param_groups
    ]


def _resumed(rank: int, world: int, folder: Path) -> None:
    with cpu_megatron():
        for label, (cell, overrides) in RUNS.items():
            target = folder / label
            target.mkdir(exist_ok=True)
            with opened(cell, _Maker(overrides)) as trainer:
                trainer.advance(2)
                trainer.save(target)
                groups = _groups(trainer.optimizer)
                whole = trained(trainer, 2)
            assert len({group[3] for group in groups}) > 1, label
            with opened(cell, _Maker(overrides)) as trainer:
                trainer.load(target)
                assert _groups(trainer.optimizer) == groups, label
                again = trained(trainer, 2)
            if whole is not None:
                assert again.losses == whole.losses, label
                assert all(torch.equal(again.weights[name], whole.weights[name]) for name in whole.weights), label


def test_every_group_keeps_its_rates(tmp_path: Path) -> None:
    run_ranks(2, _resumed, tmp_path)


def _changed(rank: int, world: int, folder: Path) -> list[list[float]]:
    """The head's rates after a resume with others, which count only if they are to override the checkpoint's."""
    cell = Cell(pp=2, optimizer=DECOUPLED)
    found = []
    with cpu_megatron():
        with opened(cell, _Maker(None)) as trainer:
            trainer.advance(1)
            trainer.save(folder)
        for override in (False, True):
            changed = {"decoupled_lr": 2e-2, "rankwise_override_checkpoint": override}
            with opened(cell, _Maker(None, **changed)) as trainer:
                trainer.load(folder)
                found.append(sorted({group[3] for group in _groups(trainer.optimizer)}))
    return found


def test_changed_rates_count_only_if_they_are_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for found in run_ranks(2, _changed, tmp_path):
        assert found == [[MAX_LR, 5e-2], [MAX_LR, 2e-2]]
    printed = capfd.readouterr().out
    assert "max_lr is 0.05 in the checkpoint and 0.02 in this run: the checkpoint's counts" in printed
    assert "max_lr is 0.05 in the checkpoint and 0.02 in this run: this run's counts" in printed


def _overwritten(rank: int, world: int, folder: Path) -> list[list[float]]:
    """The rates of a run that is to override, after a load of which Megatron 0.20 gives every group the same."""
    cell = Cell(pp=2, optimizer=DECOUPLED)
    found = []
    with cpu_megatron():
        with opened(cell, _Maker(None)) as trainer:
            trainer.advance(1)
            trainer.save(folder)
        for override in (False, True):
            changed = {"decoupled_lr": 2e-2, "rankwise_override_checkpoint": override}
            with opened(cell, _Maker(None, **changed)) as trainer:
                with overriding_rates(trainer.optimizer, trainer.scheduler):
                    trainer.load(folder)
                    for group in trainer.optimizer.param_groups if override else ():
                        group["max_lr"], group["min_lr"] = MAX_LR, MIN_LR
                    trainer.scheduler.step(increment=0)
                groups = trainer.optimizer.param_groups
                assert all(group["lr"] == trainer.scheduler.get_lr(group) for group in groups)
                found.append(sorted({group["max_lr"] for group in groups}))
    return found


def test_rates_that_are_to_override_hold_when_megatron_gives_all_groups_one(tmp_path: Path) -> None:
    for found in run_ranks(2, _overwritten, tmp_path):
        assert found == [[MAX_LR, 5e-2], [MAX_LR, 2e-2]]


def _refused(rank: int, world: int, folder: Path) -> str:
    """Rates of every group changed, and a checkpoint that does not say which parameters its groups had."""
    megatron_patches.apply()
    cell = Cell(pp=2, optimizer=DECOUPLED)
    with cpu_megatron():
        with opened(cell, _Maker(None)) as trainer:
            trainer.advance(1)
            for wrapper in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
                wrapper.members = [frozenset() for _ in wrapper.members]
            trainer.save(folder)
        with opened(cell, _Maker(None, lr=1e-3, decoupled_lr=2e-2)) as trainer:
            trainer.advance(1)
            inner = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])[0].optimizer
            before = [value.clone() for state in inner.state.values() for value in state.values()]
            with pytest.raises(ValueError, match="could be any of") as error:
                trainer.load(folder)
            after = [value for state in inner.state.values() for value in state.values()]
            assert before and all(map(torch.equal, before, after))
    return str(error.value)


def test_what_is_ambiguous_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    for message in run_ranks(2, _refused, tmp_path):
        assert "max_lr=0.05" in message and "--decoupled-lr" in message and "--no-load-optim" in message


# --- pairing ---------------------------------------------------------------------------------------------------------


def _group(max_lr: float, *members: str, wd_mult: float = 1.0, **settings: Any) -> Group:
    fixed = {"wd_mult": wd_mult, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return Group({**fixed, "max_lr": max_lr, "min_lr": 0.0, **settings}, frozenset(members))


def _rates(current: list[Group], saved: list[Group]) -> list[float | None]:
    return [settings.get("max_lr") for settings in match_groups(current, saved)]


def test_another_order() -> None:
    groups = [_group(0.1), _group(0.2), _group(0.1, wd_mult=0.0)]
    assert _rates(groups, groups[::-1]) == [0.1, 0.2, 0.1]


def test_changed_rates_are_paired_by_parameters() -> None:
    saved = [_group(0.1, "body"), _group(0.2, "head"), _group(0.1, "norm", wd_mult=0.0)]
    current = [_group(0.7, "head"), _group(0.8, "body"), _group(0.8, "norm", wd_mult=0.0)]
    assert _rates(current, saved) == [0.2, 0.1, 0.1]


def test_a_changed_rate_of_the_only_group_of_its_kind_needs_no_names() -> None:
    saved = [_group(0.1), _group(0.1, wd_mult=0.0)]
    assert _rates([_group(0.3), _group(0.3, wd_mult=0.0)], saved) == [0.1, 0.1]


def test_a_new_group_keeps_its_own() -> None:
    assert _rates([_group(0.1, "body"), _group(0.2, "head")], [_group(0.1, "body", "head")]) == [0.1, None]


def test_rates_that_an_earlier_resume_overwrote_are_left_where_they_are() -> None:
    assert _rates([_group(0.1), _group(0.2)], [_group(0.2), _group(0.2)]) == [None, 0.2]


def test_equal_groups_are_paired_by_parameters() -> None:
    saved = [_group(0.1, "a", betas=(0.8, 0.9)), _group(0.1, "b", betas=(0.7, 0.9))]
    found = match_groups([_group(0.1, "b"), _group(0.1, "a")], saved)
    assert [settings["betas"] for settings in found] == [(0.7, 0.9), (0.8, 0.9)]


AMBIGUOUS = {
    "two changed": ([_group(0.3), _group(0.4)], [_group(0.1), _group(0.2)]),
    "one of two": ([_group(0.3)], [_group(0.1), _group(0.2)]),
    "merged": ([_group(0.3, "body", "head")], [_group(0.1, "body"), _group(0.2, "head")]),
    "equal but for a state": ([_group(0.1)], [_group(0.1, lr=0.01), _group(0.1, lr=0.02)]),
}


@pytest.mark.parametrize("label", AMBIGUOUS)
def test_ambiguous(label: str) -> None:
    current, saved = AMBIGUOUS[label]
    with pytest.raises(ValueError, match="could be any of"):
        match_groups(current, saved)
