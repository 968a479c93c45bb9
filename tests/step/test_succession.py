"""From torch.optim's AdamW and Muon to each optimizer in the middle of a run, and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import Case, assert_same, cases, loss_of, net, weights
from saved_files import through_a_file
from torch import Tensor, nn

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.saving.state_takeover import TakeoverTarget, plan_takeover

ALL = cases(exact=False)
ADAMW = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1}
BEFORE = 6


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if isinstance(optimizer, MKOR):
            optimizer.record_loss(1.0)
        optimizer.step()


def adamw_run() -> tuple[nn.Module, torch.optim.AdamW]:
    model = net(seed=1)
    optimizer = torch.optim.AdamW(model.named_parameters(), **ADAMW)  # type: ignore[arg-type]
    train(model, optimizer, range(BEFORE))
    return model, optimizer


def moment_of(optimizer: Any, parameter: Tensor, name: str) -> Tensor:
    return optimizer.state[parameter][name]


@ALL
def test_goes_on_from_adamw(case: Case) -> None:
    """Weights to the bit, moments where they mean the same; a short first step; a checkpoint in the ramp; and back."""
    model, adamw = adamw_run()
    before = weights(model)
    optimizer = case.build(model.named_parameters(), model)
    told = optimizer.continue_from(through_a_file(adamw.state_dict()))
    assert_same(weights(model), before)
    assert "weights are kept" in told
    assert "over 20 steps" in told
    targets = optimizer.saved.succession.targets(optimizer.param_groups)
    assert {heir.rule for heir in targets.values()} == {"matrix", "fallback"} or "1d" in case.name
    for name, parameter in model.named_parameters():
        for moment, own in targets[name].moments.items():
            assert torch.equal(moment_of(optimizer, parameter, own), moment_of(adamw, parameter, moment))
    assert case.name in (
        "mkor-sgd",
        "ldadam",
        "ldadam-no-feedback",
        "ldadam-bf16-error",
        "ldadam-int8-error",
    ) or any(heir.moments for heir in targets.values() if heir.rule == "matrix")

    at_once_model = copy.deepcopy(net(seed=1))
    at_once_model.load_state_dict(model.state_dict())
    at_once = case.build(at_once_model.named_parameters(), at_once_model, transition_steps=0)
    at_once.continue_from(adamw.state_dict())
    train(model, optimizer, range(BEFORE, BEFORE + 1))
    train(at_once_model, at_once, range(BEFORE, BEFORE + 1))
    fresh = {name for name, heir in targets.items() if heir.rule == "matrix" or not heir.moments}
    assert fresh
    for name, full in weights(at_once_model).items():
        share = 1 / 20 if name in fresh else 1.0
        torch.testing.assert_close(
            weights(model)[name] - before[name], share * (full - before[name]), rtol=1e-4, atol=1e-8
        )

    twin_model = net(seed=3)
    twin_model.load_state_dict(model.state_dict())
    twin = case.build(twin_model.named_parameters(), twin_model)
    twin.load_state_dict(through_a_file(optimizer.state_dict()))
    later = range(BEFORE + 1, BEFORE + 24)
    train(model, optimizer, later)
    train(twin_model, twin, later)
    assert_same(weights(twin_model), weights(model))

    back = torch.optim.AdamW(model.named_parameters(), **ADAMW)  # type: ignore[arg-type]
    kept = weights(model)
    optimizer.hand_over(back)
    assert_same(weights(model), kept)
    assert back.param_groups[0]["lr"] == ADAMW["lr"]
    for name, parameter in model.named_parameters():
        if len(targets[name].moments) == 2:
            assert torch.equal(moment_of(back, parameter, "exp_avg_sq"), moment_of(optimizer, parameter, "exp_avg_sq"))
            assert int(moment_of(back, parameter, "step")) == BEFORE + 24
        elif targets[name].rule == "matrix" and case.name.startswith("ldadam"):
            assert not moment_of(back, parameter, "exp_avg").any() and moment_of(back, parameter, "exp_avg_sq").any()
        else:
            assert parameter not in back.state
    train(model, back, range(30, 32))


def test_the_way_back_from_a_subspace_begins_gently() -> None:
    """From the mean square of the gradient, which is known here, with an average that has yet to grow."""
    torch.manual_seed(0)
    layer = nn.Linear(24, 32, bias=False)
    gradient = torch.outer(torch.randn(32), torch.randn(24))
    ours = LDAdam([("weight", layer.weight)], lr=1e-3, rank=4, betas=(0.9, 0.99))
    for _ in range(30):
        layer.weight.grad = gradient.clone()
        ours.step()
    back = torch.optim.AdamW([layer.weight], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    ours.hand_over(back)
    state = back.state[layer.weight]
    assert int(state["step"]) == 30 and not state["exp_avg"].any()
    expected = float(gradient.square().mean()) * (1 - 0.95**30)
    torch.testing.assert_close(state["exp_avg_sq"], torch.full((32, 24), expected), rtol=0.02, atol=0.0)
    before = layer.weight.detach().clone()
    back.step()
    # A fresh AdamW would move all elements by lr.
    moved = (layer.weight.detach() - before).abs()
    assert 0.0 < float(moved.mean()) < 0.15e-3 and float(moved.max()) < 0.5e-3


def test_the_fallback_goes_on_as_adamw_itself() -> None:
    """Given the same gradients: AdamW, which has not stopped, is the oracle."""
    model, adamw = adamw_run()
    other = copy.deepcopy(model)
    optimizer = LDAdam(other.named_parameters(), rank=2, **ADAMW)
    optimizer.continue_from(adamw.state_dict())
    rules = {name: heir.rule for name, heir in optimizer.saved.succession.targets(optimizer.param_groups).items()}
    assert "fallback" in rules.values()
    for step in range(4):
        loss_of(model, step).backward()
        for (name, mine), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
            assert theirs.grad is not None
            mine.grad = theirs.grad.clone()
            del name
        adamw.step()
        optimizer.step()
        adamw.zero_grad()
    for name, value in weights(other).items():
        if rules[name] == "fallback":
            torch.testing.assert_close(value, weights(model)[name], rtol=1e-6, atol=1e-8)


def test_runs_without_another_optimizer_know_nothing_of_it() -> None:
    model = net(seed=1)
    optimizer = SONew(model.named_parameters())
    train(model, optimizer, range(2))
    assert "transition" not in optimizer.state_dict()
    assert not optimizer.transition.length


@cases(names=["ldadam", "mkor-sgd"])
def test_what_starts_afresh_starts_as_if_there_had_been_no_steps(case: Case) -> None:
    """Its counts too, by which averages are corrected: a new optimizer's first step at full size."""
    model, adamw = adamw_run()
    other = copy.deepcopy(model)
    optimizer = case.build(model.named_parameters(), model, transition_steps=0)
    optimizer.continue_from(adamw.state_dict())
    new = case.build(other.named_parameters(), other)
    targets = optimizer.saved.succession.targets(optimizer.param_groups)
    for each, one in ((model, optimizer), (other, new)):
        train(each, one, range(1))
    for name, value in weights(model).items():
        if targets[name].rule == "matrix":
            assert torch.equal(value, weights(other)[name])


def test_of_an_earlier_transition_nothing_is_left() -> None:
    model, adamw = adamw_run()
    optimizer = SONew(model.named_parameters())
    optimizer.continue_from(adamw.state_dict())
    optimizer.continue_from(torch.optim.AdamW(model.named_parameters()).state_dict())
    assert not optimizer.transition.length


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has its Muon from 2.9 on")
def test_muons_momentum_is_the_first_moment() -> None:
    model = nn.Sequential(nn.Linear(24, 40, bias=False), nn.Linear(40, 24, bias=False))
    muon = torch.optim.Muon(list(model.named_parameters()))
    model(torch.ones(2, 24)).square().sum().backward()
    muon.step()
    mars = MARS(model.named_parameters(), variant="muon")
    mars.continue_from(muon.state_dict())
    for parameter in model.parameters():
        assert torch.equal(moment_of(mars, parameter, "exp_avg"), moment_of(muon, parameter, "momentum_buffer"))
    mars.step()
    sonew = SONew(model.named_parameters())
    assert "no state" in sonew.continue_from(muon.state_dict())
    sonew.step()
    # SGD's buffer is a sum, and nobody's average.
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sgd.step()
    assert "no state" in MARS(model.named_parameters(), variant="muon").continue_from(sgd.state_dict())


def test_refused_without_a_trace() -> None:
    model, adamw = adamw_run()
    optimizer = MARS(model.named_parameters(), variant="muon")
    train(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    fewer = torch.optim.AdamW(list(model.parameters())[:-1])
    with pytest.raises(ValueError, match="must have .* parameters"):
        optimizer.continue_from(fewer.state_dict())
    with pytest.raises(ValueError, match="load ours with load_state_dict"):
        optimizer.continue_from(optimizer.state_dict())
    with pytest.raises(ValueError, match="must have .* parameters"):
        optimizer.hand_over(fewer)
    after = optimizer.state_dict()
    assert after.keys() == before.keys()
    for key, state in before["state"].items():
        assert all(torch.equal(value, after["state"][key][name]) for name, value in state.items())


def test_a_fused_weight_takes_the_moments_of_its_elements() -> None:
    """Its blocks are matrices of their own, the moments those of the whole."""
    model = nn.Sequential(nn.Linear(24, 72), nn.Linear(72, 24))
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    for _ in range(3):
        adamw.zero_grad()
        model(torch.randn(4, 24)).square().sum().backward()
        adamw.step()
    mars = MARS(model.named_parameters(), variant="muon", blocks={"0.weight": "qkv"})
    mars.continue_from(adamw.state_dict())
    mars.step()
    mean = moment_of(adamw, model[0].weight, "exp_avg")
    grad = model[0].weight.grad
    assert grad is not None
    factor = 1 + 0.025 * 0.95 / 0.05
    corrected = factor * grad
    clipped = [part / max(1.0, float(part.norm())) for part in (corrected, *corrected.chunk(3))]
    whole, parts = 0.95 * mean + 0.05 * clipped[0], 0.95 * mean + 0.05 * torch.cat(clipped[1:])
    found = moment_of(mars, model[0].weight, "exp_avg")
    assert min(float((found - other).abs().max()) for other in (whole, parts)) < 1e-6


def test_what_goes_on_is_decided_by_names_and_shapes() -> None:
    both, first = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}, {"exp_avg": "grad_avg"}
    targets = {
        "w": TakeoverTarget((4, 3), first, "matrix"),
        "v": TakeoverTarget((4, 3), both, "matrix"),
        "b": TakeoverTarget((4,), both, "fallback"),
        "odd": TakeoverTarget((5,), both, "fallback"),
        "new": TakeoverTarget((6, 6), {}, "matrix"),
    }
    saved = {
        "w": {"exp_avg": (4, 3)},
        "v": {"exp_avg": (4, 3)},
        "b": {"exp_avg": (4,), "exp_avg_sq": (4,)},
        "odd": {"exp_avg": (4,), "exp_avg_sq": (4,)},
        "gone": {"exp_avg": (9,)},
    }
    found = plan_takeover(saved, targets)
    assert found.carried == {"w": first, "b": both}
    assert found.afresh == ("v", "odd", "new")
    assert found.matrices == ("w",)
    told = found.told("MARS", "AdamW", 20)
    assert told == (
        "MARS goes on from AdamW: weights are kept, both moments of b and the first moment of w too; all other states "
        "of w, v, odd and 1 more start afresh, with updates that grow to their size over 20 steps."
    )
