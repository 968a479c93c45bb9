"""ZeRO-3's sub-groups: MKOR steps a bias with its weight wherever one of them ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ds_harness as ds
import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from ds_harness import run_ranks
from torch import Tensor, nn

from deepspeed_plugin import registry
from deepspeed_plugin.sub_groups import sub_groups_with_whole_layers
from rankwise.layout.layout import LayoutError
from rankwise.mkor import preconditioned_matrices as rule
from rankwise.plan.checkpoint_mismatch import MisfitError
from rankwise.routing.roles import ParameterInfo, annotate, attach_info

SIZES = (1, 40, 150, 10**9)
STEPS = 8


def _job(name: str, size: int) -> ds.Job:
    job = ds.Job(name, ds.TYPES[name], steps=STEPS)
    return replace(job, config={**job.config, "zero_optimization": {"stage": 3, "sub_group_size": size}})


def _train(engine: object, rank: int, world: int, steps: range) -> dict[str, np.ndarray]:
    for step in steps:
        ds.train_step(engine, rank, world, step)
    return ds.master_weights(engine)


def _of_every_size(rank: int, world: int, names: list[str]) -> list[list[tuple[int, dict[str, np.ndarray]]]]:
    found: list[list[tuple[int, dict[str, np.ndarray]]]] = []
    for name in names:
        found.append([])
        for size in SIZES:
            engine = ds.engine_of(_job(name, size), world)
            weights = _train(engine, rank, world, range(STEPS))
            found[-1].append((len(engine.optimizer.fp16_groups), weights))
            engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_the_trajectory_does_not_depend_on_the_sub_groups(world: int) -> None:
    for runs in run_ranks(world, _of_every_size, ["MKOR", "MKOR-H", "LDAdam"])[0]:
        counts, (*cut, whole) = [count for count, _ in runs], [weights for _, weights in runs]
        assert counts[0] > counts[1] > counts[2] > counts[3] == 1
        for weights in cut:
            for name, value in whole.items():
                np.testing.assert_array_equal(weights[name], value, err_msg=name)


# --- where layers would be cut ---------------------------------------------------------------------------------------


def _as_deepspeed_cuts() -> None:
    """Sub-groups as they are without us, and a bias that has lost its weight is stepped alone."""
    DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups = registry._originals["_create_fp16_sub_groups"]


def _step_apart(rank: int, world: int) -> str:
    _as_deepspeed_cuts()
    engine = ds.engine_of(_job("MKOR", 40), world)
    try:
        _train(engine, rank, world, range(2))
    except LayoutError as error:
        return str(error)
    return "stepped"


def _save_apart(rank: int, world: int, folder: str) -> None:
    _as_deepspeed_cuts()
    together = rule._bundled
    rule._bundled = lambda key, bias, unit, table: (
        together(key, bias, unit, table) if bias in unit.layout.shapes else None
    )
    engine = ds.engine_of(_job("MKOR", 40), world)
    _train(engine, rank, world, range(3))
    engine.save_checkpoint(folder)


def _load(rank: int, world: int, folder: str, states: bool) -> str:
    engine = ds.engine_of(_job("MKOR", 40), world)
    before = ds.master_weights(engine)
    try:
        engine.load_checkpoint(folder, load_optimizer_states=states)
    except MisfitError as error:
        after = ds.master_weights(engine)
        assert all(np.array_equal(after[name], value) for name, value in before.items())
        return str(error)
    _train(engine, rank, world, range(1))
    return "continued"


def test_a_bias_that_is_stepped_apart_is_refused() -> None:
    for message in run_ranks(2, _step_apart):
        assert "'up.bias' must be stepped together with 'up.weight'" in message


def test_states_of_layers_that_were_cut_are_refused(tmp_path: Path) -> None:
    """DeepSpeed alone would load them by position; ranks without such a layer refuse them too, before any changes."""
    run_ranks(2, _save_apart, str(tmp_path))
    for world in (2, 4):
        (message,) = set(run_ranks(world, _load, str(tmp_path), True))
        assert "the state 'right_vectors' of" in message and "(352, 10)" in message and "weights alone" in message
    for found in run_ranks(2, _load, str(tmp_path), False):
        assert found == "continued"


# --- which sub-groups ------------------------------------------------------------------------------------------------


def _cut(parameters: list[Tensor], *sizes: int) -> list[int]:
    groups, rest = [], list(parameters)
    for size in sizes:
        groups.append(rest[:size])
        del rest[:size]
    assert not rest
    found = sub_groups_with_whole_layers(groups)
    assert [id(one) for group in found for one in group] == [id(one) for one in parameters]
    return [len(group) for group in found]


def test_sub_groups_end_where_no_layer_is_cut() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5, bias=False), nn.Linear(5, 2))
    annotate(model)
    parameters = list(model.parameters())  # weight, bias, norm's two, weight alone, weight, bias
    assert _cut(parameters, 7) == [7]
    assert _cut(parameters, 2, 3, 2) == [2, 3, 2]
    assert _cut(parameters, 1, 4, 2) == [2, 3, 2]
    assert _cut(parameters, 1, 1, 1, 1, 1, 1, 1) == [2, 2, 1, 2]
    assert _cut(parameters, 6, 1) == [7]
    assert _cut(parameters[:1], 1) == [1]  # its bias is in another param group


def test_layers_whose_parameters_lie_apart() -> None:
    def named(name: str, bias: str | None = None) -> Tensor:
        parameter = torch.zeros(1)
        attach_info(parameter, ParameterInfo(name, (1,), bias=bias))
        return parameter

    biases_last = [named("a", "a_bias"), named("b", "b_bias"), named("c"), named("a_bias"), named("b_bias"), named("d")]
    assert _cut(biases_last, 1, 1, 1, 1, 1, 1) == [5, 1]
    assert _cut([named("a_bias"), named("c"), named("a", "a_bias"), named("d")], 1, 1, 1, 1) == [3, 1]
    assert _cut([torch.zeros(1), torch.zeros(1)], 1, 1) == [1, 1]  # nothing is known of them
