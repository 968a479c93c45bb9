"""Where the matrices of offloaded weights are multiplied: on the host that keeps them, or on the model's device."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from rankwise.comm.owner_plan import MatrixTask
from rankwise.plan.step_unit import StepUnit
from rankwise.states.optimizer_spec import OptimizerSpec

__all__ = ["HOST_OPERATIONS", "LINK_BYTES", "OPERATIONS_PER_BYTE", "computes_on_device", "is_left_to_us"]

HOST_OPERATIONS = 0.25e12
"""Operations per second of the host for each rank: 8 ranks share 2 TFLOP/s."""
LINK_BYTES = 25e9
"""Bytes per second and way between host and device: PCIe 4 with 16 lanes."""
OPERATIONS_PER_BYTE = HOST_OPERATIONS / LINK_BYTES
"""From so many operations for a byte that travels on, the device multiplies. Constants, because all ranks must come to
one answer."""


def is_left_to_us(spec: OptimizerSpec) -> bool:
    """Whether the options name no device."""
    return getattr(spec.options, "offload_compute", "auto") == "auto"


def computes_on_device(spec: OptimizerSpec, device: torch.device, unit: StepUnit, tasks: Sequence[MatrixTask]) -> bool:
    """Decide where a unit's matrices are multiplied; ranks have one layout and so come to one answer.

    Args:
        spec: What follows from the optimizer's options.
        device: The model's device; "cpu" where the host is one.
        unit: A unit whose weights and states are on the host.
        tasks: Its matrices, and slices of those that ranks compute together.
    """
    if not is_left_to_us(spec):
        return bool(getattr(spec.options, "offload_compute", "") == "device")
    if device.type == "cpu":
        return False
    # A task has the parameter of which it is a slice, once.
    keys = {key for task in tasks for key in ((task.whole,) if task.whole is not None else task.parts)}
    elements = sum(prod(unit.layout.shapes[key]) for key in keys)
    crossing = 2 * unit.dtype.itemsize * elements  # each goes up and comes back
    return sum(task.cost for task in tasks) >= OPERATIONS_PER_BYTE * crossing
