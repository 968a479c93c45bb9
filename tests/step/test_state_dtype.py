"""``state_dtype``: what narrow states weigh, what checkpoints make of them, and what no gradient must do to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise import MARS, MKOR, LDAdam, SONew

TYPES = (None, "bfloat16", "int8")
KINDS: dict[str, Callable[..., Any]] = {
    "mars-adamw": MARS,
    "mars-lion": lambda params, **options: MARS(params, variant="lion", **options),
    "mars-m": lambda params, **options: MARS(params, variant="muon", ns_dtype="float32", **options),
    "sonew": SONew,
    "ldadam": lambda params, **options: LDAdam(params, rank=4, **options),
    "mkor": lambda params, **options: MKOR(params, update_interval=2, **options),
    "mkor-lamb": lambda params, **options: MKOR(params, update_interval=2, backend="lamb", **options),
}
# Bytes of element state a parameter, exponents and float32 vectors with them.
MOST = {"mars-adamw": 3.2, "mars-lion": 2.2, "mars-m": 2.2, "sonew": 4.2, "ldadam": 1.2, "mkor": 2.2, "mkor-lamb": 2.2}


class Net(nn.Module):
    """Matrices whose sizes are no multiples of a block, one too small for codes, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a, self.b, self.c = nn.Linear(67, 131), nn.Linear(131, 65), nn.Linear(65, 7, bias=False)
        for parameter in self.parameters():
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))  # type: ignore[no-any-return]


def _made(kind: str, **options: Any) -> tuple[Net, Any]:
    model = Net()
    optimizer = KINDS[kind](model.named_parameters(), lr=1e-2, **options)
    optimizer.capture(model)
    return model, optimizer


def _train(model: Net, optimizer: Any, steps: range, scale: float = 1.0) -> None:
    for step in steps:
        x = torch.randn(16, 67, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (scale * model(x).square().mean()).backward()
        optimizer.step()


@torch.no_grad()
def _loss(model: Net) -> float:
    return float(model(torch.randn(64, 67, generator=torch.Generator().manual_seed(99))).square().mean())


def _weights(model: Net) -> Tensor:
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])


def _bits(optimizer: Any) -> list[Tensor]:
    states = [state for _, state in sorted(optimizer.state_dict()["state"].items())]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_they_weigh(kind: str) -> None:
    model = nn.Sequential(nn.Linear(256, 300), nn.Linear(300, 256))
    optimizer = KINDS[kind](model.named_parameters(), lr=1e-2, state_dtype="int8")
    optimizer.capture(model)
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert MOST[kind] - 0.2 < optimizer.state_bytes()["element"] / parameters <= MOST[kind]


def test_subspaces_of_a_quarter_of_the_width() -> None:
    model = nn.Sequential(nn.Linear(256, 300, bias=False), nn.Linear(300, 256, bias=False))
    optimizer = LDAdam(model.named_parameters(), lr=1e-2, rank=64, state_dtype="int8")
    model(torch.randn(4, 256)).square().mean().backward()
    optimizer.step()
    state = optimizer.matrix_states["0.weight"]
    assert {state[name].dtype for name in ("basis", "exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    assert 2.3 < sum(optimizer.state_bytes().values()) / (2 * 256 * 300) <= 2.5


@pytest.mark.parametrize(("state", "most"), [("exp_avg", 3e-3), ("exp_avg_sq", 2e-3), ("basis", 1.5e-2)])
def test_rounded_subspaces(state: str, most: float) -> None:
    """Rounding a moment does not add up: the next momentum is made of the error buffer alone, where it is exact."""
    generator = torch.Generator().manual_seed(1)
    left, right = (
        torch.linalg.qr(torch.randn(size, 40, generator=generator, dtype=torch.float64))[0] for size in (40, 48)
    )
    target = 10 * left @ torch.diag(2.0 ** -torch.arange(40, dtype=torch.float64)) @ right.mT
    found = []
    for types in (None, {state: "bfloat16"}):
        weight = nn.Parameter(torch.zeros_like(target))
        options = {"rank": 4, "eps": 1e-2, "state_dtype": types, "state_rounding": "nearest"}
        optimizer = LDAdam([("weight", weight)], lr=1e-3, **options)  # type: ignore[arg-type]
        for _ in range(30):
            weight.grad = weight.detach() - target
            optimizer.step()
        found.append(weight.detach())
    wide, narrow = found
    assert 0 < float((narrow - wide).norm() / wide.norm()) < most


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_they_train(kind: str, dtype: str) -> None:
    """As far as wide states do, but for 3 % of the way."""
    (wide, exact), (narrow, rounded) = _made(kind), _made(kind, state_dtype=dtype)
    start = _loss(wide)
    for model, optimizer in ((wide, exact), (narrow, rounded)):
        _train(model, optimizer, range(12))
    assert not torch.equal(_weights(narrow), _weights(wide))
    assert abs(_loss(narrow) - _loss(wide)) <= 0.03 * (start - _loss(wide))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", ["auto", "stochastic"])
def test_runs_resume_bitwise(kind: str, rounding: str) -> None:
    """The noise is a function of the step, not of what was drawn before."""
    options = {"state_dtype": "int8", "state_rounding": rounding}
    (model, optimizer), (again, other) = _made(kind, **options), _made(kind, **options)
    _train(model, optimizer, range(3))
    _train(again, other, range(7, 9))
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _train(model, optimizer, range(3, 6))
    _train(again, other, range(3, 6))
    assert torch.equal(_weights(model), _weights(again))
    assert all(torch.equal(one, two) for one, two in zip(_bits(optimizer), _bits(other), strict=True))


@pytest.mark.parametrize("kind", ["mars-adamw", "sonew", "ldadam", "mkor"])
@pytest.mark.parametrize("before", TYPES)
@pytest.mark.parametrize("after", TYPES)
def test_a_run_goes_on_with_another_type(kind: str, before: str | None, after: str | None) -> None:
    (model, optimizer), (again, other) = _made(kind, state_dtype=before), _made(kind, state_dtype=after)
    _train(model, optimizer, range(3))
    again.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    start = _loss(model)
    _train(model, optimizer, range(3, 6))
    _train(again, other, range(3, 6))
    assert abs(_loss(again) - _loss(model)) <= 0.05 * (start - _loss(model))
    assert torch.equal(_weights(again), _weights(model)) == (before == after)
    fresh_model, fresh = _made(kind, state_dtype=after)
    _train(fresh_model, fresh, range(1))
    assert other.state_bytes() == fresh.state_bytes(), "the step has brought them to their type"


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_changes_no_code(kind: str) -> None:
    model, optimizer = _made(kind, state_dtype="int8", skip_nonfinite=True)
    _train(model, optimizer, range(2))
    codes = {id(s): {n: v.clone() for n, v in s.items() if isinstance(v, Tensor)} for s in optimizer.state.values()}
    weights = _weights(model).clone()
    optimizer.zero_grad()
    model(torch.randn(4, 67)).mean().backward()
    model.b.weight.grad[3, 5] = torch.nan
    optimizer.step()
    optimizer.settle()
    assert torch.equal(_weights(model), weights)
    for state in optimizer.state.values():
        assert all(
            torch.equal(value, codes[id(state)][name]) for name, value in state.items() if name in codes[id(state)]
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-30, 1e15])
def test_gradients_of_any_size(kind: str, scale: float) -> None:
    """Zeros, denormals, and squares near the ends of float32: finite where wide states are."""
    (wide, exact), (narrow, rounded) = _made(kind), _made(kind, state_dtype="int8")
    for model, optimizer in ((wide, exact), (narrow, rounded)):
        _train(model, optimizer, range(2), scale)
        _train(model, optimizer, range(2, 4))
    assert bool(_weights(narrow).isfinite().all()) or not bool(_weights(wide).isfinite().all())


def test_a_nan_stays_in_its_block() -> None:
    model, optimizer = _made("mars-adamw", state_dtype="int8", clip=None)
    _train(model, optimizer, range(2))
    model(torch.randn(4, 67)).mean().backward()
    model.a.weight.grad.view(-1)[200] = torch.nan
    optimizer.step()
    _train(model, optimizer, range(0))
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    broken = ~model.a.weight.detach().view(-1).isfinite()
    assert broken.nonzero().view(-1).tolist() == list(range(192, 256))
    assert all(bool(other.isfinite().all()) for name, other in model.named_parameters() if name != "a.weight")


def test_the_smallest_stay_wide() -> None:
    model, optimizer = _made("mars-adamw", state_dtype="int8")
    _train(model, optimizer, range(1))
    types = {name: optimizer.state[parameter]["exp_avg"].dtype for name, parameter in model.named_parameters()}
    assert types["a.weight"] == types["b.weight"] == torch.int8
    assert {types[name] for name in ("a.bias", "b.bias", "c.weight")} == {torch.float32}


def test_types_by_state() -> None:
    model, optimizer = _made("mars-adamw", state_dtype={"exp_avg": "bfloat16", "exp_avg_sq": "int8"})
    _train(model, optimizer, range(1))
    state = optimizer.state[model.a.weight]
    found = [state[name].dtype for name in ("exp_avg", "exp_avg_sq", "reference")]
    assert found == [torch.bfloat16, torch.uint8, torch.float32]
