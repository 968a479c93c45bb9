"""This module makes the tables and constants by which a kernel finds the fields of a pass, narrow states included."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels.low_precision_runs import BLOCK, LowPrecisionRuns, is_coded
from rankwise.kernels.passes import Field
from rankwise.kernels.triton.codes import EXTRAS
from rankwise.kernels.triton.language import CODES, ELEMENTS, count_of
from rankwise.kernels.triton.segments import Runs, addresses

__all__ = ["PassFields"]

_STATES = ("exp_avg", "exp_avg_sq", "reference")


class PassFields:
    """Tables and constants of a launch.

    Args:
        fields: Lists in the kernel's order; noise of several is that of one step.
        tile: Elements per program.
        narrow: Lists of tensors that may be narrower than fp32.

    Attributes:
        runs: Tables of the launch.
        types: Triton's types of the fields.
        count: Number of the step in noise, or a tensor with one for each run.
        constants: Compile-time arguments that describe the states to the kernel.

    Raises:
        ValueError: The lists do not fit together, a tensor has a type that the kernel does not take, or a run of codes
            begins within a block.
    """

    def __init__(self, fields: Mapping[str, Field], tile: int, narrow: Collection[str]) -> None:
        first = next(iter(fields.values()))
        lists: list[Sequence[Tensor]] = []
        types: list[torch.dtype] = []
        columns: list[Sequence[int]] = []
        places, random = dict.fromkeys(_STATES, 0), dict.fromkeys(_STATES, False)
        step: int | Tensor | None = None
        for name, field in fields.items():
            if not isinstance(field, LowPrecisionRuns):
                dtype = field[0].dtype if name in narrow else torch.float32
                lists.append(field)
                types.append(dtype if dtype in ELEMENTS else torch.float32)
                continue
            assert not isinstance(first, LowPrecisionRuns)
            field.check(first)
            places[name], random[name] = len(fields) + 1 + len(columns), field.step is not None
            step = step if field.step is None else field.step
            coded = is_coded(field.dtype)
            if coded and any(first % BLOCK for first in field.firsts):
                raise ValueError(f"runs of codes must begin with a block of {BLOCK} elements, got {field.firsts}")
            columns += (
                addresses(field.exponents, torch.int8) if coded else [0] * len(field),
                field.firsts,
                field.keys,
            )
            lists.append(field.codes)
            types.append(field.dtype)
        assert len(columns) % EXTRAS == 0
        self.runs = Runs(lists, tile, columns, types)
        self.types = {name: (ELEMENTS | CODES)[dtype] for name, dtype in zip(fields, types, strict=True)}
        self.count = count_of(step, self.runs.runs, self.runs.device)
        self.constants: dict[str, Any] = {"EXTRAS": len(columns), "COUNTS": isinstance(self.count, Tensor)}
        for name in _STATES:
            key = name.upper()
            self.constants[key] = self.types.get(name, ELEMENTS[torch.float32])
            self.constants[f"{key}_AT"] = places[name]
            self.constants[f"{key}_RANDOM"] = random[name]
