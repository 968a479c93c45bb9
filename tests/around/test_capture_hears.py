"""MKOR hears what a step uses, and nothing else: what happens between two steps changes nothing, in any framework."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from heard_passes import (
    KINDS,
    WITHOUT_GRADIENTS,
    Event,
    Layers,
    Loop,
    batch,
    failed,
    mkor,
    plain_step,
    thrown_away,
    torch_ways,
    trajectory,
)
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankwise import MKOR
from rankwise.statistics import backward_reduction as backward_reduction

WAYS = ("model", "model in place", "optimizer", "optimizer in place", "one by one")
DISCARDS: dict[str, Event] = {
    f"{way}, {factor}": partial(thrown_away, way=way, factor=factor) for way in WAYS for factor in (3.0, math.nan)
}


def plain(kind: str) -> Loop:
    module = Layers()
    optimizer = KINDS[kind](module)
    return Loop(module, module, optimizer, step=partial(plain_step, optimizer), clear=torch_ways(module, optimizer))


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("event", [*DISCARDS, *WITHOUT_GRADIENTS, "failed"])
def test_plain(event: str, reentrant: bool | None) -> None:
    run = {**DISCARDS, **WITHOUT_GRADIENTS, "failed": failed}[event]
    if reentrant and event in ("penalty", "gradients asked for", "inputs"):
        pytest.skip("torch refuses checkpoints of the older kind there")
    for kind in KINDS:
        expected = trajectory(plain(kind), None, reentrant=reentrant)
        for between in (False, True)[: 1 + (event in WITHOUT_GRADIENTS)]:
            found = trajectory(plain(kind), run, between, reentrant)
            assert same(found, expected), (kind, between)
            assert not same(found, list(Layers().parameters()))


def _ddp(kind: str, rank: int) -> Loop:
    backward_reduction.BUCKET_ELEMENTS = 12  # a message for each layer or two, so that some leave early
    module = Layers()
    model = DistributedDataParallel(module)
    optimizer = KINDS[kind](module, model)
    return Loop(
        model, module, optimizer, rank, step=partial(plain_step, optimizer), clear=torch_ways(module, optimizer)
    )


def _fsdp(kind: str, rank: int) -> Loop:
    module = Layers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (module.first, module.twice, module):
        fully_shard(part, mesh=mesh)
    optimizer = KINDS[kind](module)
    return Loop(
        module, module, optimizer, rank, step=partial(plain_step, optimizer), clear=torch_ways(module, optimizer)
    )


def _sharded_or_not(rank: int, world: int, framework: str) -> tuple[list[str], set[str]]:
    """Events that change MKOR's weights and not AdamW's; and those that do not change AdamW's."""
    make = {"DDP": _ddp, "FSDP2": _fsdp}[framework]
    events: dict[str, Event] = {**DISCARDS, **WITHOUT_GRADIENTS}
    # Shards have no copies, nor second derivatives once weights are cut again; DDP wants gradients of the weights.
    sharded = framework == "FSDP2"
    for name in ("copied", "gradients asked for", "penalty") if sharded else ("frozen", "inputs", "penalty"):
        events.pop(name)
    if framework == "DDP":
        events["gradients asked for"] = _aside
    faults, harmless = [], set()
    expected = {kind: trajectory(make(kind, rank), None) for kind in KINDS}
    for name, event in events.items():
        for between in (False, True)[: 1 + (name in WITHOUT_GRADIENTS)]:
            if same(trajectory(make("AdamW", rank), event, between), expected["AdamW"]):
                harmless.add(name)
                if not same(trajectory(make("MKOR", rank), event, between), expected["MKOR"]):
                    faults.append(f"{name}, between micro-batches: {between}")
    return faults, harmless


def _aside(loop: Loop, number: int) -> None:
    """Beside the wrapper, as a penalty is computed by one rank."""
    x = batch(number + 50).requires_grad_()
    (grad,) = torch.autograd.grad(loop.module(x).sum(), x, create_graph=True)
    torch.autograd.grad(grad.square().sum(), list(loop.module.parameters()), allow_unused=True)


@pytest.mark.parametrize("framework", ["DDP", pytest.param("FSDP2", marks=pytest.mark.exhaustive)])
def test_ranks(framework: str) -> None:
    """CI has what is thrown away under FSDP2 in the play-book."""
    for faults, harmless in run_ranks(2, _sharded_or_not, framework):
        assert faults == []
        assert harmless.issuperset([*DISCARDS, "evaluated"])


def test_paused_passes_leave_no_statistics() -> None:
    """Their gradients count all the same; pauses may be nested, and end with an error."""

    def run(pauses: bool) -> MKOR:
        module = Layers()
        optimizer = mkor(module)
        for number in range(3):
            module(batch(number)).square().mean().backward()
            if pauses:
                with optimizer.capture_paused(), optimizer.capture_paused():
                    module(100.0 * batch(number + 50)).square().mean().mul(0.0).backward()
                with pytest.raises(KeyError), optimizer.capture_paused():
                    raise KeyError
            plain_step(optimizer)
        return optimizer

    one, other = run(False), run(True)
    for name, states in one.matrix_states.items():
        for side, state in states.items():
            assert torch.equal(state, other.matrix_states[name][side]), (name, side)
    assert one.matrix_states


def test_a_compiled_model_pauses() -> None:
    module = Layers()
    optimizer = mkor(module)
    compiled = torch.compile(module, backend="eager")
    for number in range(3):
        compiled(batch(number)).square().mean().backward()
        counts = [record.count for record in optimizer.statistics.records.values()]
        with optimizer.capture_paused():
            compiled(batch(number)).square().mean().backward()
        assert [record.count for record in optimizer.statistics.records.values()] == counts
        if number == 0:
            assert all(counts)
        plain_step(optimizer)


def test_a_gradient_that_a_hook_moves_keeps_its_statistics() -> None:
    """As accumulation in another type does; nobody can tell a gradient that is moved later from one thrown away."""
    module, other = Layers(), Layers()
    expected = mkor(module)
    optimizer = mkor(other)
    sums = {parameter: torch.zeros_like(parameter) for parameter in other.parameters()}

    def move(parameter: Tensor) -> None:
        sums[parameter] += parameter.grad  # type: ignore[arg-type]
        parameter.grad = None

    for parameter in other.parameters():
        parameter.register_post_accumulate_grad_hook(move)
    for micro in range(3):
        module(batch(micro)).square().mean().backward()
        other(batch(micro)).square().mean().backward()
    for parameter, total in sums.items():
        parameter.grad = total
    expected.step()
    optimizer.step()
    assert same(list(module.parameters()), list(other.parameters()))


def _alone(rank: int, world: int, what: str) -> list[list[Tensor]]:
    """One rank alone does something that opens or drops a window; then all go on."""
    loop = _ddp("MKOR", rank)
    for number in range(6):
        if number == 4 and rank == 0 and what in LONE:
            LONE[what](loop)
        if number == 4 and what == "thrown away by all":
            loop.backward(loop.loss(90))
            loop.optimizer.zero_grad()
        loop.backward(loop.loss(number))
        loop.step()
    if what == "released" and rank == 0:  # what it has sent, nobody answers
        _propagates(loop)
    loop.optimizer.release()
    return [parameter.detach() for parameter in loop.module.parameters()]


def _looks(loop: Loop) -> None:
    loop.module(batch(99)).sum()


def _propagates(loop: Loop) -> None:
    loop.module(batch(99)).sum().backward()
    loop.module.zero_grad()


LONE: dict[str, Any] = {"looks": _looks, "propagates": _propagates}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("what", [*LONE, "released", "thrown away by all"])
def test_one_rank_alone(what: str, world: int) -> None:
    expected = run_ranks(world, _ordinary)
    for rank, weights in enumerate(run_ranks(world, _alone, what)):
        assert same(weights, expected[rank])
        assert same(weights, expected[0])


def _ordinary(rank: int, world: int) -> list[Tensor]:
    loop = _ddp("MKOR", rank)
    for number in range(6):
        loop.backward(loop.loss(number))
        loop.step()
    return [parameter.detach() for parameter in loop.module.parameters()]


def _counted(rank: int, world: int) -> list[str]:
    """Calls that one rank makes alone, with every collective forbidden; the names of those that sent something."""
    loop = _ddp("MKOR", rank)
    for number in range(3):
        loop.backward(loop.loss(number))
        loop.step()
    state = loop.optimizer.state_dict()
    loop.backward(loop.loss(7))  # a window is open, and some of it has left
    sent: list[str] = []
    lone = {
        "forward": lambda: loop.module(batch(9)),
        "zero_grad": loop.optimizer.zero_grad,
        "clear": loop.optimizer.statistics.clear,
        "load_state_dict": lambda: loop.optimizer.load_state_dict(state),
        "capture_paused": lambda: loop.optimizer.capture_paused().__enter__(),
        "record_loss": lambda: loop.optimizer.record_loss(1.0),
        "release": loop.optimizer.release,
    }
    if rank == 0:
        names = [name for name in ("all_reduce", "broadcast", "all_gather", "all_gather_object", "barrier")]
        stock = {name: getattr(dist, name) for name in names}
        for entry, call in lone.items():
            for name in names:
                setattr(dist, name, lambda *_, entry=entry, name=name, **__: sent.append(f"{entry}: {name}"))
            try:
                call()
            finally:
                for name, function in stock.items():
                    setattr(dist, name, function)
    return sent


def test_lone_calls_send_nothing() -> None:
    assert run_ranks(2, _counted) == [[], []]
