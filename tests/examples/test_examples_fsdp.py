"""The examples under FSDP2: with given gradients, any mesh does what one process does, and goes on on another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from example_rules import Oracle, load
from ranks import once, run_ranks
from shard_settings import SETTINGS
from sharded_models import Network, Run
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Replicate

from rankwise.states import optimizer_spec

BEFORE, AFTER = 4, 3
F64 = torch.float64
CASES: dict[str, dict[str, Any]] = {
    "soap": {"precondition_frequency": 2},
    "soap, one side": {"precondition_frequency": 2, "max_precond_dim": 12, "exclude": ["*experts*"]},
    "soap, int8": {"precondition_frequency": 2, "state_dtype": "int8"},
    "signsgd": {"momentum": 0.8},
    "signsgd, int8": {"momentum": 0.8, "state_dtype": "int8"},
}
# Rows that do not divide, replicas, tensor parallelism, stacks that are cut elsewhere.
USUAL = ("rows-3", "hybrid-4", "tensor-2")
# Element states in codes are rounded run by run where columns are cut; those that owners keep are not.
BY_COLUMNS = ("tensor-2", "tensor-4", "columns-2", "experts-4")
ALL = (*USUAL, "rows-2", "rows-4", "columns-2", "tensor-4", "experts-2", "experts-4", "strided-experts-4", "offload-2")
Weights = dict[str, Tensor]


class Given(Run):
    """A run whose gradients are given: what reductions round says nothing of an optimizer then."""

    def __init__(self, label: str, setting: str | None, dtype: torch.dtype = F64) -> None:
        soap, signsgd = load()
        super().__init__((soap.SOAP if "soap" in label else signsgd.SignSGD, CASES[label]), setting, dtype)

    def step(self) -> Tensor:
        for name, gradient in gradients(self.count).items():
            parameter = self.model.get_parameter(name)
            parameter.grad = _cut_as(parameter, gradient.to(parameter.dtype))
        self.optimizer.step()
        self.count += 1
        return torch.zeros(())


def _cut_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return gradient.clone()
    everywhere = [Replicate()] * parameter.device_mesh.ndim
    return DTensor.from_local(gradient.clone(), parameter.device_mesh, everywhere, run_check=False).redistribute(
        placements=parameter.placements
    )


@once
def gradients(step: int) -> Weights:
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(p.shape, generator=generator, dtype=F64) for n, p in Network().named_parameters()}


@pytest.fixture(autouse=True)
def small_codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parameters of any size keep states in codes, where they are asked for."""
    monkeypatch.setattr(optimizer_spec, "FEWEST_CODED", 1)
    for step in range(BEFORE + AFTER):
        gradients(step)
    yield


def _train(rank: int, world: int, setting: str | None) -> dict[str, Weights]:
    return {label: Given(label, setting).train(BEFORE + AFTER).weights() for label in CASES}


@once
def _alone() -> dict[str, Weights]:
    return _train(0, 1, None)


def of_owners(name: str) -> bool:
    return name.endswith(("up.weight", "gate.weight", "down.weight", "stack", "sometimes.weight"))


def difference(found: Weights, expected: Weights) -> float:
    """Relative to the largest change; of NaN, infinite."""
    start = Given("soap", None).weights()
    change = max(float((expected[name] - start[name]).abs().max()) for name in expected)
    gaps = torch.stack([(found[name] - expected[name]).abs().max() for name in found])
    return float(gaps.nan_to_num(nan=torch.inf).max()) / change


@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=() if name in USUAL else pytest.mark.exhaustive) for name in ALL]
)
def test_any_mesh_follows_one_process(setting: str) -> None:
    for found in run_ranks(SETTINGS[setting].world, _train, setting):
        for label, weights in found.items():
            if "int8" in label and setting in BY_COLUMNS:
                weights = {name: weights[name] for name in weights if label == "soap, int8" and of_owners(name)}
            assert not weights or difference(weights, _alone()[label]) <= 1e-10, label


@pytest.mark.parametrize("label", ["soap, one side", "signsgd"])
def test_one_process_follows_the_paper(label: str) -> None:
    """With the groups of these runs: vectors decay by nothing, at half the rate."""
    start = {name: value.numpy() for name, value in Given(label, None).weights().items()}
    rule, own = label.split(",")[0], {"frequency": 2, "longest": 12, "momentum": 0.8}
    plain = [name for name in start if name.startswith(("embed", "head", "experts"))]
    matrices = {name: value for name, value in start.items() if value.ndim > 1}
    vectors = {name: value for name, value in start.items() if value.ndim < 2}
    betas = {"betas": (0.95, 0.95)}
    oracles = [
        Oracle(matrices, rule, plain, lr=1e-2, weight_decay=0.1, **betas, **own),
        Oracle(vectors, rule, plain, lr=5e-3, weight_decay=0.0, **betas, **own),
    ]
    for step in range(BEFORE + AFTER):
        for oracle in oracles:
            oracle.step({name: gradients(step)[name].numpy() for name in oracle.weights})
    expected = {name: torch.from_numpy(v) for oracle in oracles for name, v in oracle.weights.items()}
    assert difference(_alone()[label], expected) <= 1e-8


def _half(rank: int, world: int, setting: str | None, folder: str, second: bool) -> dict[str, Weights]:
    found = {}
    for label in CASES:
        run = Given(label, setting)
        if second:
            run.count = BEFORE
            model, optimizer = get_state_dict(run.model, run.optimizer)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=f"{folder}/{label}")
            set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optimizer)
            found[label] = run.train(AFTER).weights()
        else:
            model, optimizer = get_state_dict(run.train(BEFORE).model, run.optimizer)
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{folder}/{label}")
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("rows-3", "rows-2"),
        pytest.param("rows-3", None, marks=pytest.mark.exhaustive),
        pytest.param("hybrid-4", "rows-3", marks=pytest.mark.exhaustive),
        pytest.param(None, "rows-3", marks=pytest.mark.exhaustive),
    ],
)
def test_goes_on_on_another_mesh(tmp_path: Path, before: str | None, after: str | None) -> None:
    def everywhere(setting: str | None, second: bool) -> list[dict[str, Weights]]:
        call = (setting, str(tmp_path), second)
        return run_ranks(SETTINGS[setting].world, _half, *call) if setting else [_half(0, 1, *call)]

    everywhere(before, False)
    for found in everywhere(after, True):
        for label, weights in found.items():
            assert difference(weights, _alone()[label]) <= 1e-10, label
