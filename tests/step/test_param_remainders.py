"""store_param_remainders: weights in bf16 take the steps of fp32 ones, bit for bit, whatever happens to them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import simulated
import torch
from cases import BY_NAME, Case, advance, cases, loss_of, net, setup
from ranks import run_ranks
from saved_files import through_a_file
from simulated import Framework, world_group
from torch import Tensor, nn

from rankwise import MARS, LDAdam
from rankwise.layout.layout_source import LayoutSource, Slice, TensorContents
from rankwise.options.validation import OptionError

BF16 = torch.bfloat16
KEPT = {"store_param_remainders": True}
STEPS = 7
KINDS = ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "sonew-band4", "ldadam", "mkor-adamw", "mkor-lamb"]
NARROW_PRODUCTS = {"mars-shampoo": {"ns_dtype": "float32"}, "mars-m": {"ns_dtype": "float32"}}


def joined(weight: Tensor, rest: Tensor) -> Tensor:
    """By numpy: the bits of the bf16 value, shifted, plus the remainder."""
    high = weight.detach().contiguous().view(torch.int16).numpy().astype(np.int64) << 16
    return torch.from_numpy((high + rest.numpy()).astype(np.int32).view(np.float32))


def rounded(weight: Tensor) -> Tensor:
    """Half away from zero, as halves must be."""
    return ((weight.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32).to(BF16)


def whole(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The fp32 values of a run that keeps remainders."""
    return {
        name: joined(parameter, optimizer.state[parameter]["remainder"]) for name, parameter in model.named_parameters()
    }


def narrow(case: Case, **options: Any) -> tuple[nn.Sequential, Any]:
    return setup(case, BF16, **{**KEPT, **NARROW_PRODUCTS.get(case.name, {}), **options})


class Masters(LayoutSource):
    """A framework that steps fp32 copies of a model's bf16 weights."""

    group = None

    def __init__(self, case: Case, start: Mapping[str, Tensor] | None = None, **options: Any) -> None:
        self.model, self.optimizer = setup(case, BF16, **{**NARROW_PRODUCTS.get(case.name, {}), **options})
        self.weights = {name: p.detach().float().requires_grad_() for name, p in self.model.named_parameters()}
        for name, value in (start or {}).items():
            self.weights[name].data.copy_(value)
        self._names = {id(tensor): name for name, tensor in self.weights.items()}
        self.optimizer.param_groups[0]["params"] = list(self.weights.values())
        self.optimizer.attach(self)

    def contents(self, tensor: Tensor) -> TensorContents:
        return TensorContents(0, (Slice(self._names[id(tensor)], 0, tensor.numel(), 0),))

    def name_of(self, tensor: Tensor) -> str:
        return self._names[id(tensor)]

    def advance(self, steps: range) -> None:
        for index in steps:
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(rounded(self.weights[name].detach()))
                parameter.grad = None
            loss_of(self.model, index).backward()
            for name, parameter in self.model.named_parameters():
                assert parameter.grad is not None
                self.weights[name].grad = parameter.grad.float()
            if hasattr(self.optimizer, "record_loss"):
                self.optimizer.record_loss(loss_of(self.model, index).detach())
            self.optimizer.step()


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, value in wanted.items():
        assert torch.equal(found[name].view(torch.int32), value.detach().view(torch.int32)), name


# --- the step --------------------------------------------------------------------------------------------------------


@cases(names=KINDS)
def test_steps_are_those_of_fp32_weights(case: Case) -> None:
    model, optimizer = narrow(case)
    masters = Masters(case)
    for index in range(STEPS):
        advance(model, optimizer, [index])
        masters.advance(range(index, index + 1))
        same(whole(model, optimizer), masters.weights)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, rounded(masters.weights[name].detach())), name
            state = masters.optimizer.state[masters.weights[name]]
            assert all(torch.equal(optimizer.state[parameter][key], value) for key, value in state.items())
    assert optimizer.matrix_states.keys() == masters.optimizer.matrix_states.keys()
    lost = sum(int(state["remainder"].count_nonzero()) for state in optimizer.state.values())
    assert lost > 0.9 * sum(parameter.numel() for parameter in model.parameters())


def test_a_weight_takes_four_bytes_and_the_report_says_so() -> None:
    (model, optimizer), (_, without) = narrow(BY_NAME["mars-adamw"]), setup(BY_NAME["mars-adamw"], BF16)
    for each, target in ((model, optimizer), (_, without)):
        advance(each, target, range(1))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert {state["remainder"].dtype for state in optimizer.state.values()} == {torch.int16}
    assert optimizer.state_bytes()["element"] == without.state_bytes()["element"] + 2 * count
    assert sum(line.state_bytes for line in optimizer.explain()) == optimizer.state_bytes()["element"]


def test_wide_weights_beside_narrow_ones_need_none() -> None:
    model = net(dtype=BF16)
    model[4].float()  # the norm
    optimizer = MARS(model.named_parameters(), **KEPT)
    twin = net(dtype=BF16).float()
    other = MARS(twin.named_parameters())
    for index in range(4):
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            gradient = torch.randn(ours.shape, generator=torch.Generator().manual_seed(index)).to(ours.dtype)
            ours.grad, theirs.grad = gradient, gradient.float()
            del name
        optimizer.step()
        other.step()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ("remainder" in optimizer.state[ours]) == (ours.dtype is BF16), name
        found = joined(ours, optimizer.state[ours]["remainder"]) if ours.dtype is BF16 else ours
        assert torch.equal(found, theirs), name


def test_weights_of_any_strides() -> None:
    """A transposed weight's remainder lies in the order of its elements."""
    stored = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).to(BF16)
    turned, straight = nn.Parameter(stored.t()), nn.Parameter(stored.t().contiguous())
    found = []
    for weight in (turned, straight):
        optimizer = LDAdam([("a.weight", weight)], rank=2, lr=1e-2, **KEPT)
        for index in range(3):
            weight.grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(index)).to(BF16)
            optimizer.step()
        found.append(joined(weight, optimizer.state[weight]["remainder"]))
    assert torch.equal(*found)
    assert turned.stride() == (1, 6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@cases(names=["mars-adamw", "ldadam", "mkor-adamw"])
def test_a_skipped_step_keeps_every_byte(case: Case, value: float) -> None:
    model, optimizer = narrow(case, skip_nonfinite=True)
    twin, straight = narrow(case)
    advance(model, optimizer, range(3))
    advance(twin, straight, range(3))
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
    optimizer.zero_grad()
    loss_of(model, 50).backward()
    next(model.parameters()).grad.view(-1)[0] = value  # type: ignore[union-attr]
    optimizer.step()
    optimizer.settle()
    for name, bits in before[0].items():
        assert torch.equal(model.state_dict()[name], bits)
    for key, state in before[1].items():
        assert all(torch.equal(optimizer.state_dict()["state"][key][name], bits) for name, bits in state.items())
    for each, target in ((model, optimizer), (twin, straight)):
        advance(each, target, range(3, 6))
    same(whole(model, optimizer), whole(twin, straight))


def test_a_weight_that_is_set_to_zero_goes_on_as_a_number() -> None:
    model, optimizer = narrow(BY_NAME["mars-adamw"])
    advance(model, optimizer, range(3))
    model[0].weight.data.zero_()
    advance(model, optimizer, range(3, 5))
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())


# --- saved and loaded ------------------------------------------------------------------------------------------------


@cases(names=KINDS)
def test_resumes_bitwise(case: Case) -> None:
    model, optimizer = narrow(case)
    advance(model, optimizer, range(3))
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    advance(model, optimizer, range(3, STEPS))
    again, resumed = narrow(case)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    advance(again, resumed, range(3, STEPS))
    assert {state["remainder"].dtype for state in resumed.state.values()} == {torch.int16}
    same(whole(again, resumed), whole(model, optimizer))


@cases(names=["mars-adamw", "sonew-band4", "ldadam"])
def test_switched_on_in_mid_run_remainders_begin_at_zero(case: Case) -> None:
    model, optimizer = setup(case, BF16)
    advance(model, optimizer, range(3))
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    again, resumed = narrow(case)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    masters = Masters(case, {name: value.float() for name, value in saved[0].items()})
    theirs = {masters.weights[name]: optimizer.state[p] for name, p in model.named_parameters()}
    masters.advance(range(1))  # any: its counts and states are replaced
    for tensor, state in theirs.items():
        tensor.data.copy_(dict(model.named_parameters())[masters.name_of(tensor)].float())
        masters.optimizer.state[tensor].update(copy.deepcopy(state))
    masters.optimizer.matrix_states.load(copy.deepcopy(optimizer.matrix_states.everything()))
    advance(again, resumed, range(3, STEPS))
    masters.advance(range(3, STEPS))
    same(whole(again, resumed), masters.weights)


def test_switched_off_in_mid_run_it_is_said_and_nothing_stays(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = narrow(BY_NAME["ldadam"])
    advance(model, optimizer, range(3))
    again, resumed = setup(BY_NAME["ldadam"], BF16)
    again.load_state_dict(model.state_dict())
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(optimizer.state_dict())
    assert "weights go on rounded. store_param_remainders=True" in caplog.text
    assert all("remainder" not in state for state in resumed.state.values())
    advance(again, resumed, range(3, 4))


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.float32, "some weights must be in bfloat16, but all are in float32, and lack nothing; leave it out, or"),
        (torch.float16, "weights must be in bfloat16 .* but '0.weight' is in float16; bring the model to bfloat16"),
    ],
)
@cases(names=["mars-adamw", "sonew-diagonal", "ldadam", "mkor-adamw"])
def test_other_types_are_refused(case: Case, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(OptionError, match=f"{case.cls.__name__}: store_param_remainders=True is invalid: {message}"):
        setup(case, dtype, **KEPT)


def test_a_framework_with_masters_of_its_own_is_refused_before_the_step() -> None:
    masters = Masters(BY_NAME["mars-adamw"], **KEPT)
    before = {name: weight.detach().clone() for name, weight in masters.weights.items()}
    with pytest.raises(OptionError, match="steps a copy of '0.weight' in float32, .*; leave it out"):
        masters.advance(range(1))
    same(masters.weights, before)


def test_a_model_brought_to_another_type_is_refused() -> None:
    model, optimizer = narrow(BY_NAME["mars-adamw"])
    advance(model, optimizer, range(2))
    model.float()
    with pytest.raises(RuntimeError, match="'0.weight' was brought from bfloat16 to float32 since .*; bring it back"):
        advance(model, optimizer, range(2, 3))


# --- ranks -----------------------------------------------------------------------------------------------------------


def _follows_fp32(rank: int, world: int, layouts: tuple[str, ...]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        exact = simulated.gradients
        patched.setattr(simulated, "gradients", lambda step: {name: g.to(BF16) for name, g in exact(step).items()})
        for name in ("mars-muon", "sonew-1-row-adam", "ldadam-ef"):
            for layout in layouts:
                _check_layout(name, layout, rank, world)


def _check_layout(name: str, layout: str, rank: int, world: int) -> None:
    case = simulated.CASES[name]
    fixed = {key: "float32" if value == "DTYPE" else value for key, value in case.options.items()}
    narrow, wide = (
        Framework(layout, simulated.Case(name, case.build, {**fixed, **kept}), dtype, rank, world, world_group())
        for kept, dtype in ((KEPT, BF16), ({}, torch.float32))
    )
    for tensor, _ in wide.shards:
        tensor.data.copy_(tensor.data.to(BF16))
    for _ in range(4):
        narrow.step()
        wide.step()
    moved = 0
    for (ours, _), (theirs, slices) in zip(narrow.shards, wide.shards, strict=True):
        state = narrow.optimizer.state[ours]
        if slices:
            found = joined(ours, state["remainder"])
            assert torch.equal(found.view(torch.int32), theirs.detach().view(torch.int32)), (name, layout)
            moved += int(state["remainder"].count_nonzero())
    assert moved or not any(slices for _, slices in wide.shards)


@pytest.mark.parametrize(
    "layouts",
    [
        ("flat", "cut", "tensor"),
        pytest.param(("replicated", "narrowed", "views", "tensor_copies"), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
def test_every_layout_follows_fp32_weights(layouts: tuple[str, ...]) -> None:
    """Whole, flat with padding, cut over ranks, a group at a time, in views, and under tensor parallelism."""
    run_ranks(2, _follows_fp32, layouts)
