"""DeepSpeed's accessors of optimizer states give and take the right weight's, where only some weights keep a state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ds_harness as ds
import numpy as np
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)
from ds_harness import run_ranks

STEPS = 1  # a second gradient depends on how the first update was rounded
CELLS: list[tuple[str, dict[str, Any], torch.dtype]] = [
    ("1", {"zero_optimization": {"stage": 1}}, torch.float32),
    ("2", {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, torch.float32),
    ("3", {"zero_optimization": {"stage": 3, "sub_group_size": 300}}, torch.float32),
    ("BF16_Optimizer", {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}, torch.bfloat16),
]


def _states_of(engine: Any, state: str) -> dict[str, np.ndarray | None]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        value = safe_get_full_optimizer_state(parameter, state)
        found[name] = None if value is None else value.numpy().copy()
    return found


def _kept_at_stage_0(job: ds.Job, rank: int, world: int) -> dict[str, dict[str, np.ndarray]]:
    """The states of whole parameters, which DeepSpeed neither flattens nor cuts."""
    engine = ds.engine_of(replace(job, config={}, dtype=torch.float32), world)
    for step in range(STEPS):
        ds.train_step(engine, rank, world, step)
    state = engine.basic_optimizer.state
    found = {
        name: {key: value.numpy().copy() for key, value in state[parameter].items() if key != "step"}
        for name, parameter in engine.module.named_parameters()
        if parameter in state
    }
    engine.destroy()
    return found


def _told(accessor: Any, *args: Any) -> str:
    try:
        accessor(*args)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def _check(job: ds.Job, engine: Any, kept: dict[str, dict[str, np.ndarray]]) -> None:
    parameters, known = dict(engine.module.named_parameters()), {key for states in kept.values() for key in states}
    tolerance = 0.1 if engine.bfloat16_enabled() else 1e-5  # another weight's would be wrong in the first digit
    for state in known:
        for name, value in _states_of(engine, state).items():
            assert (value is None) == (state not in kept[name]), (job.name, name, state)
            if value is not None:
                expected = kept[name][state]
                off = np.abs(value - expected).max() / max(np.abs(expected).max(), 1e-12)
                assert off <= tolerance, (job.name, name, state, off)
    places = sorted((name, state) for name, states in kept.items() for state in states)
    written = {place: np.full_like(kept[place[0]][place[1]], 0.0) for place in places}
    for number, (name, state) in enumerate(places):
        values = written[name, state]
        values += np.arange(values.size, dtype=values.dtype).reshape(values.shape) / 1024 + number
        safe_set_full_optimizer_state(parameters[name], torch.from_numpy(values), state)
    _compare(engine, written)
    for name, parameter in parameters.items():
        for state in known.difference(kept[name]):
            refusal = _told(safe_set_full_optimizer_state, parameter, torch.zeros(1), state)
            assert f"'{name}' keeps no state '{state}'" in refusal
    assert "no element state" in _told(safe_get_full_optimizer_state, parameters["up.weight"], "exp_avgg")
    if engine.zero_optimization_stage() == 3:
        _check_pieces(engine, written, kept, known)
    _compare(engine, written)
    assert all(safe_get_full_fp32_param(parameter) is not None for parameter in parameters.values())


def _compare(engine: Any, written: dict[tuple[str, str], np.ndarray]) -> None:
    parameters = dict(engine.module.named_parameters())
    for (name, state), values in written.items():
        found = safe_get_full_optimizer_state(parameters[name], state)
        assert np.array_equal(found.numpy(), values), (name, state)


def _check_pieces(engine: Any, written: Any, kept: dict[str, dict[str, np.ndarray]], known: set[str]) -> None:
    """ZeRO-3's local accessors: every rank's piece, padded; both sides alike, also where a rank holds padding alone."""
    rank = torch.distributed.get_rank()
    for name, parameter in engine.module.named_parameters():
        size = parameter.ds_tensor.numel()
        for state in known:
            piece = safe_get_local_optimizer_state(parameter, state)
            assert (piece is None) == (state not in kept[name])
            if piece is None:
                assert "keeps no state" in _told(safe_set_local_optimizer_state, parameter, torch.zeros(size), state)
                continue
            expected = written[name, state].reshape(-1)[rank * size : (rank + 1) * size]
            assert piece.numel() == size
            assert np.array_equal(piece.numpy()[: expected.size], expected)
            safe_set_local_optimizer_state(parameter, torch.full((size,), -7.0), state)
            written[name, state][...] = -7.0


def _every_cell(rank: int, world: int) -> int:
    checked = 0
    for name in ("MARS-M", "LDAdam", "SONew"):
        job = ds.Job(name, ds.TYPES[name])
        kept = _kept_at_stage_0(job, rank, world)
        for _, config, dtype in CELLS:
            engine = ds.engine_of(replace(job, config=config, dtype=dtype), world)
            assert all(safe_get_full_optimizer_state(p, "exp_avg") is None for p in engine.module.parameters())
            for step in range(STEPS):
                ds.train_step(engine, rank, world, step)
            _check(job, engine, kept)
            ds.train_step(engine, rank, world, STEPS)
            engine.destroy()
            checked += 1
    return checked


@pytest.mark.slow
def test_states_are_read_and_written_by_parameter() -> None:
    """On three ranks, which cut no shape evenly."""
    assert run_ranks(3, _every_cell) == [3 * len(CELLS)] * 3


def _types_of_pieces(rank: int, world: int) -> set[torch.dtype]:
    params = {**ds.TYPES["LDAdam"], "error_dtype": "int8"}
    engine = ds.engine_of(ds.Job("LDAdam", params, config={"zero_optimization": {"stage": 3}}), world)
    ds.train_step(engine, rank, world, 0)
    pieces = [safe_get_local_optimizer_state(parameter, "error") for parameter in engine.module.parameters()]
    engine.destroy()
    return {piece.dtype for piece in pieces if piece is not None}


def test_pieces_are_float32_on_every_rank() -> None:
    """Whatever type the state has: ranks that hold a whole piece, and those that pad one, may gather them."""
    assert run_ranks(2, _types_of_pieces) == [{torch.float32}] * 2
