"""What a step starts and moves, counted on meta tensors: no device is needed, and nothing is computed.

The step runs as on a CUDA device with Triton, but that tensors have no memory and kernels are recorded in place of
being launched. An operation, of torch or a kernel, counts every tensor that it reads or writes once, as if caches kept
what it meets again: what the tiles of a product read again is not seen. What makes the host wait, reading a value back
or choosing by one, counts as a wait and gets what it would in a steady step, in which nothing fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rankwise
from benchmarks.launches import Counts, bytes_of, multiplier, recorded_launches
from benchmarks.models import layer_set
from rankwise.kernels import triton
from rankwise.kernels.dispatch import using

__all__ = ["GOALS", "META", "TYPES", "VIEWS", "Goal", "Values", "count", "counted"]

META = torch.device("meta")
_PACKAGE = Path(rankwise.__file__).parent

# They only say how memory is to be read, and start nothing on a device.
VIEWS = {"view", "_unsafe_view", "slice", "select", "as_strided", "detach", "t", "transpose", "unsqueeze", "squeeze"}
VIEWS |= {"unbind", "alias", "split", "split_with_sizes", "expand", "permute", "_reshape_alias", "unflatten", "chunk"}
VIEWS |= {"diagonal", "lift_fresh", "view_as", "set_", "lift"}
_WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select"}
_PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_"}
# These read none of the tensors that they are given.
_MAKERS = {f"{kind}_like" for kind in ("zeros", "ones", "full")} | {f"new_{kind}" for kind in ("zeros", "ones", "full")}
# These do not read what they write.
_FILLS = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_", "index_copy_"}


@dataclass(frozen=True)
class Goal:
    """What a step should stay below.

    Attributes:
        bytes: For each parameter.
        launches: Kernels and operations.
        waits: Waits of the host.
        outside_products: Whether ``bytes`` are those outside matrix products.
    """

    bytes: float
    launches: int
    waits: int = 0
    outside_products: bool = False


def _of(kind: Callable[..., Any], **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(list(model.named_parameters()), **options)


def _mkor(model: nn.Module, **options: Any) -> Any:
    optimizer = rankwise.MKOR(list(model.named_parameters()), update_interval=_FACTOR_STEP, **options)
    optimizer.capture(model)
    return optimizer


def _spending(kind: Callable[..., Any], model: nn.Module, **options: Any) -> Any:
    """As under DeepSpeed and Megatron, which need the gradients no more after the step."""
    optimizer = kind(list(model.named_parameters()), **options)
    optimizer.planner.source.spends_gradients = True
    return optimizer


_FACTOR_STEP = 3
_INT8 = {"state_dtype": "int8"}
TYPES: dict[str, tuple[Callable[[nn.Module], Any], int]] = {
    "MARS-AdamW": (_of(rankwise.MARS, variant="adamw"), 2),
    "MARS-Lion": (_of(rankwise.MARS, variant="lion"), 2),
    "MARS-AdamW, reference bfloat16": (_of(rankwise.MARS, variant="adamw", reference_dtype="bfloat16"), 2),
    "MARS-Lion, reference bfloat16": (_of(rankwise.MARS, variant="lion", reference_dtype="bfloat16"), 2),
    "MARS-M": (_of(rankwise.MARS, variant="muon"), 2),
    "MARS-Lion, no clip": (_of(rankwise.MARS, variant="lion", clip=None), 2),
    "MARS-M, no clip": (partial(_spending, rankwise.MARS, variant="muon", clip=None), 2),
    "SONew, tridiagonal": (partial(_spending, rankwise.SONew, band=1), 2),
    "SONew, band 4": (partial(_spending, rankwise.SONew, band=4), 2),
    "SONew, tridiagonal, gradients kept": (_of(rankwise.SONew, band=1), 2),
    "LDAdam, rank 16": (_of(rankwise.LDAdam, rank=16), 2),
    "LDAdam, rank 256": (_of(rankwise.LDAdam, rank=256), 2),
    "LDAdam, rank 256, buffer int8": (partial(_spending, rankwise.LDAdam, rank=256, error_dtype="int8"), 2),
    "LDAdam, rank 256, buffer int8, gradients kept": (_of(rankwise.LDAdam, rank=256, error_dtype="int8"), 2),
    "MARS-AdamW, states int8": (_of(rankwise.MARS, variant="adamw", **_INT8), 2),
    "MARS-Lion, states int8": (_of(rankwise.MARS, variant="lion", **_INT8), 2),
    "MARS-M, states int8": (_of(rankwise.MARS, variant="muon", **_INT8), 2),
    "SONew, tridiagonal, states int8": (partial(_spending, rankwise.SONew, band=1, **_INT8), 2),
    "LDAdam, rank 256, states int8": (partial(_spending, rankwise.LDAdam, rank=256, **_INT8), 2),
    "MKOR, states int8": (partial(_mkor, **_INT8), 2),
    "MKOR": (_mkor, 2),
    "MKOR, factor step": (_mkor, _FACTOR_STEP),
}
"""How the optimizer is made, and how many steps come before the one that is counted."""

GOALS: dict[str, Goal] = {
    "MARS-AdamW, reference bfloat16": Goal(38.1, 7),
    "MARS-Lion, reference bfloat16": Goal(30.1, 7),
    "MARS-AdamW, states int8": Goal(24.0, 7),
    "MARS-M": Goal(41.0, 167, outside_products=True),
    "SONew, tridiagonal": Goal(40.4, 12),
    "SONew, band 4": Goal(65.0, 12),
    "LDAdam, rank 256": Goal(55.0, 400),
    "MKOR": Goal(40.0, 250, outside_products=True),
}
"""By type, for Llama 1B."""


def counted(name: str, model: str) -> dict[str, Any]:
    """The counts of a type's steady step as a row of a table.

    Args:
        name: Key of :data:`TYPES`.
        model: Key of :data:`benchmarks.models.MODELS`.
    """
    build, before = TYPES[name]
    found, parameters = count(build, model, before)
    goal = GOALS.get(name)
    return {
        "name": name,
        "model": model,
        "bytes_per_parameter": found.bytes / parameters,
        "outside_products": (found.bytes - found.product_bytes) / parameters,
        "flops_per_parameter": {kind: flops / parameters for kind, flops in found.flops.items()},
        "kernels": found.kernels.total(),
        "operations": found.operations.total(),
        "launches": found.launches,
        "waits": found.waits.total(),
        "places": dict(found.waits),
        "by_name": dict((found.kernels + found.operations).most_common()),
        "goal": None if goal is None else asdict(goal),
    }


def count(build: Callable[[nn.Module], Any], model: str, before: int) -> tuple[Counts, int]:
    """Count one step.

    Args:
        build: Makes the optimizer of a model.
        model: Key of :data:`benchmarks.models.MODELS`.
        before: Steps that come first.

    Returns:
        The counts, and the number of parameters.
    """
    network = layer_set(model, META)
    counts = Counts()
    with recorded_launches() as records, using(triton), Values(None):
        optimizer = build(network)
        for _ in range(before):
            _gradients(network)
            optimizer.step()
        _gradients(network)
        records.to = counts
        with Values(counts):
            optimizer.step()
        records.to = None
    return counts, sum(parameter.numel() for parameter in network.parameters())


def _gradients(model: nn.Module) -> None:
    """A forward and a backward pass of every linear module for optimizers that look at them; then new gradients."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    outputs = [module(torch.empty(1, module.in_features, device=META)) for module in linear]
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)


class Values(TorchDispatchMode):
    """Gives zeros for what is read of tensors without memory; counts operations on them.

    Args:
        counts: None: nothing is counted.
    """

    def __init__(self, counts: Counts | None) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in inputs if tensor.device == META]
        waits = bool(here) and (name in _WAITS or _leaves(name, kwargs, args))
        arrives = name == "copy_" and bool(here) and args[0].device != META
        result = args[0].fill_(1) if arrives else _steady(name, args, kwargs) if waits else func(*args, **kwargs)
        if self._counts is None:
            return result
        if waits:
            self._counts.waits[f"{name} in {_place()}"] += 1
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.device == META]
        idle = name in VIEWS or name.startswith(("empty", "new_empty")) or func.namespace == "profiler"
        if (here or made) and not idle and not waits:
            self._count(name, args, here, made)
        return result

    def _count(self, name: str, args: Any, here: list[Tensor], made: list[Tensor]) -> None:
        assert self._counts is not None
        self._counts.operations[name] += 1
        known = {id(tensor) for tensor in here}
        written = [tensor for tensor in made if id(tensor) not in known]
        read = {} if name in _MAKERS else {id(tensor): tensor for tensor in here}
        moved = sum(map(bytes_of, read.values())) + sum(map(bytes_of, written))
        if name.endswith("_") and name not in _FILLS:
            # In place: what is read is written, too.
            moved += sum(map(bytes_of, (leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, Tensor))))
        self._counts.bytes += moved
        if name in _PRODUCTS:
            self._counts.product_bytes += moved
            left, right = (tensor for tensor in args[-2:] if isinstance(tensor, Tensor))
            elements = left.shape[:-1].numel() * right.shape[-1]
            self._counts.flops[multiplier(left.dtype)] += 2 * elements * left.shape[-1]


def _leaves(name: str, kwargs: dict[str, Any], args: Any) -> bool:
    """Whether values are copied to the host."""
    if name == "_to_copy":
        return kwargs.get("device") is not None and torch.device(kwargs["device"]) != META
    return name == "copy_" and args[0].device != META and not (args[2:] or (kwargs.get("non_blocking"),))[0]


def _steady(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    if name == "_local_scalar_dense":
        return False if args[0].dtype == torch.bool else 0
    if name in ("equal", "is_nonzero"):
        return False
    if name == "_to_copy":
        return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs["device"])
    return args[0].new_empty(0)


def _place() -> str:
    """The innermost function of the package that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if _PACKAGE in path.parents:
            return f"{path.relative_to(_PACKAGE)}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
