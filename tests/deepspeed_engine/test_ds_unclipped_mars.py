"""MARS without the clip under ZeRO: the steps of the form with a previous gradient, whose checkpoints go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import ds_harness as ds
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from rankwise import MARS
from rankwise.launch.convert import convert_checkpoint
from rankwise.mars.spec import MARSSpec

HALF, STEPS = 3, 6
TYPES = {
    "MARS-Lion": {"lr": 1e-3, "clip": None},
    "MARS-M": {"lr": 1e-2, "ns_dtype": "float32", "weight_decay": 0.1, "clip": None},
}
Weights = dict[str, np.ndarray]


def _run(
    rank: int, world: int, stages: list[int], first: int, last: int, load: str | None, save: str | None, folds: bool
) -> list[tuple[Weights, set[str]]]:
    """Weights, and the names of states, of both types at every stage; not folded as an earlier version did it."""
    if not folds:
        MARSSpec.folds = lambda *given: False  # type: ignore[method-assign, assignment]
    deepspeed.init_distributed("gloo")
    found = []
    for stage in stages:
        for name, params in TYPES.items():
            engine = ds.engine_of(ds.Job(name, params, config={"zero_optimization": {"stage": stage}}), world)
            if load is not None:
                assert engine.load_checkpoint(f"{load}/{name}")[0] is not None
            for step in range(first, last):
                ds.train_step(engine, rank, world, step)
            states: Any = engine.basic_optimizer.state
            if save is not None:
                engine.save_checkpoint(f"{save}/{name}")
            found.append((ds.model_weights(engine), {name for own in states.values() for name in own}))
            engine.destroy()
    return found


def _assert_close(found: list[tuple[Weights, set[str]]], expected: list[tuple[Weights, set[str]]]) -> None:
    for (weights, _), (others, _) in zip(found, expected * (len(found) // len(expected)), strict=True):
        for name, value in others.items():
            np.testing.assert_allclose(weights[name], value, rtol=0, atol=2e-5, err_msg=name)


def test_every_stage_takes_the_steps_of_the_form_with_a_reference() -> None:
    stages = [1, 2, 3]
    (earlier, *_), (found, *_) = (
        run_ranks(2, _run, stages, 0, STEPS, None, None, folds, timeout=300) for folds in (False, True)
    )
    _assert_close(found, earlier)
    assert all("reference" in states for _, states in earlier)
    assert all("reference" not in states and "grad_avg" in states for _, states in found)


def test_earlier_checkpoints_go_on_at_any_stage(tmp_path: Path) -> None:
    (whole, *_) = run_ranks(2, _run, [2], 0, STEPS, None, None, False, timeout=300)
    run_ranks(2, _run, [2], 0, HALF, None, str(tmp_path), False, timeout=300)
    (found, *_) = run_ranks(2, _run, [2, 3], HALF, STEPS, str(tmp_path), None, True, timeout=300)
    _assert_close(found, whole)
    assert all("grad_avg" in states and "reference" not in states for _, states in found)
    (again, *_) = run_ranks(1, _run, [1], HALF, STEPS, str(tmp_path), None, True, timeout=300)
    _assert_close(again, whole)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_rankwise_convert_writes_what_is_kept_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[nn.Module, MARS]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        return model, MARS(list(model.named_parameters()), variant="muon", clip=None, gamma=0.3)

    with monkeypatch.context() as patch:
        patch.setattr(MARSSpec, "folds", lambda *given: False)
        model, mars = made()
        for _ in range(3):
            model(torch.randn(4, 6)).square().sum().backward()
            mars.step()
            mars.zero_grad()
        weights, states = get_state_dict(model, mars)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "earlier", no_dist=True)
    convert_checkpoint(tmp_path / "earlier", tmp_path / "there", "deepspeed")
    convert_checkpoint(tmp_path / "there", tmp_path / "back", "torch")
    fresh, following = made()
    weights, states = get_state_dict(fresh, following)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "back", no_dist=True)
    set_state_dict(fresh, following, model_state_dict=weights, optim_state_dict=states)
    for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(old, new)
        if old.dim() == 2:
            m, g = (mars.state[old][name] for name in ("exp_avg", "reference"))
            torch.testing.assert_close(following.state[new]["grad_avg"], (m - 0.3 * g) / 0.7, rtol=1e-5, atol=1e-7)
