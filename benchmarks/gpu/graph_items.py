"""Section "graphs": a captured step against the same one started by the host, also below FSDP2 and DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import rankwise
from benchmarks.gpu.items import Figure, Found, Item, Place, Skipped
from benchmarks.gpu.whole_steps import one_process_group
from benchmarks.models import layer_set

__all__ = ["graph_items", "wrapped"]

_CAPTURED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "MARS-AdamW": (rankwise.MARS, {}),
    "MARS-M": (rankwise.MARS, {"variant": "muon"}),
    "SONew, tridiagonal": (rankwise.SONew, {}),
    "LDAdam, rank 16": (rankwise.LDAdam, {"rank": 16}),
}
_WRAPPERS = ("", "FSDP2", "DDP")


def graph_items(place: Place) -> list[Item]:
    """Each type that can be captured, in plain PyTorch and in each wrapper on one rank."""
    model = place.models("gpt2-small")[0]
    return [
        Item(f"{name}, {model}{', ' * bool(wrapper)}{wrapper}", 12.0, partial(_graph, place, name, model, wrapper))
        for wrapper in _WRAPPERS
        for name in _CAPTURED
    ]


def wrapped(network: nn.Module, wrapper: str, device: torch.device) -> nn.Module:
    """A model in a wrapper, on a group of this process alone."""
    if wrapper:
        one_process_group(device)
    if wrapper == "DDP":
        return nn.parallel.DistributedDataParallel(network)
    if wrapper == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (1,))
        for block in network.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
    return network


def fill(model: nn.Module) -> None:
    """Random gradients, sharded as the parameters are."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter).mul_(1e-3)


def _graph(place: Place, name: str, model: str, wrapper: str) -> Found:
    kind, options = _CAPTURED[name]
    network = wrapped(layer_set(model, place.device), wrapper, place.device)
    fill(network)
    rate = torch.tensor(1e-3, device=place.device)
    optimizer = kind(list(network.named_parameters()), capturable=True, lr=rate, **options)
    if not place.on_cuda:
        for _ in range(2):
            optimizer.step()
        raise Skipped("there are no graphs without a CUDA device; steps by the host were taken")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    eager = place.seconds(optimizer.step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    replay = place.seconds(graph.replay)
    finite = all(bool(parameter.isfinite().all()) for parameter in network.parameters())
    return Found(
        [
            Figure("step by the host", eager * 1e3, "ms"),
            Figure("replay", replay * 1e3, "ms", None, eager * 1.05e3),
            Figure("weights are finite", float(finite), "", 1, 1),
        ]
    )
