"""What an optimizer sends inside ``engine.step()``, counted at torch.distributed."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

__all__ = ["measure"]

_MUON = "Muon"
_TYPES = ("AdamW", _MUON, "MARS-AdamW", "MARS-M", "SONew", "LDAdam", "MKOR")
_PARAMS: dict[str, dict[str, Any]] = {"AdamW": {"torch_adam": True}, "LDAdam": {"rank": 32}}
_STEPS = 3


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# Bytes one rank sends, by the volume every correct algorithm needs (ring, pairwise).
_SENT: dict[str, Callable[..., float]] = {
    "all_reduce": lambda world, tensor, *_: 2 * (world - 1) / world * _bytes(tensor),
    "all_gather_into_tensor": lambda world, _, source, *__: (world - 1) * _bytes(source),
    "reduce_scatter_tensor": lambda world, _, source, *__: (world - 1) / world * _bytes(source),
    "all_to_all_single": lambda world, _, source, *__: (world - 1) / world * _bytes(source),
    "all_gather": lambda world, _, source, *__: (world - 1) * _bytes(source),
    "broadcast": lambda world, tensor, *_: (world - 1) / world * _bytes(tensor),
    "reduce": lambda world, tensor, *_: (world - 1) / world * _bytes(tensor),
}


class _Counter:
    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0.0
        self.active = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        originals = {name: getattr(dist, name) for name in _SENT}

        def wrap(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self.active:
                    group = kwargs.get("group")
                    values = [*args, *(kwargs[key] for key in ("input", "input_tensor", "tensor") if key in kwargs)]
                    self.calls += 1
                    # Exact sizes where the caller splits unevenly: what a rank keeps for itself is not sent.
                    self.bytes += self._exact(name, values, kwargs) or _SENT[name](dist.get_world_size(group), *values)
                return originals[name](*args, **kwargs)

            return call

        for name in _SENT:
            setattr(dist, name, wrap(name))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    @staticmethod
    def _exact(name: str, values: list[Any], kwargs: dict[str, Any]) -> float | None:
        splits = kwargs.get("input_split_sizes", values[3] if len(values) > 3 else None)
        if name != "all_to_all_single" or not splits:
            return None
        rank = dist.get_rank(kwargs.get("group"))
        return (sum(splits) - splits[rank]) * values[1].element_size()


def measure(ranks: int, stage: int) -> list[dict[str, Any]]:
    """Count one ZeRO stage; every type trains the same small GPT-2 in bf16.

    Returns:
        Per type: collectives per step, bytes per parameter and rank, those beyond AdamW's (the weights' all-gather and
        the gradient norm), and the latter relative to Muon's.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    rows = []
    for name in _TYPES:
        with tempfile.TemporaryDirectory() as folder:
            queue = mp.get_context("spawn").SimpleQueue()
            mp.spawn(_run, args=(ranks, stage, name, f"{folder}/store", queue), nprocs=ranks)
            calls, total = queue.get()
        rows.append({"stage": stage, "type": name, "collectives": calls, "total": total})
    plain = rows[0]["total"]
    muon = next(row["total"] for row in rows if row["type"] == _MUON) - plain
    for row in rows:
        row["extra"] = row["total"] - plain
        row["of_muon"] = row["extra"] / muon if muon > 0 and row["type"] not in ("AdamW", _MUON) else None
    return rows


def _run(rank: int, world: int, stage: int, name: str, store: str, queue: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    import deepspeed

    import deepspeed_plugin
    from rankwise.launch.models import build_model

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = build_model("gpt2", vocab_size=257, layers=4, hidden=192, heads=6, seq_len=32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **({"reduce_scatter": False} if name == _MUON else {})},
        "optimizer": {"type": name, "params": {"lr": 1e-3, **_PARAMS.get(name, {})}},
    }
    engine, *_ = deepspeed_plugin.initialize(model=model, model_parameters=model.parameters(), config=config)
    counter = _Counter()
    with counter.installed():
        for step in range(_STEPS):
            tokens = torch.randint(257, (1, 32))
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            # The first step plans (and, for MKOR, moves the factors): steady steps are what is counted.
            counter.active = step > 0
            engine.step()
            counter.active = False
    totals = torch.tensor([counter.calls, counter.bytes], dtype=torch.float64) / (_STEPS - 1)
    dist.all_reduce(totals)
    if rank == 0:
        queue.put((float(totals[0]) / world, float(totals[1]) / world / parameters))
    dist.barrier()
    engine.destroy()
    dist.destroy_process_group()
