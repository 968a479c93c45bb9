"""What a step under FSDP2 costs the host and the network, beside other cuts and other people's optimizers.

Real gloo processes step a Llama of few columns: there are as many tensors and messages as in the full model, and bytes
are told for each parameter, which does not depend on the width. Nothing is timed: calls, launches and messages are
counted, each of the rank that has most of them. Ours take the form for CUDA devices, whose kernels are left out.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rankwise
from benchmarks.communication import Waits
from benchmarks.counts import VIEWS
from benchmarks.host import as_on_a_device
from benchmarks.launches import Counts, Records
from benchmarks.performance import markdown
from benchmarks.step import environment
from rankwise.kernels import lists
from rankwise.kernels.dispatch import using
from rankwise.layout.even_cuts import EvenCuts
from rankwise.layout.layout_source import LayoutSource, TensorContents

__all__ = ["CONTENDERS", "OURS", "StepCosts", "costs_of", "measure_sharded", "sharded_page"]

_WARMUP, _LONG, _WIDTH = 2, 1_000_000, 128
_CPU = torch.device("cpu")
# Memory without contents, and step counts, which lie on the host, read by it.
_IDLE = ("empty", "new_empty", "_local_scalar_dense")


@dataclass
class StepCosts:
    """What the host does in one step.

    Attributes:
        calls: Calls of functions, Python's and built in.
        launches: Triton's kernels, and operations of torch on plain tensors but views and what has no elements.
        dtensor_operations: Torch's operations on ``DTensor``: each plans, checks and unwraps before it starts anything.
        messages: Collectives.
        bytes_sent: That leave the rank.
        waits: Calls that end when a message is there.
    """

    calls: int = 0
    launches: int = 0
    dtensor_operations: int = 0
    messages: int = 0
    bytes_sent: float = 0.0
    waits: int = 0


class _Operations(TorchDispatchMode):
    """Counts operations and messages."""

    def __init__(self, costs: StepCosts) -> None:
        super().__init__()
        self._costs = costs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self._costs.dtensor_operations += 1
            return NotImplemented  # it is seen again as what it does to parts
        namespace, _, name = func._schema.name.partition("::")
        if "c10d" not in namespace:
            self._costs.launches += name not in VIEWS and not name.startswith(_IDLE)
        elif "wait" in name:
            self._costs.waits += 1
        elif "barrier" not in name:
            self._costs.messages += 1
            self._costs.bytes_sent += _bytes_sent(name, args)
        return func(*args, **(kwargs or {}))


def _bytes_sent(name: str, args: Any) -> float:
    """What leaves this rank, if a ring sums and gathers."""
    world = dist.get_world_size()
    sizes = [sum(part.nbytes for part in tree_leaves(arg) if isinstance(part, Tensor)) for arg in args[:2]]
    given = [size for size in sizes if size] or [0]
    if "alltoall" in name or "all_to_all" in name:
        splits = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], int)]
        own = splits[-1][dist.get_rank()] / sum(splits[-1]) if splits and sum(splits[-1]) else 1 / world
        return float(given[-1] * (1 - own))
    if "gather" in name:
        return float(min(given) * (world - 1))
    if "scatter" in name:
        return float((min(given) if len(given) > 1 else given[0] / world) * (world - 1))
    return float(given[0] * (2 * (world - 1) / world if "reduce" in name else 1))


class Run(NamedTuple):
    """A training loop without its loop.

    Attributes:
        prepare: Gives the parameters gradients.
        step: Step of the optimizer.
    """

    prepare: Callable[[], Any]
    step: Callable[[], Any]


def costs_of(run: Run, records: Records) -> StepCosts:
    """Costs of a steady step; the calls are those of the one after it, in which nothing else is counted.

    Args:
        run: What is stepped.
        records: Where its kernels are recorded.
    """
    for _ in range(_WARMUP):
        run.prepare()
        run.step()
    costs, kernels = StepCosts(), Counts()
    run.prepare()
    records.to = kernels
    with Waits(_CPU) as waits, _Operations(costs):
        run.step()
    records.to = None
    costs.waits += waits.count
    costs.launches += kernels.kernels.total()

    def seen(frame: Any, event: str, argument: Any) -> None:
        costs.calls += event in ("call", "c_call")

    run.prepare()
    sys.setprofile(seen)
    try:
        run.step()
    finally:
        sys.setprofile(None)
    return costs


# --- the model --------------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    """A block of Llama 3.2 1B, a sixteenth as wide, without what has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(_WIDTH), nn.RMSNorm(_WIDTH)
        self.q_proj, self.o_proj = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(_WIDTH, _WIDTH // 4, bias=False) for _ in range(2))
        self.gate_proj, self.up_proj = (nn.Linear(_WIDTH, 4 * _WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(4 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.o_proj(self.q_proj(y) + (self.k_proj(y) * self.v_proj(y)).repeat(1, 4))
        y = self.mlp_norm(x)
        return x + self.down_proj(self.gate_proj(y).sigmoid() * self.up_proj(y))


class _Llama(nn.Module):
    """As many tensors as Llama 3.2 1B, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(128256 * _WIDTH // 2048, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(16))
        self.norm = nn.RMSNorm(_WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def _backward(model: nn.Module) -> None:
    model(torch.arange(8) + 8 * dist.get_rank()).square().mean().backward()


def _sharded() -> nn.Module:
    model, mesh = _Llama(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


# --- ours -------------------------------------------------------------------------------------------------------------

OURS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "MARS-AdamW": (rankwise.MARS, {}),
    "MARS-Lion": (rankwise.MARS, {"variant": "lion"}),
    "SONew, tridiagonal": (rankwise.SONew, {}),
    "MARS-M": (rankwise.MARS, {"variant": "muon"}),
    "MARS-M, sent in bfloat16": (rankwise.MARS, {"variant": "muon", "comm_dtype": "bfloat16"}),
    "LDAdam, an eighth of the width": (rankwise.LDAdam, {"rank": _WIDTH // 8}),
    "MKOR": (rankwise.MKOR, {"update_interval": _LONG}),
    "MKOR, factor step": (rankwise.MKOR, {"update_interval": 1}),
}


class _Shares(LayoutSource):
    """Equal runs of every parameter in one flat tensor, as ZeRO-3 cuts them."""

    def __init__(self, model: nn.Module) -> None:
        self.group = dist.group.WORLD
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        cuts = EvenCuts(0, sizes, dist.get_world_size())
        self.tensor = torch.randn(sum(map(cuts.share, sizes)))
        self._contents = cuts.contents(dist.get_rank())

    def contents(self, tensor: Tensor) -> TensorContents:
        """See the base class."""
        return self._contents


def _ours(name: str, shares: bool) -> Run:
    """As ``fully_shard`` cuts parameters, or as ZeRO-3 does."""
    kind, options = OURS[name]
    model = _Llama() if shares else _sharded()
    optimizer = kind(list(model.named_parameters()), **options)
    optimizer.capture(model)
    if not shares:
        return Run(lambda: _backward(model), optimizer.step)
    source = _Shares(model)
    optimizer.param_groups[0]["params"] = [source.tensor]
    optimizer.attach(source)

    def prepare() -> None:
        _backward(model)  # of which MKOR's statistics are all that counts
        source.tensor.grad = torch.randn_like(source.tensor)

    return Run(prepare, optimizer.step)


# --- others -----------------------------------------------------------------------------------------------------------


def _split(model: nn.Module) -> tuple[dict[str, nn.Parameter], list[nn.Parameter]]:
    """Weights of linear layers, and the rest."""
    linear = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    named = dict(model.named_parameters())
    return {name: named[name] for name in named if name in linear}, [p for n, p in named.items() if n not in linear]


def _adamw() -> Run:
    model = _sharded()
    return Run(lambda: _backward(model), torch.optim.AdamW(model.parameters(), foreach=True).step)


def _dion_muon() -> Run:
    from dion import Muon

    model = _sharded()
    matrices, rest = _split(model)
    groups = [{"params": list(matrices.values())}, {"params": rest, "algorithm": "adamw"}]
    mesh: Any = rest[0].device_mesh  # type: ignore[attr-defined]
    return Run(lambda: _backward(model), Muon(groups, distributed_mesh=mesh).step)


def _torchtitan_muon() -> Run:
    from torchtitan.distributed.flex_shard.dist_muon import build_dist_muon
    from torchtitan.distributed.flex_shard.optimizer_reshard import BucketConfig, ComputeLayout, Owned

    model = _sharded()
    matrices, rest = _split(model)
    blocks = dict.fromkeys(".".join(name.split(".")[:2]) for name in matrices)
    muon = build_dist_muon(
        [{"params": list(matrices.values()), "param_names": list(matrices)}],
        compute_sharding_by_fqn={name: ComputeLayout({"dp": Owned()}) for name in matrices},
        bucket_configs=[BucketConfig((f"{block}.*",)) for block in blocks],
    )
    adamw = torch.optim.AdamW(rest, foreach=True)
    return Run(lambda: _backward(model), lambda: (muon.step(), adamw.step()))


def _uncompiled() -> AbstractContextManager[Any]:
    """What is compiled would be one call, on processors too, and its kernels few: told of dion, not counted."""
    return mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda inner: inner))


class _Idle:
    """A stream, an event, or being on a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device_index = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...


def _idle_context(_: torch.device) -> Any:
    from torchtitan.distributed.flex_shard import _optimizer_reshard_runtime as runtime

    handle = SimpleNamespace(Stream=_Idle, Event=_Idle, stream=_Idle, current_stream=_Idle)
    slots = [
        runtime._PipelineSlot(runtime._BufferSlot(), _Idle(), _Idle(), _Idle())  # type: ignore[arg-type]
        for _ in range(runtime._NUM_PIPELINE_SLOTS)
    ]
    return runtime._CommunicationContext(handle, _Idle(), tuple(slots))  # type: ignore[arg-type]


@contextmanager
def _without_cuda() -> Iterator[None]:
    """DistMuon asks for a CUDA device; streams and events of one become objects that do nothing."""
    from torchtitan.distributed.flex_shard import _optimizer_reshard_runtime as runtime
    from torchtitan.distributed.flex_shard.dist_muon import DistMuon

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(DistMuon, "_validate_parameter_storage", lambda muon: _CPU))
        stack.enter_context(mock.patch.object(runtime._CommunicationContext, "create", _idle_context))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda tensor, stream: None))
        yield


def _form_of(name: str) -> Callable[[], AbstractContextManager[Any]]:
    # LDAdam asks its results whether they are numbers, which those of kernels that are left out need not be.
    return partial(using, lists) if name.startswith("LDAdam") else as_on_a_device


class _Contender(NamedTuple):
    make: Callable[[], Run]
    package: str
    around: Callable[[], AbstractContextManager[Any]]


_ZERO = ", as ZeRO-3 cuts"
CONTENDERS: dict[str, _Contender] = {
    "AdamW (torch), foreach": _Contender(_adamw, "torch", nullcontext),
    "Muon (dion)": _Contender(_dion_muon, "dion", _uncompiled),
    "DistMuon (torchtitan)": _Contender(_torchtitan_muon, "torchtitan", _without_cuda),
} | {
    f"{name}{cut}": _Contender(partial(_ours, name, bool(cut)), "rankwise", _form_of(name))
    for name in OURS
    for cut in ("", _ZERO)
}
"""By the names of rows, of which there are none where a package is not installed."""


def _measured(contender: _Contender) -> dict[str, Any]:
    if importlib.util.find_spec(contender.package) is None:
        return {}
    with contender.around() as records:
        found = asdict(costs_of(contender.make(), records if isinstance(records, Records) else Records()))
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {key: max(theirs[key] for theirs in everyone) for key in found}


def _measure(rank: int, world: int, names: Sequence[str], store: str, queue: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for name in names:
        torch.manual_seed(0)
        row = _measured(CONTENDERS[name])
        if rank == 0:
            queue.put(row)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads that gloo leaves behind can abort a process that ends in the usual way


def measure_sharded(ranks: int = 4, names: Sequence[str] = tuple(CONTENDERS)) -> list[dict[str, Any]]:
    """Costs of a step of each contender on gloo ranks.

    Args:
        ranks: Processes.
        names: Names of :data:`CONTENDERS`; those of packages that are not installed are left out.

    Returns:
        A row for each: the fields of :class:`StepCosts`, of the rank with most, and parameters of the model.
    """
    parameters = sum(parameter.numel() for parameter in _Llama().parameters())
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_measure, args=(ranks, names, f"{folder}/store", queue), nprocs=ranks)
        rows = [(name, queue.get()) for name in names]
    shown = {"model": "llama-1b, a sixteenth of its width", "ranks": ranks, "parameters": parameters}
    return [{"name": name, **shown, **row, **environment(_CPU)} for name, row in rows if row]


_PAGE = """# What a step costs under FSDP2

This page counts what a step does on the host and what it sends under FSDP2, beside other people's optimizers. The short
answer: we dispatch nothing on a `DTensor`, and send as many bytes and messages as flat shards with owners; LDAdam sends
fewer bytes. Nothing is timed, and nothing ran on a GPU.

Each row is one steady step of Llama 3.2 1B's {tensors} tensors, a sixteenth as wide, on {ranks} gloo ranks. Each figure
is that of the rank with most. `python -m benchmarks sharded` generates the page, with torchtitan and a checkout of dion
on `PYTHONPATH`.

- *calls*: function calls of the host, Python's and built in.
- *launches*: kernels and operations that start something on a device; views start nothing. Ours run in the form for
  CUDA, except LDAdam, which reads its results and uses torch's operations here.
- *on DTensor*: operations dispatched on a `DTensor`. Each costs tens of microseconds before anything starts.
- *messages*: collectives of the step.
- *bytes sent*: for each parameter that a rank holds.
- *waits*: how often the host waits for a message; on CUDA devices the stream does.
- *as ZeRO-3 cuts*: the same optimizer on flat shards, one tensor a rank, where every matrix has an owner.

torch's AdamW needs no messages. dion's Muon sends momentum and update in bfloat16 and compiles what it calls for every
tensor. It is counted uncompiled, so it has more launches here than in use. DistMuon needs CUDA: its check of the device
is patched out, and its streams and events do nothing. Both orthogonalise the linear weights and use AdamW for the rest,
as MARS-M does.

LDAdam's ranks compute a matrix together, slice by slice, where rows are cut evenly and this sends less than gathering.

"""


def sharded_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page of a list of rows of :func:`measure_sharded`."""
    tensors = sum(1 for _ in _Llama().parameters())
    headings = ("type", "calls", "launches", "on DTensor", "messages", "bytes sent", "waits")
    lines = []
    for row in rows:
        sent = row["bytes_sent"] * row["ranks"] / row["parameters"]
        counts = (f"{row[key]:,}" for key in ("calls", "launches", "dtensor_operations", "messages"))
        lines.append((row["name"], *counts, f"{sent:.2f}", f"{row['waits']:,}"))
    return _PAGE.format(tensors=tensors, ranks=rows[0]["ranks"]) + markdown(headings, lines)
