"""``fully_shard`` and ``DistributedDataParallel`` of torch: rows, columns, copies, below them tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.frameworks.problem import MICRO_BATCHES, Weights, batch, build, corrected, network, weights_of
from benchmarks.frameworks.tasks import Task

__all__ = ["opened", "train"]

_BEFORE_CAPTURE = 3  # Steps by the host, in which all that is made once has been made.


@contextmanager
def opened(task: Task) -> Iterator[None]:
    """The process group: NCCL for tensors on a card, gloo for those on the host."""
    backend = "cpu:gloo,cuda:nccl" if task.device == "cuda" else "gloo"
    bound = {"device_id": task.place} if task.device == "cuda" else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=task.patience), **bound)
    yield
    dist.barrier()


def train(task: Task, kind: str, noise: float) -> Weights:
    """Whole weights after the task's steps, on a stream of the user's where the cell is for that."""
    if not (task.cell.settings.get("stream") and task.device == "cuda"):
        return _train(task, kind, noise)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = _train(task, kind, noise)
    torch.cuda.current_stream().wait_stream(side)
    return found


def _train(task: Task, kind: str, noise: float) -> Weights:
    settings = task.cell.settings
    model: nn.Module = network(noise)
    if not settings.get("offload"):
        model = model.to(task.place)
    model, part, parts = _sharded(task, model)
    optimizer = build(kind, model, bool(settings.get("captured")))
    if task.loads:
        _load(model, optimizer, task.folder(kind, noise))
    step: Callable[[], Any] = optimizer.step
    for number in task.steps:
        task.end_here(number)
        for micro in range(MICRO_BATCHES):
            loss = model(batch(number, micro, part, parts).to(task.place)) / MICRO_BATCHES
            loss.backward()
        if getattr(optimizer, "needs_loss", False):
            optimizer.record_loss(loss.detach() * MICRO_BATCHES)  # type: ignore[attr-defined]
        if settings.get("captured") and number == _BEFORE_CAPTURE:
            step = _captured(optimizer)
        step()
        optimizer.zero_grad(set_to_none=not settings.get("captured"))
    if task.saves:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=task.folder(kind, noise))
    found = {name.removeprefix("module."): value for name, value in weights_of(model).items()}
    return corrected(found, weights_of(network(noise)), weights_of(network())) if noise else found


def _sharded(task: Task, model: Any) -> tuple[Any, int, int]:
    """The model as a setting has it, and which of how many parts of a batch this rank computes."""
    settings, ranks = task.cell.settings, task.ranks
    how = settings["how"]
    if settings.get("compiled"):
        # On CPUs it is tried that the compiler cuts the model into graphs, not what it makes of them.
        for block in model.blocks:
            block.compile(backend="inductor" if task.device == "cuda" else "aot_eager")
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model), task.rank, ranks
    more: dict[str, Any] = {}
    if settings.get("offload"):
        more["offload_policy"] = CPUOffloadPolicy(pin_memory=task.device == "cuda")
    if settings.get("dtype") == "bfloat16":
        more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if how == "columns":
        more["shard_placement_fn"] = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % ranks == 0 else None
    mesh, part, parts = _mesh(task, how, model)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, **more)
    return model, part, parts


def _mesh(task: Task, how: str, model: Any) -> tuple[DeviceMesh, int, int]:
    kind, ranks = task.device, task.ranks
    if how == "hybrid":
        return init_device_mesh(kind, (2, ranks // 2), mesh_dim_names=("copies", "rows")), task.rank, ranks
    if how == "tensor":
        mesh = init_device_mesh(kind, (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return mesh["data"], mesh.get_local_rank("data"), ranks // 2
    return init_device_mesh(kind, (ranks,), mesh_dim_names=("data",)), task.rank, ranks


def _captured(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """A graph of the next step, which is taken when it is replayed."""
    if not torch.cuda.is_available():
        raise ValueError("there are no graphs without a CUDA device")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # The group's own thread looks at events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        optimizer.step()
    return graph.replay


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    states = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
