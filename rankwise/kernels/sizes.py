"""Sizes compared before addresses are handed to compiled code, which would read and write whatever lies there."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["check_lengths", "check_shapes"]


def check_lengths(*lists: Sequence[Tensor]) -> None:
    """Refuse lists whose tensors are not, position by position, as long.

    Raises:
        ValueError: Names the first position.
    """
    first = [tensor.numel() for tensor in lists[0]]
    for other in lists[1:]:
        found = [tensor.numel() for tensor in other]
        if found != first:
            pairs = list(zip(first, found, strict=False))
            place = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
            raise ValueError(
                f"tensor {place} has {_at(found, place)} elements in one list and {_at(first, place)} in another; "
                "weights, gradients and states of a parameter must have as many"
            )


def check_shapes(**shapes: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Refuse tensors of other shapes than expected.

    Args:
        shapes: By name, a tensor, or None for one that is left out, and its shape.

    Raises:
        ValueError: Names the first one.
    """
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, but must have {shape}")


def _at(counts: Sequence[int], place: int) -> int | str:
    return counts[place] if place < len(counts) else "no"
