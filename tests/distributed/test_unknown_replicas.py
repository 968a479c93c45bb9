"""MKOR is told of the ranks that average its gradients, or refuses; ranks that train apart are left alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise import MKOR
from rankwise.options.validation import OptionError


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


def _cases(rank: int, world: int) -> dict[str, str]:
    found = {}
    for order in ("wrapped before", "wrapped after"):
        model = _model()
        wrapped = DistributedDataParallel(model) if order == "wrapped before" else None
        optimizer = MKOR(model.named_parameters())
        optimizer.capture(model if wrapped is None else wrapped.module)
        found[order] = _step(wrapped or DistributedDataParallel(model), optimizer, rank)
    model = _model()
    wrapped = DistributedDataParallel(model)
    optimizer = MKOR(model.named_parameters())
    optimizer.capture(wrapped)
    found["told"] = _step(wrapped, optimizer, rank)
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


def test_a_wrapped_model_captured_from_inside_is_refused() -> None:
    for found in run_ranks(2, _cases):
        refused = {name for name, message in found.items() if message}
        assert refused == {"wrapped before", "wrapped after"}
        assert all("capture(ddp_model)" in found[name] for name in refused)
