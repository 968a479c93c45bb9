"""An optimizer's life in any order of events, beside one that lives it simply.

The simple one has every parameter in a group of its own, is never saved, loaded, copied or regrouped, and gets the same
gradients and rates: whatever happens to the other, the weights and the counts stay the same.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import BY_NAME, Case
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from saved_files import through_a_file
from torch import Tensor, nn

SHAPES = ((10, 8), (8, 10), (12, 12), (9,), ())
LATE = ((8, 9), (7,))
TYPES = ["mars-adamw", "mars-lion", "mars-shampoo", "mars-m", "sonew-diagonal", "sonew-tridiagonal", "ldadam"]
RATE = 1e-2


def parameters(shapes: tuple[tuple[int, ...], ...], first: int, seed: int) -> dict[str, nn.Parameter]:
    torch.manual_seed(seed)
    return {f"p{first + at}": nn.Parameter(torch.randn(shape).double()) for at, shape in enumerate(shapes)}


class Life(RuleBasedStateMachine):
    case: Case

    @initialize(split=st.integers(1, len(SHAPES) - 1))
    def born(self, split: int) -> None:
        self.ours, self.simple = parameters(SHAPES, 0, 0), parameters(SHAPES, 0, 0)
        names = list(self.ours)
        self.rates = {name: RATE for name in names}
        self.frozen: set[str] = set()
        self.groups = [names[:split], names[split:]]
        self.optimizer = self._build()
        single = [{"params": [(name, value)]} for name, value in self.simple.items()]
        self.twin = self.case.cls(single, **{**self.case.options, "lr": RATE})
        self.steps = 0
        for position, group in enumerate(self.optimizer.param_groups):
            group["lr"] = RATE * 10**position
        self.step(1)

    def _build(self) -> Any:
        groups = [{"params": [(name, self.ours[name]) for name in names]} for names in self.groups if names]
        self.groups = [names for names in self.groups if names]
        return self.case.cls(groups, **{**self.case.options, "lr": RATE})

    def _set_rates(self) -> None:
        for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            for name in names:
                self.rates[name] = group["lr"]
        for group in self.twin.param_groups:
            group["lr"] = self.rates[group["param_names"][0]]

    @rule(times=st.integers(1, 3))
    def step(self, times: int) -> None:
        self._set_rates()
        for _ in range(times):
            self.steps += 1
            generator = torch.Generator().manual_seed(self.steps)
            for name in self.ours:
                gradient = torch.randn(self.ours[name].shape, generator=generator, dtype=torch.float64)
                for side in (self.ours, self.simple):
                    side[name].grad = None if name in self.frozen else gradient.to(side[name].dtype)
            self.optimizer.step()
            self.twin.step()

    @rule(at=st.integers(0, 9), rate=st.sampled_from([0.0, 1e-3, 3e-2]))
    def change_rate(self, at: int, rate: float) -> None:
        self.optimizer.param_groups[at % len(self.groups)]["lr"] = rate

    @rule(at=st.integers(0, 9))
    def freeze_or_unfreeze(self, at: int) -> None:
        self.frozen ^= {list(self.ours)[at % len(self.ours)]}

    @rule(at=st.integers(0, 9), to=st.integers(0, 9), place=st.integers(0, 9))
    def move(self, at: int, to: int, place: int) -> None:
        name = list(self.ours)[at % len(self.ours)]
        to %= len(self.groups)
        source = next(index for index, names in enumerate(self.groups) if name in names)
        if len(self.groups[source]) == 1:
            return
        for index, insert in ((source, False), (to, True)):
            group, names = self.optimizer.param_groups[index], self.groups[index]
            if insert:
                names.insert(place % (len(names) + 1), name)
            else:
                names.remove(name)
            group["params"] = [self.ours[other] for other in names]
            group["param_names"] = list(names)
        self.step(1)

    @rule()
    def add_group(self) -> None:
        if "p5" in self.ours:
            return
        late = parameters(LATE, len(SHAPES), 1), parameters(LATE, len(SHAPES), 1)
        self.ours |= late[0]
        self.simple |= late[1]
        self.groups.append(list(late[0]))
        self.optimizer.add_param_group({"params": list(late[0].items()), "lr": 2e-3})
        for pair in late[1].items():
            self.twin.add_param_group({"params": [pair], "lr": 2e-3})

    @rule(fresh=st.booleans(), through=st.booleans(), backwards=st.booleans())
    def save_and_load(self, fresh: bool, through: bool, backwards: bool) -> None:
        state = self.optimizer.state_dict()
        state = through_a_file(state) if through else copy.deepcopy(state)
        if fresh:
            self.groups = [names[:: -1 if backwards else 1] for names in self.groups]
            self.ours = {name: nn.Parameter(value.detach().clone()) for name, value in self.ours.items()}
            self.optimizer = self._build()
        self.optimizer.load_state_dict(state)

    @rule()
    def copied(self) -> None:
        self.optimizer, self.ours = copy.deepcopy((self.optimizer, self.ours))

    @rule()
    def load_what_does_not_fit(self) -> None:
        state = copy.deepcopy(self.optimizer.state_dict())
        found = [entry for entry in state["state"].values() if "exp_avg" in entry and entry["exp_avg"].numel() > 1]
        if found:
            found[-1]["exp_avg"] = torch.zeros(3, 5)
            with pytest.raises(ValueError, match="has the shape .3, 5., which is invalid"):
                self.optimizer.load_state_dict(state)

    @rule()
    def there_and_back(self) -> None:
        """To a wider type, which loses nothing, and a structural edit that is taken back."""
        group = self.optimizer.param_groups[0]
        group["fallback"] = True
        had = [name for name in self.groups[0] if self.optimizer.state.get(self.ours[name])]
        ruled = {row.name for row in self.optimizer.explain() if row.rule == "matrix"}
        if ruled.intersection(had):
            with pytest.raises(ValueError, match="fallback=True in param group 0 is invalid"):
                self.optimizer.step()
        del group["fallback"]

    @invariant()
    def lives_as_the_simple_one(self) -> None:
        if not hasattr(self, "twin"):
            return
        for name, value in self.ours.items():
            other = self.simple[name]
            assert torch.allclose(value, other, rtol=0, atol=1e-9), (name, float((value - other).abs().max()))
            counts = [float(each.state[p].get("step", 0)) for each, p in self._pairs(name)]
            assert counts[0] == counts[1], name

    def _pairs(self, name: str) -> list[tuple[Any, Tensor]]:
        return [(self.optimizer, self.ours[name]), (self.twin, self.simple[name])]


def live(name: str, examples: int, length: int, derandomize: bool) -> None:
    machine = type(f"Life_{name}", (Life,), {"case": BY_NAME[name]})
    chosen = settings(
        max_examples=examples,
        stateful_step_count=length,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.parametrize("name", TYPES)
def test_a_life(name: str) -> None:
    live(name, 12, 20, True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TYPES)
def test_many_lives(name: str) -> None:
    live(name, 150, 40, False)
