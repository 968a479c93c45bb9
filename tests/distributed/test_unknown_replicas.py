"""MKOR finds the ranks that average its gradients, or refuses; ranks that train apart are left alone."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankwise import MKOR
from rankwise.options.validation import OptionError
from rankwise.statistics import collector

ORDERS = ("told", "wrapped before", "wrapped after", "compiled")


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> str:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    try:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    except OptionError as error:
        return str(error)
    return ""


def _trained(order: str, rank: int) -> tuple[list[Tensor], set[str]]:
    """Weights after some steps, and the matrices whose factors this rank has."""
    model = _model()
    wrapped = DistributedDataParallel(model) if order != "wrapped after" else None
    optimizer = MKOR(model.named_parameters(), lr=0.1, update_interval=1)
    optimizer.capture(wrapped if order == "told" and wrapped is not None else model)
    wrapped = wrapped or DistributedDataParallel(model)
    called = torch.compile(wrapped, backend="eager") if order == "compiled" else wrapped
    with wrapped.no_sync():
        called(torch.full((1, 5), float(rank))).sum().backward()
    assert [_step(called, optimizer, rank) for _ in range(3)] == [""] * 3
    return [weight.detach() for weight in model.parameters()], set(optimizer.matrix_states.everything())


def _orders(rank: int, world: int) -> dict[str, tuple[list[Tensor], set[str]]]:
    return {order: _trained(order, rank) for order in ORDERS}


def test_a_wrapper_around_a_captured_model_is_found() -> None:
    first, second = run_ranks(2, _orders)
    for found in (first, second):
        weights, matrices = found["told"]
        assert len(matrices) == 1
        for order in ORDERS[1:]:
            assert all(map(torch.equal, found[order][0], weights)), order
            assert found[order][1] == matrices, order
    assert all(map(torch.equal, first["told"][0], second["told"][0]))


def _by_hand(rank: int, world: int) -> dict[str, tuple[list[Tensor], int, int]]:
    """Weights where gradients were averaged with and without a wrapper, messages, and this rank's matrices."""
    found = {}
    for name in ("wrapped", "by hand", "by hand, sketched", "untold", "losses", "sharded"):
        model = _model()
        if name == "sharded":
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        called = DistributedDataParallel(model) if name in ("wrapped", "losses") else model
        sketch = {"rule": "sketch", "hybrid": name == "losses"}
        rule = sketch if name in ("by hand, sketched", "losses") else {"update_interval": 1}
        optimizer = MKOR(model.named_parameters(), lr=0.1, **rule)
        if name != "losses":
            optimizer.capture(called, averaged_over=dist.group.WORLD if "by hand" in name else None)
        with mock.patch.object(collector.logger, "warning") as warning:
            for index in range(3):
                inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * index + rank))
                called(inputs).square().mean().backward()
                for weight in model.parameters() if called is model and name != "sharded" else ():
                    dist.all_reduce(weight.grad)
                    weight.grad /= world
                optimizer.step()
                optimizer.zero_grad()
        told = sum("capture(model, averaged_over=group)" in str(call) for call in warning.mock_calls)
        copies = [] if name == "sharded" else [weight.detach() for weight in model.parameters()]
        found[name] = copies, told, len(optimizer.matrix_states.everything())
    return found


def test_ranks_whose_gradients_the_user_averages_are_told_what_to_write() -> None:
    first, second = run_ranks(2, _by_hand)
    assert {name: told for name, (_, told, _) in first.items() if told} == {"untold": 1, "losses": 1}
    for name, (weights, _, matrices) in first.items():
        assert all(map(torch.equal, weights, second[name][0])) == (name != "untold"), name
        assert matrices == (2 if name in ("untold", "losses") else 1), name
    assert all(map(torch.equal, first["by hand"][0], first["wrapped"][0]))


def _uneven(rank: int, world: int) -> dict[str, str]:
    found = {}
    for name in ("captured", "wrapped after", "all at once", "sketched alone"):
        model = _model()
        optimizer = MKOR(model.named_parameters(), **({"rule": "sketch"} if name == "sketched alone" else {}))
        if name == "wrapped after":
            optimizer.capture(model)
        wrapped = DistributedDataParallel(model)
        if name in ("captured", "all at once"):
            optimizer.capture(wrapped)
        steps = 3 if name == "all at once" or rank == 0 else 2
        with wrapped.join(throw_on_early_termination=name == "all at once"):
            messages = [_step(wrapped, optimizer, rank) for _ in range(steps)]
        found[name] = messages[0]
        assert set(messages) == {found[name]}
        if name == "captured":
            # What the message says to do after the block.
            again = DistributedDataParallel(model)
            optimizer.capture(again)
            found["captured again"] = _step(again, optimizer, rank)
    return found


def test_ranks_that_may_stop_at_other_steps_are_refused() -> None:
    for found in run_ranks(2, _uneven):
        assert "captured again" in found
        assert {name for name, message in found.items() if message} == {"captured", "wrapped after"}
        assert all("throw_on_early_termination=True" in found[name] for name in ("captured", "wrapped after"))


def _cases(rank: int, world: int) -> dict[str, str]:
    found = {}
    for order in ("wrapped late", "wrapped late on one rank"):
        model = _model()
        optimizer = MKOR(model.named_parameters(), update_interval=1)
        optimizer.capture(model)
        if order == "wrapped late" or rank == 1:
            assert not _step(model, optimizer, rank)
        found[order] = _step(DistributedDataParallel(model), optimizer, rank)
    # As in adversarial or reinforcement learning: a model of its own on each rank, and one rank's alone.
    model = _model(rank)
    optimizer = MKOR(model.named_parameters())
    optimizer.capture(model)
    found["apart"] = _step(model, optimizer, rank)
    if rank == 0:
        found["one rank's"] = _step(model, optimizer, rank)
    # A frozen partner that DDP runs beside a model of its own; and a wrapper of a single rank.
    critic = _model(5)
    optimizer = MKOR(critic.named_parameters())
    optimizer.capture(critic)
    actor = DistributedDataParallel(_model())
    actor(torch.randn(2, 5)).sum().backward()
    found["beside"] = _step(critic, optimizer, rank)
    alone = [dist.new_group([index]) for index in range(world)][rank]
    single = DistributedDataParallel(_model(), process_group=alone)
    optimizer = MKOR(single.module.named_parameters())
    optimizer.capture(single.module)
    found["a wrapper of one rank"] = _step(single, optimizer, rank)
    return found


def test_a_model_wrapped_after_the_first_step_is_refused_on_all_ranks() -> None:
    for found in run_ranks(2, _cases):
        refused = {name for name, message in found.items() if message}
        assert refused == {"wrapped late", "wrapped late on one rank"}
        assert all("capture(ddp_model)" in found[name] for name in refused)
