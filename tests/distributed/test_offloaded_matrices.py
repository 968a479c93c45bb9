"""Matrices of the host that a device multiplies: the bits of a step on the host, and the bytes that were planned.

The host stands in for the device. What is brought and fetched is copied nevertheless, and no tensor of one side may
meet one of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import count
from typing import Any, NamedTuple

import apart_devices
import pytest
import torch
from apart_devices import DEVICE, HOST
from ranks import once, run_ranks
from simulated import CASES, Case, Framework, Model, world_group
from torch import Tensor, nn

from rankwise import MARS, MKOR, LDAdam
from rankwise.comm import host_link
from rankwise.comm.host_link import HostLink
from rankwise.estimate import estimate
from rankwise.extension import MatrixOptimizer, MatrixSpec, Options, State, options_as_keywords, shared
from rankwise.kernels.native import building
from rankwise.layout.layout_source import WholeParameters, WorkPlace


@dataclass(frozen=True)
class _Options(Options):
    owner = "Own"
    lr: float = shared.lr(0.02)
    betas: tuple[float, float] = shared.betas((0.9, 0.95), "Decay rates of AdamW.")
    eps: float = shared.eps("Added to the root.")
    weight_decay: float = shared.weight_decay("Decoupled decay.")
    state_dtype: str | None = shared.state_dtype("momentum_buffer", "exp_avg", "exp_avg_sq")
    skip_nonfinite: bool = shared.skip_nonfinite()
    transition_steps: int = shared.transition_steps()
    offload_compute: str = shared.offload_compute()


class _Spec(MatrixSpec):
    states = (State("momentum_buffer"),)


class _Own(MatrixOptimizer):
    """A user's rule: a cubic of its momentum."""

    spec_class = _Spec

    @options_as_keywords(_Options)
    def __init__(self, params: Any, options: _Options) -> None:
        super().__init__(params, options)

    def update(self, gradient: Tensor, states: dict[str, Tensor], step: int, group: Any) -> Tensor:
        buffer = states["momentum_buffer"].mul_(0.9).add_(gradient)
        return buffer @ buffer.mT @ buffer / (1 + step)


STEPS = 4
LAYOUTS = ("replicated", "flat", "cut", "narrowed", "views", "tensor")
WITH_MATRICES: dict[str, Case] = {
    name: CASES[name]
    for name in ("mars-muon", "mars-shampoo-rms", "ldadam-ef", "ldadam-plain", "ldadam-rates", "mkor-one-sided")
} | {
    "mars-int8": Case("mars-int8", MARS, {"variant": "muon", "clip": None, "state_dtype": "int8"}),
    "mars-sent": Case("mars-sent", MARS, {"variant": "muon", "comm_dtype": "int8", "ns_dtype": "bfloat16"}),
    "ldadam-narrow": Case("ldadam-narrow", LDAdam, {"rank": 2, "state_dtype": "bfloat16", "skip_nonfinite": True}),
    "own": Case("own", _Own, {"state_dtype": "bfloat16"}),
    "mkor": Case("mkor", MKOR, {"update_interval": 1, "factor_decay": 0.9}),
    "mkor-lamb": Case("mkor-lamb", MKOR, {"update_interval": 2, "backend": "lamb", "skip_nonfinite": True}),
    "mkor-sketch": Case("mkor-sketch", MKOR, {"rule": "sketch", "update_interval": 1}),
}


class _Offloaded(Framework):
    """Keeps weights and states on the host."""

    def work_place(self, group: Any) -> WorkPlace | None:
        return WorkPlace(torch.device("cpu"), group, self.tensor_parallel and self.tensor_parallel.group)


class Outcome(NamedTuple):
    """What a rank has after a run, the bytes that its last step sent up and down, and those that were planned."""

    values: dict[str, str]
    crossed: tuple[int, ...]
    planned: tuple[int, ...]


def _run(name: str, layout: str, rank: int, world: int, wish: str) -> Outcome:
    case = WITH_MATRICES[name]
    case = replace(case, options={**case.options, "offload_compute": wish})
    framework = _Offloaded(layout, case, torch.float32, rank, world, world_group() if world > 1 else None)
    for _ in range(STEPS - 1):
        framework.step()
    optimizer = framework.optimizer
    before = _crossed(optimizer)
    framework.step()
    crossed = tuple(now - then for now, then in zip(_crossed(optimizer), before, strict=True))
    values = {f"{piece.key} {piece.start}": _digest(own) for piece, own in framework.pieces()}
    for key, state in optimizer.matrix_states.everything().items():
        values |= {f"{key} {state_name}": _digest(value) for state_name, value in state.items()}
    own = estimate(optimizer)[rank]
    if layout == "narrowed" and not name.startswith("mkor"):  # which leaves out what was never seen
        ahead = estimate(case.optimizer(Model(torch.float32)), world, stage=2, alignment=2, offloaded=True)[rank]
        assert (ahead.bytes_up, ahead.bytes_down, ahead.periodic_down) == (
            *(own.bytes_up, own.bytes_down, own.periodic_down),
        ), "before any rank is there"
    due = (STEPS - 1) % own.period == 0
    return Outcome(values, crossed, (own.bytes_up + due * own.periodic_up, own.bytes_down + due * own.periodic_down))


def _digest(values: Tensor) -> str:
    return sha256(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _crossed(optimizer: Any) -> tuple[int, ...]:
    links = [unit.exchange.link for unit in optimizer.planned_units if unit.exchange is not None and unit.exchange.link]
    return sum(link.bytes_up for link in links), sum(link.bytes_down for link in links)


def _both(rank: int, world: int, names: tuple[str, ...], layouts: tuple[str, ...]) -> list[tuple[Outcome, Outcome]]:
    cells = [(name, layout) for name in names for layout in layouts]
    return [(_run(*cell, rank, world, "host"), _run(*cell, rank, world, "device")) for cell in cells]


def _check(stayed: Outcome, went: Outcome) -> None:
    assert stayed.values.keys() == went.values.keys()
    assert [name for name, bits in stayed.values.items() if went.values[name] != bits] == []
    assert stayed.crossed == (0, 0)
    assert went.crossed == went.planned


@pytest.mark.parametrize("name", WITH_MATRICES)
def test_one_process_has_the_bits_of_the_host_and_the_planned_bytes(name: str) -> None:
    ((stayed, went),) = _both(0, 1, (name,), ("flat",))
    _check(stayed, went)
    assert min(went.crossed) > 0


@once
def _outcomes(world: int) -> list[Any]:
    return run_ranks(world, _both, tuple(WITH_MATRICES), LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WITH_MATRICES)
def test_ranks_have_the_bits_of_the_host_and_the_planned_bytes(name: str, layout: str) -> None:
    """With two ranks, of which some hold nothing of a matrix, or own none."""
    place = list(WITH_MATRICES).index(name) * len(LAYOUTS) + LAYOUTS.index(layout)
    for rank in _outcomes(2):
        _check(*rank[place])


@pytest.mark.parametrize("place", ["bring", "fetch"])
@pytest.mark.parametrize("name", ["mars-muon", "ldadam-ef"])
def test_a_step_that_fails_on_the_way_is_no_step(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``skip_nonfinite``, which has copies of everything: in the second batch, on either way."""
    case = WITH_MATRICES[name]
    case = replace(case, options={**case.options, "offload_compute": "device", "skip_nonfinite": True})
    undisturbed, framework = (_Offloaded("flat", case, torch.float32) for _ in range(2))
    for step in range(3):
        undisturbed.step()
        if step == 1:
            before, carry = _everything(framework), getattr(HostLink, place)
            calls = count(1)

            def fail(*args: Any, calls: Any = calls, carry: Any = carry) -> Any:
                if next(calls) == 3:
                    raise torch.OutOfMemoryError("no memory on the device")
                return carry(*args)

            with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
                patched.setattr(HostLink, place, fail)
                framework.step()
            assert _everything(framework) == before
        framework.step()
        assert _everything(framework) == _everything(undisturbed)


def _everything(framework: Framework) -> dict[str, str]:
    optimizer = framework.optimizer
    states = {**dict(enumerate(optimizer.state.values())), **optimizer.matrix_states.everything()}
    found = {f"{key} {name}": _digest(value) for key, state in states.items() for name, value in state.items()}
    return found | {f"{piece.key} {piece.start}": _digest(own) for piece, own in framework.pieces()}


@contextmanager
def _watched() -> Iterator[Any]:
    """Operations may not mix what the link has made for the device with what belongs to the host."""
    with pytest.MonkeyPatch.context() as patched, apart_devices.apart(copies_stay=True) as places:
        for name, place in (("_memory", DEVICE), ("_host_memory", HOST)):
            made = getattr(host_link, name)
            patched.setattr(host_link, name, lambda *args, made=made, place=place: places.put(made(*args), place))
        yield places


@pytest.mark.parametrize("name", [name for name in WITH_MATRICES if name != "mars-int8"])
def test_nothing_mixes_the_host_and_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled passes, whose reads nothing could watch."""
    monkeypatch.setenv("RANKWISE_NATIVE", "0")
    building.library.cache_clear()
    case = WITH_MATRICES[name]
    case = replace(case, options={**case.options, "offload_compute": "device"})
    with _watched() as places:
        framework = _Offloaded("flat", case, torch.float32)
        for tensor, _ in framework.shards:
            places.put(tensor, HOST)
        for _ in range(2):
            framework.step()
            for state in (*framework.optimizer.state.values(), *framework.optimizer.matrix_states.values()):
                for value in state.values():
                    places.put(value, HOST)
        assert places.crossed[DEVICE] and places.crossed[HOST]
    building.library.cache_clear()


# --- what users do between steps -------------------------------------------------------------------------------------

PLAIN = ("mars-muon", "mars-int8", "ldadam-ef", "ldadam-narrow", "mkor", "mkor-sketch")


class _Training:
    """A user's loop of one process, whose optimizers keep weights and states on the host."""

    def __init__(self, name: str, wish: str, parts: int = 1) -> None:
        torch.manual_seed(0)
        self.name, self.count = name, 0
        self.model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
        named = list(self.model.named_parameters())
        held = [named[:2], named[2:]] if parts == 2 else [named]
        self.optimizers = [self._built(wish, params) for params in held]

    def _built(self, wish: str, params: Any) -> Any:
        case = WITH_MATRICES[self.name]
        options = {key: "float32" if value == "DTYPE" else value for key, value in case.options.items()}
        optimizer = case.build(params, lr=1e-2, offload_compute=wish, **options)
        optimizer.capture(self.model)
        return optimizer

    def steps(self, number: int) -> None:
        for _ in range(number):
            inputs = torch.randn(16, 12, generator=torch.Generator().manual_seed(self.count))
            self.model(inputs).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            self.count += 1

    def grow(self, other: str) -> None:
        self.model.append(nn.Linear(8, 8))
        added = [(f"5.{name}", parameter) for name, parameter in self.model[5].named_parameters()]
        self.optimizers[0].add_param_group({"params": added})
        self.optimizers[0].capture(self.model)

    def copy(self, other: str) -> None:
        self.model, self.optimizers = deepcopy((self.model, self.optimizers))
        self.optimizers[0].capture(self.model)

    def reset(self, other: str) -> None:
        self.optimizers[0].state.pop(self.model[2].weight)
        self.steps(2)
        self.optimizers[0].state.clear()

    def move(self, other: str) -> None:
        """To a new optimizer that multiplies in the other place."""
        saved = deepcopy(self.optimizers[0].state_dict())
        self.optimizers = [self._built(other, self.model.named_parameters())]
        self.optimizers[0].load_state_dict(saved)

    def digests(self) -> list[str]:
        values: list[Tensor] = [parameter.detach() for parameter in self.model.parameters()]
        for optimizer in self.optimizers:
            for state in (*optimizer.state.values(), *optimizer.matrix_states.everything().values()):
                values += [value for _, value in sorted(state.items())]
        return [_digest(value) for value in values]


EVENTS: dict[str, Callable[[_Training, str], None]] = {
    "grows": _Training.grow,
    "is copied": _Training.copy,
    "is reset": _Training.reset,
    "is moved": _Training.move,
    "has two optimizers": lambda training, other: None,
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", PLAIN)
def test_what_users_do_between_steps_is_alike_in_both_places(
    name: str, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WholeParameters, "work_place", lambda self, group: WorkPlace(torch.device("cpu"), group))
    ends = []
    for wish, other in (("host", "device"), ("device", "host")):
        training = _Training(name, wish, parts=2 if event == "has two optimizers" else 1)
        training.steps(3)
        assert (_crossed(training.optimizers[0]) > (0, 0)) == (wish == "device")
        EVENTS[event](training, other)
        training.steps(2)
        ends.append(training.digests())
    assert ends[0] == ends[1]
