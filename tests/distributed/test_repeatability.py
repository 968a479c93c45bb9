"""Same seed and ranks: the same bits. Different settings on one rank: a clear error on all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from collectives import recorded
from ranks import run_ranks
from simulated import CASES, Case, Framework, Model, reference, world_group
from torch import Tensor

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.layout.layout_source import LayoutSource, Slice, TensorContents

REPEATED = ("mars-adamw", "mars-shampoo", "sonew-4-tensor-rmsprop", "ldadam-ef", "mkor-official-lamb")
WORLD = 3


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Step once before the forks: the first step of a process imports half of torch."""
    reference("mars-adamw", torch.float32)


def _tensors(framework: Framework) -> dict[str, Tensor]:
    found = {f"weight {index}": tensor.detach() for index, (tensor, _) in enumerate(framework.shards)}
    for index, (tensor, _) in enumerate(framework.shards):
        states = framework.optimizer.state.get(tensor, {})
        found |= {f"element {index} {name}": value for name, value in states.items()}
    for key, state in framework.optimizer.matrix_states.items():
        found |= {f"matrix {key} {name}": value for name, value in state.items()}
    return found


def _train(rank: int, world: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for case in REPEATED:
        for layout in ("replicated", "flat", "views"):
            framework = Framework(layout, CASES[case], torch.float32, rank, world, world_group())
            for _ in range(6):
                framework.step()
            found[f"{case} {layout}"] = {name: value.clone() for name, value in _tensors(framework).items()}
    return found


def test_two_runs_agree_bitwise() -> None:
    first, second = run_ranks(WORLD, _train), run_ranks(WORLD, _train)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for cell in one:
            assert one[cell].keys() == other[cell].keys()
            for name, value in one[cell].items():
                assert torch.equal(value, other[cell][name]), (cell, name)
    # Replicas are the same bits on every rank as well.
    for cell in (cell for cell in first[0] if cell.endswith("replicated")):
        for name in (name for name in first[0][cell] if name.startswith(("weight", "element"))):
            assert all(torch.equal(first[0][cell][name], ranks[cell][name]) for ranks in first[1:]), (cell, name)


# What the middle rank does differently, and which optimizer it is.
DIFFERENCES = {
    "another rank of the subspace": (LDAdam, {"rank": 3}, {"rank": 2}),
    "another variant, without matrices": (MARS, {"variant": "muon"}, {"variant": "adamw"}),
    "no graft norms": (SONew, {"graft": "adam"}, {"graft": "none"}),
    "a wider band": (SONew, {"band": 1}, {"band": 2}),
    "an excluded layer": (LDAdam, {"rank": 3}, {"rank": 3, "exclude": ("a.*",)}),
    "fewer factor steps": (MKOR, {"update_interval": 2}, {"update_interval": 3}),
}


def _differ(rank: int, world: int) -> dict[str, str]:
    # The error comes on all ranks at the same point, so one fork serves all cases.
    found = {}
    for name, (build, usual, odd) in DIFFERENCES.items():
        case = Case(name, build, odd if rank == 1 else usual)
        framework = Framework("cut", case, torch.float32, rank, world, world_group())
        found[name] = _error_of(framework.step)
    return found


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


def _different_model(rank: int, world: int) -> str:
    framework = Framework("replicated", CASES["ldadam-ef"], torch.float32, rank, world, world_group())
    if rank == 1:
        framework.optimizer.param_groups[0]["params"].pop()
    for group in framework.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    return _error_of(framework.optimizer.step)


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, str]]:
    return run_ranks(WORLD, _differ, timeout=60)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_rank_with_other_options_is_refused_everywhere(refusals: list[dict[str, str]], name: str) -> None:
    for messages in refusals:
        assert "planned different steps (ranks [1] differ from the others)" in messages[name]
        assert "Build the same model with the same options on every rank." in messages[name]


def test_a_rank_with_another_model_is_refused_everywhere() -> None:
    for message in run_ranks(WORLD, _different_model, timeout=60):
        assert "not every rank holds 'unused.bias'" in message and "same model" in message


def _collectives_per_step(rank: int, world: int) -> dict[str, int]:
    found = {}
    for case in ("mars-adamw", "sonew-1-row-adam", "sonew-1-tensor-rmsprop", "mkor-official-adamw"):
        framework = Framework("cut", CASES[case], torch.float32, rank, world, dist.group.WORLD)
        framework.step()
        framework.step()
        with recorded("all_reduce", "all_to_all_single", "all_gather_object") as calls:
            framework.step()
        batches = 0 if framework.optimizer.options.owner != "MKOR" else _batches(framework)
        found[case] = sum(map(len, calls.values())) - 2 * batches
    return found


def _batches(framework: Framework) -> int:
    units = framework.optimizer.planner.units.values()
    return sum(len(unit.exchange.plan.batches) for unit in units if unit.exchange is not None)


def test_a_step_starts_no_more_collectives_than_promised() -> None:
    expected = {
        "mars-adamw": 1,  # clipping norms
        "sonew-1-row-adam": 2,  # halo, graft norms
        "sonew-1-tensor-rmsprop": 3,  # and gradient norms
        "mkor-official-adamw": 0,  # beside the matrices; the third step is not a factor step
    }
    assert run_ranks(2, _collectives_per_step) == [expected] * 2


def test_frozen_bias_does_not_stop_its_weight() -> None:
    model = Model(torch.float64)
    optimizer = CASES["mkor-official-sgd"].optimizer(model)
    before = model.a.weight.detach().clone()
    for name, parameter in model.named_parameters():
        parameter.grad = None if name == "a.bias" else torch.ones_like(parameter)
    optimizer.step()
    assert bool((model.a.weight != before).all())


class _HalfEach(LayoutSource):
    """One (4, 6) matrix, two whole rows on each of two ranks."""

    replicated = False

    def __init__(self, rank: int) -> None:
        self.group = dist.group.WORLD
        self._rank = rank

    def contents(self, tensor: Tensor) -> TensorContents:
        return TensorContents(0, (Slice("w", 12 * self._rank, 12 * self._rank + 12, 0),))


def _row_cuts(rank: int, world: int) -> dict[str, int]:
    found = {}
    for chain in ("row", "tensor"):
        optimizer = SONew([("w", torch.zeros(4, 6, requires_grad=True))], chain=chain)
        half = torch.zeros(12, requires_grad=True)
        half.grad = torch.ones(12)
        optimizer.param_groups[0]["params"] = [half]
        optimizer.attach(_HalfEach(rank))
        with recorded("all_to_all_single") as calls:
            optimizer.step()
        found[chain] = len(calls["all_to_all_single"])
    return found


def test_row_chains_cut_between_rows_fetch_no_neighbours() -> None:
    assert run_ranks(2, _row_cuts) == [{"row": 0, "tensor": 1}] * 2
