"""What one step of an optimizer costs beyond what its layout and owners say; read by estimates, never by a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from rankwise.sharding import Batch, MatrixTask

__all__ = ["StepWork", "no_matrix_state"]


def no_matrix_state(task: MatrixTask) -> Mapping[str, Tensor]:
    """For rules whose states all have one value per element."""
    return {}


@dataclass(frozen=True)
class StepWork:
    """Of one unit of an optimizer.

    Attributes:
        sums: Quantities in each all-reduce of per-parameter sums.
        halo_fields: Values fetched of every neighbour across a fragment border.
        payload: Elements an owner returns to each holder instead of its piece; None for pieces.
        matrix_state: The states an owner keeps of one matrix, on the meta device.
        scalars: Bytes of every further all-reduce of a step.
        periodic: Bytes of the all-reduces that only some steps need, and every how many steps.
        period: See ``periodic``.
        element_flops: Rough number of operations per parameter element outside the matrix rule.
    """

    sums: tuple[int, ...] = ()
    halo_fields: int = 0
    payload: Callable[[Batch], int] | None = None
    matrix_state: Callable[[MatrixTask], Mapping[str, Tensor]] = no_matrix_state
    scalars: tuple[int, ...] = ()
    periodic: tuple[int, ...] = ()
    period: int = 1
    element_flops: float = 12.0
