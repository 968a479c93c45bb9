"""What an optimizer sends inside ``engine.step()``, counted where PyTorch hands messages to the process group."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TYPES", "measure", "traffic_page"]

_MUON = "Muon"
_PLAIN = "AdamW"
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    _PLAIN: (_PLAIN, {"torch_adam": True}),
    _MUON: (_MUON, {}),
    "MARS-AdamW": ("MARS-AdamW", {}),
    "MARS-M": ("MARS-M", {}),
    "MARS-M, bfloat16 messages": ("MARS-M", {"comm_dtype": "bfloat16"}),
    "SONew": ("SONew", {}),
    "LDAdam, rank 32": ("LDAdam", {"rank": 32}),
    "MKOR": ("MKOR", {}),
    "MKOR, bfloat16 messages": ("MKOR", {"comm_dtype": "bfloat16"}),
}
"""What is measured: a label, the JSON type and its parameters."""
_STEPS = 3


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


# Bytes one rank of ``world`` sends, by the volume every correct algorithm needs (ring, pairwise).
_SENT: dict[str, Callable[[int, Sequence[Any]], float]] = {
    "allreduce_": lambda world, args: 2 * (world - 1) / world * _bytes(args[0]),
    "allreduce_coalesced_": lambda world, args: 2 * (world - 1) / world * _bytes(args[0]),
    "allgather_": lambda world, args: (world - 1) * _bytes(args[1]),
    "_allgather_base_": lambda world, args: (world - 1) * _bytes(args[1]),
    "allgather_into_tensor_coalesced_": lambda world, args: (world - 1) * _bytes(args[1]),
    "reduce_scatter_": lambda world, args: (world - 1) / world * _bytes(args[1]),
    "_reduce_scatter_base_": lambda world, args: (world - 1) / world * _bytes(args[1]),
    "reduce_scatter_tensor_coalesced_": lambda world, args: (world - 1) / world * _bytes(args[1]),
    "alltoall_": lambda world, args: (world - 1) / world * _bytes(args[1]),
    "broadcast_": lambda world, args: (world - 1) / world * _bytes(args[0]),
    "reduce_": lambda world, args: (world - 1) / world * _bytes(args[0]),
}


class _Counter(TorchDispatchMode):
    """Counts the messages of everything that runs under it.

    Attributes:
        calls: Collectives.
        bytes: Sent by this rank.
    """

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self._rank, self._world = rank, world
        self.calls = 0
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "barrier" not in func.name():
            name = func.name().removeprefix("c10d::")
            self.calls += 1
            self.bytes += self._to_others(args) if name == "alltoall_base_" else _SENT[name](self._world, args)
        return func(*args, **(kwargs or {}))

    def _to_others(self, args: Sequence[Any]) -> float:
        # What a rank keeps for itself is not sent.
        splits = args[4]
        if not splits:
            return (self._world - 1) / self._world * _bytes(args[1])
        return float((sum(splits) - splits[self._rank]) * args[1].element_size())


@contextmanager
def _eager() -> Iterator[None]:
    """Muon compiles its kernels in every process, which takes minutes on a CPU and sends nothing."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]


def measure(ranks: int, stage: int, labels: Sequence[str] = tuple(TYPES)) -> list[dict[str, Any]]:
    """Count one ZeRO stage; every type trains the same small GPT-2 in bf16, in one run.

    Args:
        ranks: gloo processes.
        stage: ZeRO stage.
        labels: Keys of `TYPES`; AdamW and Muon are always measured.

    Returns:
        Per type: collectives per step; bytes per parameter and rank in ``engine.step()``, ``step``, and in the backward
        passes, ``backward``; those of the step beyond AdamW's (the weights' all-gather and the gradient norm),
        ``extra``; and that relative to Muon's, ``of_muon``, None where Muon sends nothing more than AdamW.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    chosen = [_PLAIN, _MUON, *(label for label in labels if label not in (_PLAIN, _MUON))]
    with tempfile.TemporaryDirectory() as folder, _eager():
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_run, args=(ranks, stage, chosen, f"{folder}/store", queue), nprocs=ranks)
        rows = [{"stage": stage, "type": label, **queue.get()} for label in chosen]
    muon = rows[1]["step"] - rows[0]["step"]
    for row in rows:
        row["extra"] = row["step"] - rows[0]["step"]
        row["of_muon"] = row["extra"] / muon if muon > 1e-3 and row["type"] not in (_PLAIN, _MUON) else None
    return rows


def _run(rank: int, world: int, stage: int, labels: Sequence[str], store: str, queue: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    deepspeed.init_distributed("gloo")
    for label in labels:
        totals = torch.tensor(_count(rank, world, stage, *TYPES[label]), dtype=torch.float64)
        dist.all_reduce(totals)
        if rank == 0:
            calls, step, backward = (totals / world).tolist()
            queue.put({"collectives": calls, "step": step, "backward": backward})
    dist.barrier()
    dist.destroy_process_group()


def _count(rank: int, world: int, stage: int, name: str, params: dict[str, Any]) -> tuple[float, float, float]:
    """Per step: collectives in ``step()``, and bytes per parameter in ``step()`` and in the backward pass."""
    import deepspeed_plugin
    from rankwise.launch.models import build_model

    torch.manual_seed(0)
    model = build_model("gpt2", vocab_size=257, layers=4, hidden=192, heads=6, seq_len=32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **({"reduce_scatter": False} if name == _MUON else {})},
        "optimizer": {"type": name, "params": {"lr": 1e-3, **params}},
    }
    engine, *_ = deepspeed_plugin.initialize(model=model, model_parameters=model.parameters(), config=config)
    steps, backwards = _Counter(rank, world), _Counter(rank, world)
    for step in range(1 + _STEPS):
        tokens = torch.randint(257, (1, 32))
        loss = engine(input_ids=tokens, labels=tokens).loss
        # The first step plans and, for MKOR, moves the factors: steady steps are what is counted.
        if step == 0:
            engine.backward(loss)
            engine.step()
            continue
        with backwards:
            engine.backward(loss)
        with steps:
            engine.step()
    engine.destroy()
    scale = 1 / _STEPS
    return steps.calls * scale, steps.bytes * scale / parameters, backwards.bytes * scale / parameters


_HEAD = """# Traffic of a step

This page counts the bytes that one rank sends in a step under DeepSpeed, per parameter of the model, beside AdamW and
DeepSpeed's own Muon. The short answer is the column *beyond AdamW*: what the optimizer itself costs. At stages 1 and 2
it is small, because few matrices straddle ranks. At stage 3 every matrix travels, unless the rule is element-wise.

- **step**: inside `engine.step()`, with the all-gather of the updated weights.
- **beyond AdamW**: the part of these bytes that the optimizer itself costs.
- **of Muon's**: the same, relative to what DeepSpeed's Muon costs. At stages 1 and 2 Muon sends nothing of its own:
  every rank that holds a part of a matrix repeats its whole update.
- **backward**: inside `engine.backward()`. At stage 3 Muon needs `reduce_scatter` off, which doubles it.

`python -m benchmarks traffic --page docs/traffic.md` writes the page: {ranks} gloo processes, bf16, a GPT-2 of 4 layers
of width 192, gradient clipping at 1.0, every type in one run with the same engine settings (DeepSpeed {deepspeed},
PyTorch {torch}). Bytes are the volume that every correct algorithm needs (ring, pairwise), counted where PyTorch hands
messages to the process group. MKOR's factor steps, every tenth, are left out.
"""


def traffic_page(rows: Sequence[dict[str, Any]], ranks: int) -> str:
    """The figures as a page of the documentation.

    Args:
        rows: Rows of `measure`, of any number of stages.
        ranks: How many processes there were.
    """
    import deepspeed

    parts = [_HEAD.format(ranks=ranks, deepspeed=deepspeed.__version__, torch=torch.__version__.split("+")[0])]
    for stage in dict.fromkeys(row["stage"] for row in rows):
        parts.append(f"## Stage {stage}\n")
        parts.append("| type | collectives | step | beyond AdamW | of Muon's | backward |\n|---|---|---|---|---|---|")
        for row in rows:
            if row["stage"] == stage:
                share = "" if row["of_muon"] is None else f"{row['of_muon']:.2f}"
                figures = (f"{row['collectives']:.0f}", f"{row['step']:.2f}", f"{row['extra']:.2f}", share)
                parts.append(f"| {row['type']} | " + " | ".join(figures) + f" | {row['backward']:.2f} |")
        parts[-1] += "\n"
    return "\n".join(parts)
