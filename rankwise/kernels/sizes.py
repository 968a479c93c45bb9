"""These functions compare sizes before compiled code gets addresses, because it would read and write beyond the end."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["check_lengths", "check_shapes"]


def check_lengths(*lists: Sequence[Tensor]) -> None:
    """Refuse lists whose tensors differ in length at some position.

    Raises:
        ValueError: Two tensors differ; the message names the first position.
    """
    first = [tensor.numel() for tensor in lists[0]]
    for other in lists[1:]:
        lengths = [tensor.numel() for tensor in other]
        if lengths != first:
            pairs = list(zip(first, lengths, strict=False))
            place = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
            raise ValueError(
                f"tensor {place} has {_at(lengths, place)} elements in one list and {_at(first, place)} in another; "
                "weights, gradients and states of a parameter must have as many"
            )


def check_shapes(**shapes: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Refuse tensors of other shapes than expected.

    Args:
        shapes: Tensors by name, each with the shape that it must have; None for a tensor that is left out.

    Raises:
        ValueError: A shape differs; the message names the first tensor.
    """
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, but must have {shape}")


def _at(counts: Sequence[int], place: int) -> int | str:
    return counts[place] if place < len(counts) else "no"
