"""skip_nonfinite: a step with a broken gradient leaves every byte as it was and is as if it had never come."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from cases import BY_NAME, Case, advance, assert_same, cases, loss_of, setup, weights
from ranks import once, run_ranks
from simulated import CASES, Framework, gradients, world_group
from test_host_reads import NoHostReads
from torch import Tensor, nn

from rankwise.checkpoint.named_vectors import common_step
from rankwise.kernels import lists as foreach
from rankwise.kernels.dispatch import using

BROKEN = (torch.nan, torch.inf, -torch.inf)


def bad_step(model: nn.Module, optimizer: Any, index: int, value: float = torch.nan) -> None:
    """A step with one gradient entry that is no number."""
    if getattr(optimizer.options, "exact", False):
        model.zero_grad()
        loss_of(model, index + 1).backward()
        optimizer.record_reference()
    optimizer.zero_grad()
    loss_of(model, index).backward()
    # In a matrix, whose factorisation would fail on it, or in the last vector.
    broken = model.get_parameter("2.weight") if value != torch.inf else list(model.parameters())[-1]
    broken.grad.view(-1)[-1] = value
    optimizer.step()


def states(optimizer: Any) -> dict[str, Tensor]:
    saved = optimizer.state_dict()
    element = {
        f"{index}/{name}": value for index, state in saved["state"].items() for name, value in dict(state).items()
    }
    return element | {f"{key}/{n}": v for key, state in saved["matrix_states"].items() for n, v in state.items()}


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


@pytest.mark.parametrize("value", BROKEN)
@cases()
def test_every_byte_stays(case: Case, value: float) -> None:
    model, optimizer = setup(case, skip_nonfinite=True)
    advance(model, optimizer, range(4))
    before, held = copied(weights(model)), copied(states(optimizer))
    bad_step(model, optimizer, 4, value)
    assert_same(weights(model), before)
    if "exact" in case.name:  # the gradient recorded for the next batch takes its place
        held = {name: tensor for name, tensor in held.items() if not name.endswith("reference")}
        assert_same({name: tensor for name, tensor in states(optimizer).items() if name in held}, held)
    else:
        assert_same(states(optimizer), held)
    health = optimizer.read_health()
    assert health["skipped_steps"] == 1.0
    assert optimizer.read_health()["skipped_steps"] == 0.0


@pytest.mark.parametrize("at", [0, 1, 3, 5])
@cases(exact=False)
def test_it_is_as_if_it_had_never_come(case: Case, at: int) -> None:
    """From the first step on, twice in a row, on factor steps and between them."""
    model, optimizer = setup(case, skip_nonfinite=True)
    other, straight = setup(case)
    for index in range(8):
        if index == at:
            bad_step(model, optimizer, 50)
            bad_step(model, optimizer, 51, torch.inf)
        for each, target in ((model, optimizer), (other, straight)):
            target.zero_grad()
            loss_of(each, index).backward()
            target.step()
    assert_same(weights(model), weights(other))
    assert_same(states(optimizer), states(straight))


@pytest.mark.parametrize("name", ["mars-adamw", "mars-adamw-exact", "sonew-band4", "ldadam", "mkor-lamb"])
def test_finite_steps_are_those_without_the_option(name: str) -> None:
    model, optimizer = setup(BY_NAME[name], skip_nonfinite=True)
    other, straight = setup(BY_NAME[name])
    for each, target in ((model, optimizer), (other, straight)):
        advance(each, target, range(5))
    assert_same(weights(model), weights(other))
    assert_same(states(optimizer), states(straight))
    assert optimizer.read_health()["skipped_steps"] == 0.0


@cases()
def test_the_update_meets_finite_numbers_only(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries raise where a matrix to be factorised holds a NaN."""
    model, optimizer = setup(case, skip_nonfinite=True)
    advance(model, optimizer, range(1))
    met: list[bool] = []
    update = optimizer._update

    def watched(unit: Any, buckets: Any) -> None:
        met.extend(bool(grad.isfinite().all()) for bucket in buckets for grad in bucket.grads)
        update(unit, buckets)

    monkeypatch.setattr(optimizer, "_update", watched)
    bad_step(model, optimizer, 1)
    assert len(met) == 7 and all(met)
    assert not model.get_parameter("2.weight").grad.isfinite().all()  # the framework's own stays as it is


def test_without_the_option_it_goes_through() -> None:
    """As in torch.optim."""
    model, optimizer = setup(BY_NAME["mars-adamw"])
    bad_step(model, optimizer, 0)
    assert not all(bool(weight.isfinite().all()) for weight in weights(model).values())
    assert optimizer.read_health()["skipped_steps"] == 0.0


def test_a_finite_gradient_of_any_size_counts() -> None:
    model, optimizer = setup(BY_NAME["mars-lion"], torch.float32, skip_nonfinite=True, clip=1.0)
    before = weights(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)  # its 2-norm is infinite in fp32
    optimizer.step()
    assert optimizer.read_health()["skipped_steps"] == 0.0
    assert not torch.equal(weights(model)["0.weight"], before["0.weight"])


def test_a_broken_recorded_gradient_is_skipped_when_it_is_used() -> None:
    model, optimizer = setup(BY_NAME["mars-adamw-exact"], skip_nonfinite=True)
    advance(model, optimizer, range(2))
    model.zero_grad()
    loss_of(model, 3).backward()
    model[0].weight.grad[0, 0] = torch.nan
    optimizer.record_reference()
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()
    after = copied(weights(model))
    advance(model, optimizer, range(3, 4))
    assert_same(weights(model), after)
    advance(model, optimizer, range(4, 6))
    assert all(bool(weight.isfinite().all()) for weight in weights(model).values())
    assert optimizer.read_health()["skipped_steps"] == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_weights_keep_their_bits(dtype: torch.dtype) -> None:
    model, optimizer = setup(BY_NAME["ldadam"], dtype, skip_nonfinite=True)
    advance(model, optimizer, range(2))
    before = copied(weights(model))
    bad_step(model, optimizer, 2)
    assert_same(weights(model), before)


@pytest.mark.parametrize("through", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_and_new_plans_know_of_it(through: Any) -> None:
    model, optimizer = setup(BY_NAME["ldadam"], skip_nonfinite=True)
    advance(model, optimizer, range(2))
    bad_step(model, optimizer, 2)
    # Counts lie in the host's memory, which has not looked at the flag yet.
    assert {int(state["step"]) for state in (*optimizer.state.values(), *optimizer.matrix_states.values())} == {3}
    _, twin = through((model, optimizer))
    assert {int(state["step"]) for state in twin.state.values()} == {2}
    assert {int(state["step"]) for state in twin.matrix_states.values()} == {2}
    bad_step(model, optimizer, 3)
    assert common_step(optimizer) == 2
    bad_step(model, optimizer, 3)
    twin = through(optimizer)
    bad_step(model, optimizer, 3)
    optimizer.adopt(twin.matrix_states, {}, {})
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}
    bad_step(model, optimizer, 3)
    extra = nn.Parameter(torch.ones(12, 12, dtype=torch.float64))
    optimizer.add_param_group({"params": [("extra", extra)]})
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


@pytest.mark.parametrize("name", ["mars-adamw", "mars-adamw-exact", "mars-lion", "sonew-tridiagonal", "sonew-band4"])
def test_the_host_waits_for_nothing(name: str) -> None:
    model, optimizer = setup(BY_NAME[name], skip_nonfinite=True)
    advance(model, optimizer, range(2))
    for index in range(2, 4):
        optimizer._recorded = True
        optimizer.zero_grad()
        loss_of(model, index).backward()
        # The flag of the step before has been on its way since then.
        flags = [unsettled.broken.values for unsettled in optimizer.undo.unsettled.values()]
        exempt = [*flags, *(state["step"] for state in optimizer.state.values())]
        with using(foreach), NoHostReads(exempt) as guard:  # the forms for CPUs may read their own memory
            optimizer.step()
        assert flags and guard.operations > 50


# --- several ranks ---------------------------------------------------------------------------------------------------

SHARDED = ("mars-adamw", "mars-muon", "sonew-1-row-adam", "ldadam-ef", "mkor-official-adamw", "mkor-ema-lamb")
PLACES = ("replicated", "flat", "cut", "views")


def _shards(framework: Framework) -> list[Tensor]:
    return [tensor.detach().clone() for tensor, _ in framework.shards]


def _break_on_one_rank(case: str, layout: str, rank: int, world: int) -> dict[str, Any]:
    def build(skip: bool) -> Framework:
        framework = Framework(layout, CASES[case], torch.float32, rank, world, world_group())
        object.__setattr__(framework.optimizer.options, "skip_nonfinite", skip)
        return framework

    broken, straight = build(True), build(False)
    step = broken.optimizer.step

    def poisoned() -> None:
        if rank == world - 1:
            broken.shards[-1][0].grad.view(-1)[0] = torch.nan  # type: ignore[union-attr]
        step()

    same = []
    for index in range(5):
        if index in (0, 3):
            before = _shards(broken)
            broken.optimizer.step = poisoned  # type: ignore[assignment, method-assign]
            broken.step()
            broken.optimizer.step = step  # type: ignore[method-assign]
            broken.count -= 1
            same += [torch.equal(a, b) for a, b in zip(_shards(broken), before, strict=True)]
        broken.step()
        straight.step()
    ours, theirs = states(broken.optimizer), states(straight.optimizer)
    return {
        "unmoved": all(same),
        "weights": all(torch.equal(a, b) for a, b in zip(_shards(broken), _shards(straight), strict=True)),
        "states": ours.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in ours.items()),
        "skipped": broken.optimizer.read_health()["skipped_steps"],
    }


def _break_all(rank: int, world: int) -> dict[tuple[str, str], dict[str, Any]]:
    return {(case, layout): _break_on_one_rank(case, layout, rank, world) for case in SHARDED for layout in PLACES}


@once
def _outcomes() -> list[dict[tuple[str, str], dict[str, Any]]]:
    for step in range(5):
        gradients(step)
    return run_ranks(2, _break_all)


@pytest.mark.parametrize("case", SHARDED)
@pytest.mark.parametrize("layout", PLACES)
def test_all_ranks_skip_together(layout: str, case: str) -> None:
    for outcome in _outcomes():
        assert outcome[case, layout] == {"unmoved": True, "weights": True, "states": True, "skipped": 2.0}
