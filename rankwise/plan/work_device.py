"""Where the matrices of offloaded weights are multiplied: on the host that keeps them, or on the model's device."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from rankwise.comm.owner_plan import MatrixTask
from rankwise.options.validation import OptionError
from rankwise.plan.step_unit import StepUnit
from rankwise.states.optimizer_spec import OptimizerSpec

__all__ = ["HOST_OPERATIONS", "LINK_BYTES", "OPERATIONS_PER_BYTE", "computes_on_device"]

HOST_OPERATIONS = 0.25e12
"""Operations per second of the host for each rank: 8 ranks share 2 TFLOP/s."""
LINK_BYTES = 25e9
"""Bytes per second and way between host and device: PCIe 4 with 16 lanes."""
OPERATIONS_PER_BYTE = HOST_OPERATIONS / LINK_BYTES
"""From so many operations for a byte that travels on, the device multiplies. Constants, because all ranks must come to
one answer."""


def computes_on_device(
    spec: OptimizerSpec, device: torch.device, unit: StepUnit, tasks: Sequence[MatrixTask], in_slices: bool
) -> bool:
    """Decide where a unit's matrices are multiplied; ranks have one layout and so come to one answer.

    Args:
        spec: What follows from the optimizer's options.
        device: The model's device; "cpu" where the host is one.
        unit: A unit whose weights and states are on the host.
        tasks: Its matrices.
        in_slices: Whether ranks compute slices of some together.

    Raises:
        OptionError: The device is asked for, and cannot be used.
    """
    wish = getattr(spec.options, "offload_compute", "auto")
    if wish == "device" and in_slices:
        raise OptionError(
            f'{spec.name}: offload_compute="device" is invalid under tensor parallelism: ranks compute slices of '
            'matrices together, over messages of the host; set offload_compute to "auto"'
        )
    if wish != "auto":
        return wish == "device"
    shapes = unit.layout.shapes
    elements = sum(prod(shapes[part]) for task in tasks for part in task.parts)
    crossing = 2 * unit.dtype.itemsize * elements  # each goes up and comes back
    pays = sum(task.cost for task in tasks) >= OPERATIONS_PER_BYTE * crossing
    return device.type != "cpu" and not in_slices and pays
