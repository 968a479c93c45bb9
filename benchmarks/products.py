"""Time of a step over that of its own matrix products in float32, in turns in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import OURS, selected
from benchmarks.models import fill_gradients, layer_set
from benchmarks.step import timed
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["TYPES", "measure_products", "products_of"]

TYPES = ("MARS-Shampoo", "MARS-M", "MKOR")
"""Types whose step is bound by products of whole matrices."""

_WARMUP = 2
Product = Callable[[], object]


def products_of(optimizer: ShardedOptimizer, device: torch.device) -> list[Product]:
    """The products of a planned optimizer's step with matrices of float32, nothing else, into memory that is there.

    Args:
        optimizer: A :class:`rankwise.MARS` of "shampoo" or "muon", or a :class:`rankwise.MKOR`, that has stepped.
        device: Where to multiply.
    """
    found: list[Product] = []
    for unit in optimizer.planned_units:
        tasks = [] if unit.exchange is None else [task for batch in unit.exchange.plan.batches for task in batch.tasks]
        for task in tasks:
            if hasattr(task.signature, "outputs"):
                outputs, inputs = task.signature.outputs, task.signature.inputs + task.signature.has_bias
                found += _mkor(outputs, inputs, task.signature.window, device)
            else:
                rows, columns, _, position = task.signature
                found += _newton_schulz(rows, columns, device) * optimizer.param_groups[position]["ns_steps"]
    return found


def _mkor(outputs: int, inputs: int, window: int, device: torch.device) -> list[Product]:
    grad, result = (torch.randn(outputs, inputs, device=device) for _ in range(2))
    left, coordinates = torch.randn(window, outputs, device=device), torch.randn(window, inputs, device=device)
    right, others = torch.randn(window, inputs, device=device), torch.randn(outputs, window, device=device)
    return [
        _product(left, grad, coordinates),
        _product(left.mT, coordinates, result),
        _product(grad, right.mT, others),
        _product(others, right, result),
    ]


def _newton_schulz(rows: int, columns: int, device: torch.device) -> list[Product]:
    short, long = sorted((rows, columns))
    x, result = (torch.randn(short, long, device=device) for _ in range(2))
    gram, polynomial = (torch.randn(short, short, device=device) for _ in range(2))
    return [_product(x, x.mT, gram), _product(gram, gram, polynomial), _product(polynomial, x, result)]


def _product(left: Tensor, right: Tensor, out: Tensor) -> Product:
    return lambda: torch.mm(left, right, out=out)


def measure_products(
    model: str, device: torch.device, steps: int, names: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Race the default step of types against its own products in float32.

    Args:
        model: Name of a parameter set.
        device: Where to run.
        steps: Timed pairs.
        names: Some of :data:`TYPES`; empty for all.

    Yields:
        For each the type of its products, median seconds of both, and the median of the ratios of neighbouring ones.
    """
    for contender in selected([known for known in OURS if known.name in TYPES], names):
        parameters = layer_set(model, device)
        fill_gradients(parameters, 0)
        optimizer = contender.build(parameters)
        own: list[float] = []
        bare: list[float] = []
        products: list[Product] = []
        for index in range(_WARMUP + steps):
            parameters.zero_grad(set_to_none=True)
            fill_gradients(parameters, index)
            seconds, _, _ = timed(optimizer, device)
            products = products or products_of(optimizer, device)
            own.append(seconds)
            bare.append(_seconds(products, device))
        pairs = list(zip(own, bare, strict=True))[_WARMUP:]
        yield {
            "name": contender.name,
            "products": str(optimizer.spec.product_type(device, torch.float32)).removeprefix("torch."),
            "seconds": statistics.median(pair[0] for pair in pairs),
            "product_seconds": statistics.median(pair[1] for pair in pairs),
            "product_ratio": statistics.median(step / product for step, product in pairs),
        }


def _seconds(products: Sequence[Product], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for product in products:
        product()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
