"""What users do to an optimizer between two steps, by name; each action changes a :class:`Run` in place."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SHAPES: Mapping[str, tuple[int, ...]] = {"a": (24, 16), "b": (24, 16), "c": (16, 40), "bias": (24,)}


def parameters() -> dict[str, nn.Parameter]:
    """Two matrices of one shape, another one, and a vector."""
    source = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=source)) for name, shape in SHAPES.items()}


@dataclass
class Run:
    """An optimizer and what it steps; gradients depend on the number of the step alone."""

    build: Callable[[Any], Any]
    weights: dict[str, nn.Parameter] = field(default_factory=parameters)
    optimizer: Any = None
    past: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = [{"params": [(name, self.weights[name]) for name in names]} for names in (("a", "b", "bias"), ("c",))]
        self.optimizer = self.build(groups)

    def step(self, number: int) -> None:
        """The step of this number."""
        for place, (name, shape) in enumerate(SHAPES.items()):
            source = torch.Generator().manual_seed(1000 * place + number)
            steady = torch.randn(shape, generator=torch.Generator().manual_seed(place))
            self.weights[name].grad = torch.randn(shape, generator=source) + steady
        self.optimizer.step()

    def steps(self, numbers: range) -> Run:
        """Several steps."""
        for number in numbers:
            self.step(number)
        return self

    def values(self) -> dict[str, Tensor]:
        """Copies of the weights."""
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    def of(self, name: str) -> dict[str, Any]:
        """The states of a parameter."""
        found: dict[str, Any] = self.optimizer.state[self.weights[name]]
        return found

    def moment(self, name: str) -> str:
        """A state of a parameter that has a value for each of its elements; empty if there is none."""
        return next((key for key, value in self.of(name).items() if isinstance(value, Tensor) and value.dim()), "")

    def with_moment(self) -> str:
        """A parameter that has such a state."""
        return next(name for name in SHAPES if self.moment(name))

    def replaced(self, found: Any) -> None:
        """Go on with a copy."""
        self.weights, self.optimizer = found


def _moment(change: Callable[[Tensor], Any]) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        name = run.with_moment()
        key = run.moment(name)
        run.of(name)[key] = change(run.of(name)[key])

    return act


def _each_state(change: Callable[[Any], Any]) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        for state in run.optimizer.state.values():
            for key, value in state.items():
                state[key] = change(value) if isinstance(value, Tensor) else value

    return act


def _swap(run: Run) -> None:
    state, a, b = run.optimizer.state, run.weights["a"], run.weights["b"]
    state[a], state[b] = state[b], state[a]


def _of_another(steps: int, fresh: bool = False) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        other = Run(run.build).steps(range(50, 50 + steps))
        if fresh:
            run.optimizer = Run(run.build, run.weights).optimizer
        for name, weight in run.weights.items():
            run.optimizer.state[weight] = copy.deepcopy(other.of(name))

    return act


def _put_back(run: Run) -> None:
    """The states of two steps ago, whatever has been done since."""
    run.optimizer.state = run.past["state"]


def _reorder(run: Run) -> None:
    groups = run.optimizer.param_groups
    groups.reverse()
    for group in groups:
        group["params"].reverse()


def _emptied_and_filled(run: Run) -> None:
    group = run.optimizer.param_groups[0]
    kept, group["params"] = group["params"], []
    run.step(99)
    group["params"] = kept
    run.past["extra"] = ("c",)


def _deleted(run: Run) -> None:
    group = run.optimizer.param_groups.pop()
    run.step(99)
    run.optimizer.param_groups.append(group)
    run.past["extra"] = ("a", "b", "bias")


def _added_to(run: Run) -> None:
    for state in run.optimizer.state.values():
        state["mine"] = torch.ones(3)
    for group in run.optimizer.param_groups:
        group["my_note"] = "kept"


def _rebound(run: Run) -> None:
    for weight in run.weights.values():
        weight.data = weight.data.clone()


def _set(**values: Any) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        for name, value in values.items():
            setattr(run.optimizer, name, value)

    return act


def _into_another(take_over: Callable[[Any, Any], None]) -> Callable[[Run], None]:
    """Another optimizer of the same parameters gets everything that this one is."""

    def act(run: Run) -> None:
        other = Run(run.build, run.weights).optimizer
        take_over(other, run.optimizer)
        run.optimizer = other

    return act


ACTIONS: Mapping[str, Callable[[Run], None]] = {
    "nothing": lambda run: None,
    "state.clear()": lambda run: run.optimizer.state.clear(),
    "state = defaultdict(dict)": lambda run: _set(state=defaultdict(dict))(run),
    "state = {}": lambda run: _set(state={})(run),
    "state.pop(p)": lambda run: run.optimizer.state.pop(run.weights["a"]),
    "del state[p]": lambda run: run.optimizer.state.__delitem__(run.weights["c"]),
    "state[p] = {}": lambda run: run.optimizer.state.__setitem__(run.weights["a"], {}),
    "state[p].clear()": lambda run: run.of("a").clear(),
    "every state[p].clear()": lambda run: [state.clear() for state in run.optimizer.state.values()],
    "cleared twice": lambda run: [run.optimizer.state.clear(), run.step(98), run.optimizer.state.clear()],
    "cleared and saved": lambda run: [run.optimizer.state.clear(), run.optimizer.state_dict()],
    "cleared and loaded": lambda run: [
        run.optimizer.state.clear(),
        run.optimizer.load_state_dict(run.optimizer.state_dict()),
    ],
    "popped, saved and loaded": lambda run: [
        run.optimizer.state.pop(run.weights["a"]),
        run.optimizer.load_state_dict(run.optimizer.state_dict()),
    ],
    "loaded and cleared": lambda run: [
        run.optimizer.load_state_dict(run.optimizer.state_dict()),
        run.optimizer.state.clear(),
    ],
    "loaded and popped": lambda run: [
        run.optimizer.load_state_dict(run.optimizer.state_dict()),
        run.optimizer.state.pop(run.weights["a"]),
    ],
    "copied and cleared": lambda run: [
        run.replaced(copy.deepcopy((run.weights, run.optimizer))),
        run.optimizer.state.clear(),
    ],
    "no count": lambda run: run.of("a").pop("step"),
    "no moment": lambda run: run.of(run.with_moment()).pop(run.moment(run.with_moment())),
    "moment cloned": _moment(torch.clone),
    "moment in float64": _moment(lambda value: value.to(torch.float64)),
    "moment in bfloat16": _moment(lambda value: value.to(torch.bfloat16)),
    "moment shorter": _moment(lambda value: value[:1].clone()),
    "moment transposed": _moment(lambda value: value.mT.contiguous() if value.dim() > 1 else value[:1].clone()),
    "moment in columns": _moment(lambda value: value.mT.contiguous().mT if value.dim() > 1 else value.clone()),
    "moment a number": _moment(lambda value: 0.0),
    "moment None": _moment(lambda value: None),
    "count cloned": lambda run: run.of("a").update(step=run.of("a")["step"].clone()),
    "count in float64": lambda run: run.of("a").update(step=run.of("a")["step"].double()),
    "count set back": lambda run: run.of("a").update(step=torch.tensor(1.0)),
    "all cloned": _each_state(torch.clone),
    "all moved": _each_state(lambda value: value.to("cpu", copy=True)),
    "states copied": lambda run: _set(state=copy.deepcopy(run.optimizer.state))(run),
    "a dictionary of them": lambda run: _set(state=dict(run.optimizer.state))(run),
    "states swapped": _swap,
    "states of another optimizer": _of_another(9),
    "states of another in a fresh one": _of_another(9, fresh=True),
    "states of before": _put_back,
    "groups reordered": _reorder,
    "group emptied and filled": _emptied_and_filled,
    "group deleted and put back": _deleted,
    "keys added": _added_to,
    "data rebound": _rebound,
    "saved": lambda run: run.optimizer.state_dict(),
    "loaded": lambda run: run.optimizer.load_state_dict(run.optimizer.state_dict()),
    "loaded from a file": lambda run: run.optimizer.load_state_dict(
        pickle.loads(pickle.dumps(run.optimizer.state_dict()))
    ),
    "copied": lambda run: run.replaced(copy.deepcopy((run.weights, run.optimizer))),
    "pickled": lambda run: run.replaced(pickle.loads(pickle.dumps((run.weights, run.optimizer)))),
    "another by __dict__": _into_another(lambda other, ours: other.__dict__.update(ours.__dict__)),
    "another by __setstate__": _into_another(lambda other, ours: other.__setstate__(ours.__getstate__())),
    "another by load_state_dict": _into_another(lambda other, ours: other.load_state_dict(ours.state_dict())),
}
