"""What grows with the number of parameters, or of steps: counted, not timed."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from cases import Case, cases
from torch import Tensor, nn

from rankwise import MKOR, SONew
from rankwise.comm.owner_plan import MatrixTask
from rankwise.layout.indices import DeviceIndices
from rankwise.layout.layout_source import WholeParameters


def model_of(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(12, 12) for _ in range(layers)))


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 12)).square().sum().backward()
    optimizer.step()


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Comparisons of tasks, and questions about what a tensor stores."""
    found: Counter[str] = Counter()
    equal, contents = MatrixTask.__eq__, WholeParameters.contents

    def compared(self: MatrixTask, other: object) -> bool:
        found["task =="] += 1
        return equal(self, other)

    def asked(self: WholeParameters, tensor: Tensor) -> Any:
        found["contents"] += 1
        return contents(self, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(MatrixTask, "__eq__", compared)
        patch.setattr(WholeParameters, "contents", asked)
        yield found


@cases(names=["mars-adamw", "mars-m", "sonew-tridiagonal", "ldadam", "mkor-adamw"])
def test_plans_and_dictionaries_take_work_in_proportion(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the parameters, at most about twice of everything that is counted; quadratic would be four times."""
    counts = []
    for layers in (20, 40):
        torch.manual_seed(0)
        model = model_of(layers)
        optimizer = case.build(model.named_parameters(), model, **({"rank": 2} if "rank" in case.options else {}))
        lines = Counter[str]()
        with counting(monkeypatch) as found:
            with lines_counted(lines, "first step", partial(step, model, optimizer)) as call:
                call()
            with lines_counted(lines, "state_dict", optimizer.state_dict) as call:
                state = call()
            with lines_counted(lines, "load", optimizer.load_state_dict) as load:
                load(state)
            with lines_counted(lines, "loaded", optimizer.state_dict) as call:
                call()
        counts.append({**found, **lines})
    for name, count in counts[1].items():
        assert count <= 2.6 * counts[0].get(name, 0) + 50, (name, counts[0].get(name, 0), count)


@contextmanager
def lines_counted(found: Counter[str], name: str, call: Any) -> Iterator[Any]:
    """Lines of ours that a call goes through, by function: among all of them a quadratic one would not be seen."""

    def trace(frame: Any, event: str, _: Any) -> Any:
        if "rankwise" not in frame.f_code.co_filename:
            return None
        if event == "line":
            found[f"{name}: {frame.f_code.co_qualname}"] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield call
    finally:
        sys.settrace(before)


def test_steps_do_not_ask_which_rule_each_parameter_takes() -> None:
    """That is planned once; here also beside a weight that was frozen when MKOR was captured."""

    class Routes(dict[str, Any]):
        asked = 0

        def items(self) -> Any:
            Routes.asked += 1
            return super().items()

        def __getitem__(self, name: str) -> Any:
            Routes.asked += 1
            return super().__getitem__(name)

    model = model_of(4)
    model[1].weight.requires_grad_(False)
    optimizer = MKOR(model.named_parameters(), update_interval=2)
    optimizer.capture(model)
    for _ in range(2):  # planned in the first, announced in the second
        step(model, optimizer)
    optimizer.table.routes = Routes(optimizer.table.routes)
    for _ in range(3):
        step(model, optimizer)
    assert Routes.asked == 0


def test_an_index_is_kept_while_it_is_in_use() -> None:
    indices = DeviceIndices(torch.device("cpu"), kept=3)
    first = indices.of((0, 2))
    assert first.tolist() == [0, 2] and indices.of((0, 2)) is first
    for last in range(3, 10):
        indices.of((0, last))
        assert indices.of((0, 2)) is first
    assert len(indices) == 3 and (0, 3) not in indices


@cases(names=["mars-adamw", "mars-m", "sonew-tridiagonal", "mkor-lamb"])
def test_memory_does_not_grow_where_other_parameters_have_gradients_each_time(case: Case) -> None:
    torch.manual_seed(0)
    model = model_of(8)
    optimizer = case.build(model.named_parameters(), model)
    chosen = random.Random(0)
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.ones(2, 12)).square().sum().backward()
        for parameter in model.parameters():
            if chosen.random() < 0.4:
                parameter.grad = None
        optimizer.step()
    (unit,) = optimizer.planned_units
    assert len(unit.indices) <= 16
    assert unit.exchange is None or len(unit.exchange.indices) <= 16


@pytest.mark.parametrize("graft", ["adam", "rmsprop", "none"])
@pytest.mark.parametrize("chain", ["row", "tensor"])
def test_a_scalar_takes_sonews_rule(chain: str, graft: str) -> None:
    """As a vector of one element."""
    found = []
    for shape in ((), (1,)):
        scalar = nn.Parameter(torch.full(shape, 2.0))
        optimizer = SONew([{"params": [scalar], "fallback": False}], chain=chain, graft=graft)
        for _ in range(3):
            scalar.grad = scalar.detach() * 0.5
            optimizer.step()
        found.append(scalar.detach().reshape(()))
    assert torch.equal(*found) and found[0] != 2.0
