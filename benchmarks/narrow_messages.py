"""What the type of messages does to the loss: whole runs on ranks that hold half of every matrix."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.convergence.experiment import Experiment
from benchmarks.convergence.language_models import E3, E4, E5
from benchmarks.convergence.optimizers import make_optimizer
from benchmarks.convergence.runner import schedule
from benchmarks.convergence.tasks import LanguageModel

__all__ = ["DTYPES", "TYPES", "loss_with"]

_RANKS = 2
DTYPES = ("none", "bfloat16", "int8")
"""Types of messages; none: that of the matrices."""


class _Tuned(NamedTuple):
    """What the experiment has found best for a type in one process."""

    experiment: Experiment
    optimizer: str
    lr: float
    options: Mapping[str, Any]


_ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1}
TYPES: Mapping[str, _Tuned] = {
    "mars-m": _Tuned(E4, "mars", 0.04, {**_ADAMW, "variant": "muon", "gamma": 0.025, "ns_dtype": "float32"}),
    "ldadam": _Tuned(E5, "ldadam", 0.016, {"rank": 16, "weight_decay": 0.1}),
    "mkor": _Tuned(E3, "mkor", 0.016, _ADAMW),
}
"""By name."""


class _Part(LanguageModel):
    """A rank's share of every batch."""

    def loss(self, step: int) -> Tensor:
        """See the base class."""
        return self._losses(self._sampler.batch(step, 0, 0)[dist.get_rank() :: _RANKS]).mean()


def loss_with(name: str, dtype: str, seed: int, steps: int | None = None) -> dict[str, Any]:
    """A run on two gloo ranks whose parameters FSDP2 has cut.

    Args:
        name: One of :data:`TYPES`.
        dtype: One of :data:`DTYPES`.
        seed: Seed of weights and order.
        steps: None: as many as in the experiment.

    Returns:
        ``loss`` on held-out files, and ``sent``: bytes of a rank's messages a step, of the optimizer alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_run, args=(f"{folder}/store", name, dtype, seed, steps, queue), nprocs=_RANKS)
        loss, sent = queue.get()
    return {"type": name, "messages": dtype, "seed": seed, "loss": loss, "sent": sent}


def _run(rank: int, store: str, name: str, dtype: str, seed: int, steps: int | None, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=_RANKS)
    tuned = TYPES[name]
    steps = tuned.experiment.steps if steps is None else steps
    task = _Part(**{key: value for key, value in tuned.experiment.task.items() if key != "kind"}, seed=seed)
    fully_shard(task.model, mesh=init_device_mesh("cpu", (_RANKS,)))
    options = {**tuned.options, "comm_dtype": None if dtype == "none" else dtype}
    optimizer = make_optimizer(tuned.optimizer, task.model, tuned.lr, options)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(step, steps)
        optimizer.zero_grad()
        task.loss(step).backward()
        _clip(task.model, task.clip)
        optimizer.step()
    loss = task.figures()["validation_loss"]
    if rank == 0:
        sent = sum(unit.total_traffic.bytes for unit in optimizer.planned_units)
        queue.put((loss, sent / steps))
    dist.destroy_process_group()


def _clip(model: nn.Module, largest: float | None) -> None:
    if largest is not None:
        total = nn.utils.clip_grad_norm_(model.parameters(), largest)
        assert isinstance(total, DTensor)
