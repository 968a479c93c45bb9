"""Steps, saving and reports of sharded models in autocast, other default devices, inference mode: the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded_models import CLASSES, Run
from torch import Tensor

STEPS = 4


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """As where weights are offloaded to the CPU, and scripts set the accelerator."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


AROUND: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": _elsewhere,
    "inference mode": torch.inference_mode,
}


def _trained(case: str, setting: str, around: Callable[[], Any]) -> dict[str, Tensor]:
    run = Run(case, setting)
    for index in range(STEPS):
        loss = run.backward()
        with around():
            run.optimizer.record_loss(loss)
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.count += 1
        if index == STEPS // 2:
            with around():
                run.optimizer.load_state_dict(run.optimizer.state_dict())
                run.optimizer.read_health()
    return run.weights()


def _all(rank: int, world: int, cases: list[str], setting: str) -> dict[str, dict[str, dict[str, Tensor]]]:
    return {case: {name: _trained(case, setting, around) for name, around in AROUND.items()} for case in cases}


def _check(cases: list[str], setting: str) -> None:
    for found in run_ranks(2, _all, cases, setting):
        for case, runs in found.items():
            for name, weights in runs.items():
                for key, value in runs["nothing"].items():
                    assert torch.equal(weights[key], value), (case, name, key)


USUAL = ["mars-m", "sonew-4", "ldadam", "mkor"]


def test_sharded_steps_do_not_depend_on_what_surrounds_them() -> None:
    _check(USUAL, "rows-2")


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", ["rows-2", "columns-2"])
def test_nor_those_of_any_type(setting: str) -> None:
    _check(list(CLASSES), setting)
