"""The examples in one process: the papers' formulas, states in 8 bits, reports, checkpoints."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_rules import EXAMPLES, Oracle, load
from torch import Tensor, nn

from rankwise import annotate
from rankwise.estimate import estimate
from rankwise.options.validation import OptionError
from rankwise.plan.checkpoint_mismatch import MisfitError

F64 = torch.float64


def network(dtype: torch.dtype = F64, sizes: tuple[int, ...] = (12, 12, 20)) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in zip(sizes, sizes[1:], strict=False)]
    model = nn.Sequential(*layers).to(dtype)
    annotate(model)
    return model


def give(model: nn.Module, index: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    """The gradients of a step."""
    generator = torch.Generator().manual_seed(index)
    found = {}
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator, dtype=F64) * scale
        parameter.grad = value.to(parameter.dtype)
        found[name] = value.numpy()
    return found


def arrays(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().double().numpy().copy() for name, parameter in model.named_parameters()}


def apart(model: nn.Module, oracle: Oracle, start: dict[str, np.ndarray]) -> float:
    """Largest difference of a weight, relative to the largest change."""
    found = arrays(model)
    change = max(np.abs(oracle.weights[name] - start[name]).max() for name in found)
    assert change > 1e-3
    return float(max(np.abs(found[name] - oracle.weights[name]).max() for name in found) / change)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # A side of which the gradient has full rank alone: the eigenvectors of zeros are anybody's.
    "soap": ("soap", {"max_precond_dim": 12, "precondition_frequency": 3}, {"longest": 12, "frequency": 3}),
    "soap every step": ("soap", {"max_precond_dim": 12, "precondition_frequency": 1}, {"longest": 12, "frequency": 1}),
    "soap, no side": ("soap", {"max_precond_dim": 0}, {"longest": 0}),
    "signsgd": ("signsgd", {"momentum": 0.8}, {"momentum": 0.8}),
}


def classes() -> dict[str, Any]:
    soap, signsgd = load()
    return {"soap": soap.SOAP, "signsgd": signsgd.SignSGD}


@pytest.mark.parametrize("case", CASES)
def test_follows_the_paper(case: str) -> None:
    rule, options, theirs = CASES[case]
    model = network()
    start = arrays(model)
    optimizer = classes()[rule](model.named_parameters(), lr=1e-2, weight_decay=0.1, **options)
    oracle = Oracle(start, rule, lr=1e-2, weight_decay=0.1, **theirs)
    for index in range(8):
        oracle.step(give(model, index))
        optimizer.step()
    assert apart(model, oracle, start) < 1e-9
    # The other parameter of the formula matters.
    other = Oracle(start, rule, lr=1e-2, weight_decay=0.1, **{key: 2 for key in theirs})
    for index in range(8):
        other.step(give(model, index))
    assert case == "soap, no side" or apart(model, other, start) > 1e-2


def test_the_first_step_initialises_alone() -> None:
    model = network()
    before = arrays(model)
    optimizer = classes()["soap"](model.named_parameters(), lr=1e-2, weight_decay=0.1)
    give(model, 0)
    optimizer.step()
    after = arrays(model)
    assert np.array_equal(after["0.weight"], before["0.weight"])
    assert not np.array_equal(after["0.bias"], before["0.bias"])
    state = optimizer.matrix_states["0.weight"]
    assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()
    assert torch.allclose(state["Q_L"] @ state["Q_L"].mT, torch.eye(12, dtype=F64))
    give(model, 1)
    optimizer.step()
    assert not np.array_equal(arrays(model)["0.weight"], before["0.weight"])


@pytest.mark.parametrize("rule", ["soap", "signsgd"])
@pytest.mark.parametrize(("kept", "share", "bound"), [("int8", 0.27, 0.2), ("bfloat16", 0.51, 0.1)])
def test_element_states_in_fewer_bits(rule: str, kept: str, share: float, bound: float) -> None:
    """They take what their bits say, and steps are nearly those of wide ones."""
    models, sizes = [network(torch.float32, (72, 72, 80)) for _ in range(2)], []
    for model, dtype in zip(models, (None, kept), strict=True):
        optimizer = classes()[rule](model.named_parameters(), lr=1e-2, state_dtype=dtype)
        for index in range(12):
            give(model, index)
            optimizer.step()
        states = [*optimizer.state.values(), *optimizer.matrix_states.values()]
        names = ("exp_avg", "exp_avg_sq", "momentum_buffer")
        sizes.append(sum(v.nbytes for s in states for n, v in s.items() if n in names and v.numel() > 100))
    assert sizes[1] / sizes[0] < share
    start, wide, narrow = arrays(network(torch.float32, (72, 72, 80))), *map(arrays, models)
    difference, change = (
        sum(np.abs(one[name] - other[name]).sum() for name in start) for one, other in ((narrow, wide), (wide, start))
    )
    assert 0.0 < difference < bound * change


@pytest.mark.parametrize("rule", ["soap", "signsgd"])
@pytest.mark.parametrize("kept", [None, "int8"])
def test_goes_on_bitwise_from_a_checkpoint(rule: str, kept: str | None, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Any]:
        model = network(torch.float32, (72, 72, 80))
        return model, classes()[rule](model.named_parameters(), lr=1e-2, state_dtype=kept)

    (model, optimizer), (other, resumed) = make(), make()
    for index in range(6):
        if index == 3:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved")
        give(model, index)
        optimizer.step()
    saved = torch.load(tmp_path / "saved", weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for index in range(3, 6):
        give(other, index)
        resumed.step()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    copy.deepcopy(optimizer)
    assert type(pickle.loads(pickle.dumps(optimizer))) is type(optimizer)


@pytest.mark.parametrize(("written", "wanted"), [(None, "int8"), ("int8", None), ("int8", "bfloat16")])
def test_states_in_another_form_are_refused_by_name(written: str | None, wanted: str | None) -> None:
    model = network(torch.float32, (72, 72, 80))
    saved, other = (classes()["soap"](model.named_parameters(), state_dtype=kept) for kept in (written, wanted))
    give(model, 0)
    saved.step()
    with pytest.raises(MisfitError, match="state 'exp_avg' of '0.weight' .* in 8 bits: state_dtype is another one"):
        other.load_state_dict(saved.state_dict())


def test_reports_and_estimates_know_the_states() -> None:
    model = network(torch.float32, (72, 72, 80))
    optimizer = classes()["soap"](model.named_parameters(), state_dtype="int8")
    (rank,) = estimate(optimizer, world=1)
    give(model, 0)
    optimizer.step()
    held = optimizer.state_bytes()
    assert (rank.element_state_bytes, rank.matrix_state_bytes) == (held["element"], held["matrix"])
    rows = {row.name: row for row in optimizer.explain()}
    assert (rows["0.weight"].rule, rows["0.bias"].rule) == ("matrix", "fallback")
    assert sum(row.state_bytes for row in rows.values()) == sum(held.values())
    ranks = estimate(optimizer, world=4, stage=2)
    assert sum(rank.matrix_state_bytes for rank in ranks) == held["matrix"] and max(r.bytes_sent for r in ranks) > 0


@pytest.mark.parametrize(
    ("rule", "options", "words"),
    [
        ("soap", {"precondition_frequency": 0}, "SOAPRW: precondition_frequency=0 is invalid"),
        ("soap", {"state_dtype": "int4"}, "state_dtype='int4' is invalid"),
        ("signsgd", {"momentum": 1.5}, "SignSGD: momentum=1.5 is invalid"),
    ],
)
def test_bad_values_are_refused(rule: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        classes()[rule](network().named_parameters(), **options)


def test_an_element_wise_rule_has_no_fallback() -> None:
    model = network()
    with pytest.raises(OptionError, match=r"fallback=True is invalid for the group of '.*': .* no other one"):
        classes()["signsgd"]([{"params": list(model.named_parameters()), "fallback": True}])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda g, s: g[0], r"direction is \(12,\) and must be \(12, 12\)"),
        (lambda g, s: s.update(L=g[:3]) or g, r"L is \(3, 12\) and must be \(12, 12\)"),
        (lambda g, s: s.update(l=g) or g, r"l is \(12, 12\) and must be declared in the states of the spec"),
        (lambda g, s: s.pop("L") * 0, r"L is gone and must be \(12, 12\)"),
    ],
)
def test_what_a_function_must_not_return_is_refused_by_name(wrong: Any, words: str) -> None:
    model = network()
    optimizer = classes()["soap"](model.named_parameters())
    optimizer.update = lambda gradient, states, step, group: wrong(gradient, states)
    give(model, 0)
    with pytest.raises(RuntimeError, match=f"^update\\(\\) is invalid for '0.weight': .*{words}"):
        optimizer.step()
    assert int(optimizer.matrix_states["0.weight"]["step"]) == 0


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_a_first_gradient_that_is_not_finite_is_undone(broken: float) -> None:
    """Whatever the solver of eigenvectors makes of such values."""
    found = []
    for first in (broken, None):
        model = network(torch.float32, (72, 72, 80))
        optimizer = classes()["soap"](model.named_parameters(), skip_nonfinite=True)
        if first is not None:
            give(model, 7)
            model[0].weight.grad[1, 2] = first
            optimizer.step()
        for index in range(3):
            give(model, index)
            optimizer.step()
        found.append(arrays(model))
    assert all(np.array_equal(value, found[1][name]) for name, value in found[0].items())


def test_nonfinite_steps_are_undone() -> None:
    model = network(torch.float32, (72, 72, 80))
    optimizer = classes()["soap"](model.named_parameters(), skip_nonfinite=True, state_dtype="int8")
    for index in range(2):
        give(model, index)
        optimizer.step()
    before, kept = arrays(model), {k: v.clone() for k, v in optimizer.matrix_states["0.weight"].items()}
    give(model, 2)
    model[0].weight.grad[0, 0] = torch.inf
    optimizer.step()
    optimizer.settle()
    after: dict[str, Tensor] = optimizer.matrix_states["0.weight"]
    assert all(np.array_equal(value, before[name]) for name, value in arrays(model).items())
    assert all(torch.equal(value, after[name]) for name, value in kept.items())


@pytest.mark.parametrize(("name", "most"), [("soap.py", 250), ("signsgd.py", 70)])
def test_an_example_is_short_and_imports_only_what_is_promised(name: str, most: int) -> None:
    source = (EXAMPLES / name).read_text()
    assert len(source.splitlines()) <= most
    assert [line.split()[1] for line in source.splitlines() if line.startswith("from rankwise")] == [
        "rankwise.extension"
    ]
