"""The compiled forms of whole steps against the general ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise import MARS, LDAdam, SONew
from rankwise.kernels import lists as foreach
from rankwise.kernels import native
from rankwise.kernels.dispatch import kernels_for, using
from rankwise.kernels.native import compiled_passes as elementwise
from rankwise.ldadam import formulas
from rankwise.plan import step_unit as unit
from rankwise.sonew import native as native_sonew
from rankwise.sonew.optimizer import DIRECTIONS

CONFIGURATIONS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "mars-adamw": (MARS, {"weight_decay": 0.1}),
    "mars-lion": (MARS, {"variant": "lion", "weight_decay": 0.1}),
    "mars-bf16-reference": (MARS, {"reference_dtype": "bfloat16", "weight_decay": 0.1}),
    "mars-m": (MARS, {"variant": "muon", "ns_dtype": "float32"}),
    "mars-m-cans": (MARS, {"variant": "muon", "ns_dtype": "float32", "ns_coefficients": "cans", "ns_steps": 6}),
    "sonew-diagonal": (SONew, {"band": 0, "eps": 1e-4}),
    "sonew-tridiagonal": (SONew, {"weight_decay": 0.1, "eps": 1e-4}),
    "sonew-band4": (SONew, {"band": 4, "chain": "tensor", "eps": 1e-4}),
    "ldadam": (LDAdam, {"rank": 16, "weight_decay": 0.1}),
    "ldadam-rank-32": (LDAdam, {"rank": 32}),
    "ldadam-rank-5": (LDAdam, {"rank": 5}),
    "ldadam-no-feedback": (LDAdam, {"rank": 16, "error_feedback": False}),
    "ldadam-bf16-error": (LDAdam, {"rank": 16, "error_dtype": "bfloat16"}),
    "ldadam-int8-error": (LDAdam, {"rank": 16, "error_dtype": "int8"}),
    "ldadam-skip": (LDAdam, {"rank": 16, "skip_nonfinite": True}),
}
LDADAMS = [name for name in CONFIGURATIONS if name.startswith("ldadam")]
Change = Callable[[int, Any, list[nn.Parameter]], None]


def _network(layers: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    widths = [(64, 160), (160, 100), (100, 100)]
    return nn.Sequential(*(nn.Linear(*width) for width in widths for _ in range(layers)))


def _steps(
    name: str, kernels: ModuleType | None, change: Change | None = None, layers: int = 1, steps: int = 5
) -> tuple[list[Tensor], dict[str, Any]]:
    """Weights after steps on the same gradients, and the health counters."""
    kind, options = CONFIGURATIONS[name]
    model = _network(layers)
    parameters = list(model.parameters())
    optimizer = kind(list(model.named_parameters()), lr=1e-3, **options)
    generator = torch.Generator().manual_seed(1)
    with nullcontext() if kernels is None else using(kernels):
        for step in range(steps):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            if change is not None:
                change(step, optimizer, parameters)
            given = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
            optimizer.step()
            for parameter, gradient in zip(parameters, given, strict=True):
                assert gradient is None or torch.equal(parameter.grad, gradient), "gradients are the framework's"
    return [parameter.detach() for parameter in parameters], optimizer.health.read()


def _assert_alike(found: list[Tensor], expected: list[Tensor], signs: bool = False) -> None:
    """Within a few thousandths of the largest change; of signs of rounded numbers, one in a thousand may differ."""
    start = [parameter.detach() for parameter in _network(len(found) // 6).parameters()]
    for own, other, before in zip(found, expected, start, strict=True):
        moved = (other - before).abs().max()
        assert float(moved) > 0.0
        differing = ((own - other).abs() > 2e-3 * moved).sum()
        assert float(differing) <= (1e-3 if signs else 0.0) * own.numel()


@pytest.mark.compiled
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_steps_are_those_of_the_general_forms(name: str) -> None:
    expected, known = _steps(name, foreach)
    found, counted = _steps(name, native)
    _assert_alike(found, expected, signs=name == "mars-lion")
    assert counted == pytest.approx(known, rel=1e-3)


@pytest.mark.parametrize("form", [foreach, pytest.param(native, marks=pytest.mark.compiled)], ids=["general", "native"])
def test_a_buffer_of_a_wider_type_than_the_step(form: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds what the step's own type does, to the bit."""
    monkeypatch.setitem(CONFIGURATIONS, "wide", (LDAdam, {"rank": 16, "error_dtype": "float64"}))
    monkeypatch.setitem(CONFIGURATIONS, "own", (LDAdam, {"rank": 16}))
    (found, _), (expected, _) = _steps("wide", form), _steps("own", form)
    assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))


def _zero(step: int, optimizer: Any, parameters: list[nn.Parameter]) -> None:
    if step == 2:
        parameters[0].grad.zero_()


def _rank_one(step: int, optimizer: Any, parameters: list[nn.Parameter]) -> None:
    """With nothing in the error buffer, Cholesky fails on it."""
    for state in optimizer.matrix_states.values():
        state["exp_avg"].zero_()
    for state in optimizer.state.values():
        if "error" in state:
            state["error"].zero_()
    gradient = parameters[0].grad
    gradient.copy_(gradient[:, :1] @ gradient[:1])


def _scheduled(step: int, optimizer: Any, parameters: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["betas"] = (0.9 + 0.01 * step, 0.99)


def _missing(step: int, optimizer: Any, parameters: list[nn.Parameter]) -> None:
    if step in (0, 3):
        parameters[2].grad = None


@pytest.mark.parametrize("change", [_zero, _scheduled, _missing], ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", LDADAMS)
def test_whatever_the_gradients(name: str, change: Change) -> None:
    expected, known = _steps(name, foreach, change)
    found, counted = _steps(name, native, change)
    _assert_alike(found, expected)
    assert counted["matrices_updated"] == known["matrices_updated"]


@pytest.mark.compiled
def test_a_matrix_that_cholesky_fails_on_takes_householder(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    original = formulas._householder_basis

    def noted(matrix: Tensor, *rest: Any) -> Tensor:
        shapes.append(tuple(matrix.shape))
        return original(matrix, *rest)

    monkeypatch.setattr(formulas, "_householder_basis", noted)
    expected, known = _steps("ldadam", foreach, _rank_one)
    assert not shapes and known["kept_bases"] == 4
    found, _ = _steps("ldadam", native, _rank_one)
    assert shapes == [(1, 64, 160)] * 4, "the first step is not among them"
    # The directions beside the one that has a gradient are free: the others' weights are what must agree.
    _assert_alike([*expected[:2], *found[2:]], expected)
    assert bool(found[0].isfinite().all()) and not torch.equal(found[0], _network()[0].weight)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_without_a_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing asks for a library that is not there, and the steps are the general ones."""
    expected, _ = _steps(name, foreach)
    for module in (elementwise, native_sonew):
        monkeypatch.setattr(module, "library", lambda *_: None)
    assert kernels_for(torch.device("cpu"), torch.float32) is foreach
    found, _ = _steps(name, None)
    assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))


@pytest.mark.compiled
def test_directions_lie_where_they_lay() -> None:
    """Pages that are new at every step cost more than what is written to them."""
    places: list[list[int]] = []

    def noted(step: int, optimizer: Any, parameters: list[nn.Parameter]) -> None:
        for planned in optimizer.planner.units.values():
            places.append([planned.notes[DIRECTIONS].data_ptr()])

    _steps("sonew-tridiagonal", native, noted)
    assert len(places) == 4 and places[0] and all(place == places[0] for place in places)


@pytest.mark.compiled
@pytest.mark.parametrize("at_once", [1, 26240])
def test_directions_are_there_a_part_at_a_time(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a host must have room for is no more than that, or a direction of the largest weight."""
    whole, _ = _steps("sonew-tridiagonal", native)
    sizes: set[int] = set()

    def noted(step: int, optimizer: Any, parameters: list[nn.Parameter]) -> None:
        sizes.update(each.notes[DIRECTIONS].numel() for each in optimizer.planner.units.values())

    monkeypatch.setattr(unit, "AT_ONCE", at_once)
    parts, _ = _steps("sonew-tridiagonal", native, noted)
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))
    assert sizes == {max(at_once, 16000)}


class _Counted:
    """A library whose calls are counted."""

    def __init__(self, library: Any, calls: list[str]) -> None:
        self._library, self._calls = library, calls

    def __getattr__(self, name: str) -> Any:
        self._calls.append(name)
        return getattr(self._library, name)


def _counted(find: Callable[..., Any], calls: list[str], *source: Any) -> _Counted:
    return _Counted(find(*source), calls)


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["mars-adamw", "mars-lion", "sonew-tridiagonal", "sonew-band4"])
def test_calls_do_not_depend_on_the_number_of_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for module in (elementwise, native_sonew):
        monkeypatch.setattr(module, "library", partial(_counted, module.library, calls))

    def settled(step: int, *_: Any) -> None:
        if step == 1:
            calls.clear()  # the first step makes states and bases

    counts = {}
    for layers in (1, 4):
        _steps(name, native, settled, layers=layers)
        counts[layers] = list(calls)
    assert counts[1] == counts[4] and counts[1]
