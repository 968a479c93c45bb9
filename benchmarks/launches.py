"""Launches of Triton kernels, counted in place of being done."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rankwise.kernels import triton

__all__ = ["Counts", "Records", "bytes_of", "kernel_modules", "multiplier", "recorded_launches"]

_PRODUCT_KERNELS = {"_symmetric_kernel"}


@dataclass
class Counts:
    """What one step starts and moves.

    Attributes:
        kernels: Launches of Triton kernels, by name.
        operations: Operations of torch that start something on a device, by name.
        waits: Places where the host waits for the device, by what they are.
        bytes: Read and written.
        product_bytes: Those of matrix products among them.
        flops: Flops of products, by what multiplies: "bfloat16", "float32", or "bf16x3", halves in bfloat16.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    product_bytes: int = 0
    flops: Counter[str] = field(default_factory=Counter)

    @property
    def launches(self) -> int:
        """Kernels and operations together."""
        return self.kernels.total() + self.operations.total()


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; those that strides of zero repeat are there once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.itemsize


class Records:
    """Where launches are counted; None: nowhere."""

    to: Counts | None = None

    def __init__(self) -> None:
        self.tables: dict[int, tuple[int, ...]] = {}

    def launch(
        self, kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any
    ) -> None:
        """Count a launch that does not take place."""
        if self.to is None or min(grid) == 0:
            return
        name = kernel.fn.__name__
        self.to.kernels[name] += 1
        by_name = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        tensors = {id(value): value for value in arguments if isinstance(value, Tensor)}
        moved = sum(bytes_of(value) for key, value in tensors.items() if key not in self.tables)
        table = next((self.tables[id(value)] for value in arguments if id(value) in self.tables), ())
        moved += _of_runs(name, table, by_name)
        self.to.bytes += moved
        self.to.flops += _flops(name, grid, table, by_name)
        if name in _PRODUCT_KERNELS:
            self.to.product_bytes += moved


def multiplier(dtype: torch.dtype) -> str:
    """What products of a type are counted under in :attr:`Counts.flops`."""
    return "bfloat16" if dtype.itemsize == 2 else "float32"


def _flops(name: str, grid: tuple[int, ...], table: Sequence[int], given: dict[str, Any]) -> Counter[str]:
    """FLOP of the products of a kernel, by their type."""
    if name == "_symmetric_kernel":
        # Half of a product: the tiles above the diagonal are mirrored.
        return Counter({multiplier(given["x"].dtype): grid[1] * given["rows"] ** 2 * given["columns"]})
    if name == "_grouped_product_kernel":
        kind = "bf16x3" if given["LEFT_HALVED"] or given["RIGHT_HALVED"] else "float32"
        return Counter({kind: grid[2] * 2 * given["rows"] * given["columns"] * given["depth"]})
    if name == "_step_kernel":
        return Counter(bf16x3=sum(table[6::8]) * 2 * given["rank"] * (2 if given["FEEDBACK"] else 1))
    if name == "_moments_kernel":
        # The rotated first and second moment.
        return Counter(bf16x3=len(table) // 2 * 4 * given["rank"] ** 2 * given["length"])
    return Counter()


def _bytes(given: dict[str, Any], state: str) -> float:
    """Bytes of an element of a state, with its share of an exponent."""
    element = given[state]
    return element.primitive_bitwidth / 8 + (1 / 64 if element.is_int() else 0)


def _of_runs(name: str, table: Sequence[int], given: dict[str, Any]) -> int:
    """Bytes of what a kernel finds by the addresses in its table."""
    if name in ("update_kernel", "norm_kernel"):
        fields, stride = given["FIELDS"], given["FIELDS"] + 1 + given["EXTRAS"]
        rule, is_update = given.get("RULE"), name == "update_kernel"
        moved = given["GRAD"].primitive_bitwidth / 8 if is_update else 4.0
        if is_update and rule != 3:
            moved += 2 * _bytes(given, "EXP_AVG")
        if is_update and rule:
            moved += 4 if rule == 4 else 8
        if is_update and rule == 2:
            moved += 2 * _bytes(given, "EXP_AVG_SQ")
        if given.get("CORRECT", fields == 2):
            moved += _bytes(given, "REFERENCE") * (2 if given.get("ADVANCE") else 1)
        return int(moved * sum(table[fields::stride]))
    if name == "step_and_normalise_kernel":
        # Weights, whose place is -1, are read and written.
        old, new = 8 + given["OLD"].primitive_bitwidth // 8, 4 + given["NEW"].primitive_bitwidth // 8
        return sum((old if place < 0 else new) * length for length, place in zip(table[2::4], table[3::4], strict=True))
    if name in ("_gather_kernel", "_squares_kernel", "_finish_kernel"):
        fields, size = given["FIELDS"], given["ELEMENT"].primitive_bitwidth // 8
        # Gradients are rounded; results are measured, and written elsewhere or left alone.
        moved = {"_gather_kernel": 4 + size, "_squares_kernel": size}.get(name, (size + 4) if given.get("OUT") else 0)
        return moved * sum(table[fields :: fields + 5])
    if name.startswith("sonew"):
        return _of_sonew(name, table, given)
    if name == "_step_kernel":
        lengths, rank = sum(table[6::8]), given["rank"]
        errors = 2 if given["ERROR"].primitive_bitwidth == 16 else 4
        moved = lengths * (8 + ((4 + errors) if given["FEEDBACK"] else 0))
        # Every matrix's factors; of a piece of a matrix only as many of its rows.
        cols, other = given["cols"], (2 if given["FEEDBACK"] else 1)
        rows = [length // cols for length in table[6::8]]
        short_first = not given["RIGHT"]
        thin = sum(row * (1 if short_first else other) + cols * (other if short_first else 1) for row in rows)
        return moved + 4 * rank * thin
    if name in ("_encode_kernel", "_decode_kernel", "_exponents_kernel"):
        codes = given["ELEMENT"].primitive_bitwidth // 8 + (1 / given["BLOCK"] if given["ELEMENT"].is_int() else 0)
        wide = {"_encode_kernel": 4, "_decode_kernel": 8 if given.get("ADD") else 4}.get(name)
        return int(sum(table[3::8]) * (4 + 1 / given["BLOCK"] if wide is None else wide + codes))
    if name == "_grouped_product_kernel":
        rows, columns, depth = given["rows"], given["columns"], given["depth"]
        operands = (rows + columns) * depth
        return 4 * len(table) // 4 * (operands + rows * columns * (2 if given["ADDED"] or given["KEPT"] else 1))
    if name == "_moments_kernel":
        # The moments, read and written; what is an argument counts by itself.
        return 8 * len(table) * given["rank"] * given["length"]
    if name == "_halves_kernel":
        return 8 * given["low"]  # as many elements as one kind of halves has
    if name in ("_measure_kernel", "_move_kernel"):
        size = given["ELEMENT"].primitive_bitwidth // 8
        passes = 1 if name == "_measure_kernel" else 2
        return len(table) * given["length"] ** 2 * size * passes
    return 0


def _of_sonew(name: str, table: Sequence[int], given: dict[str, Any]) -> int:
    """Gradient, momentum, diagonal and covariances are read; all but the first, and the direction, written."""
    band = int(name.split("_")[1])
    statistics = _bytes(given, "MOMENTUM") + _bytes(given, "DIAGONAL") + band * _bytes(given, "EDGE")
    # The lengths follow the addresses of these fields and of the direction.
    return int((8 + 2 * statistics) * sum(table[4 + band :: given["COLUMNS"]]))


@contextmanager
def recorded_launches() -> Iterator[Records]:
    """Record the launches of all kernels, and what is in their tables."""
    from rankwise.kernels.triton import segments, tables
    from rankwise.ldadam.cuda.grouped_products import table_of_pairs

    records = Records()
    make, here = tables.Table.__init__, tables.Table.here

    def making(self: Any, values: tuple[int, ...] | Tensor, device: torch.device) -> None:
        self.values = values
        make(self, values, device)

    def looking(self: Any) -> Tensor:
        found = here(self)
        records.tables[id(found)] = self.values
        return found

    caches = (tables.table_of, segments.planned_table, segments.tiles_of, table_of_pairs)
    for cache in caches:
        cache.cache_clear()
    modules = [module for module in kernel_modules() if hasattr(module, "launch")]
    patches = [
        mock.patch.object(tables.Table, "__init__", making),
        mock.patch.object(tables.Table, "here", looking),
        *(mock.patch.object(module, "launch", records.launch) for module in modules),
    ]
    for patch in patches:
        patch.start()
    try:
        yield records
    finally:
        for patch in patches:
            patch.stop()
        for cache in caches:
            cache.cache_clear()


def kernel_modules() -> list[ModuleType]:
    """The modules with Triton kernels."""
    rooms = [importlib.import_module(f"rankwise.{room}") for room in ("ldadam", "mars", "mkor", "sonew")]
    return [
        importlib.import_module(module.name)
        for package in (triton, *rooms)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if package is triton or module.name.split(".")[2].startswith("cuda")
    ]
