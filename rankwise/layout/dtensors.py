"""torch's sharded tensors (``DTensor``): this rank's part of one, and a tensor cut like another.

A step works on local parts, in place, and never runs an operation on a ``DTensor`` itself: each of them costs tens of
microseconds of the host's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = [
    "PLAIN",
    "Cut",
    "cut_as",
    "cut_of",
    "is_sharded",
    "local_gradient",
    "local_gradients",
    "local_view",
    "sharded_like",
]

PLAIN = (Tensor, nn.Parameter)
"""Types that are no sharded tensors; where calls are counted, they are asked for first."""


class Cut(NamedTuple):
    """How a tensor is cut over ranks.

    Attributes:
        spec: torch's description of it: ``mesh`` and, by dimension of the mesh, ``placements``.
        shape: Shape of this rank's part.
    """

    spec: Any
    shape: tuple[int, ...]


@cache
def _has_parts(kind: type) -> bool:
    return kind not in PLAIN and hasattr(kind, "_local_tensor") and hasattr(kind, "device_mesh")


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``."""
    return _has_parts(type(tensor))


def local_view(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: of a ``DTensor`` its part, else the tensor itself; the same memory."""
    if type(tensor) in PLAIN:
        return tensor
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def cut_of(tensor: Any) -> Cut | None:
    """How a tensor is cut; None for one that is no ``DTensor``."""
    kind: type = type(tensor)
    if not _has_parts(kind):
        return None
    return Cut(tensor._spec, tensor._local_tensor.shape)


def local_gradient(tensor: Tensor, grad: Tensor) -> Tensor:
    """This rank's part of a gradient, cut as its tensor is.

    Where it is not, as that of a weight that every tensor-parallel rank has whole, it is brought to that form: a
    collective of the ranks of its mesh, which all of them enter.
    """
    if type(grad) is Tensor or not is_sharded(grad):
        return grad
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    if grad._spec.placements != spec.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(spec.mesh, spec.placements)  # type: ignore[attr-defined]
    local = local_view(grad)
    # The result of a collective that nobody has waited for.
    return local.wait() if hasattr(local, "wait") else local


def local_gradients(tensors: Sequence[Any], sharded: Sequence[bool]) -> list[Tensor | None]:
    """This rank's parts of the gradients of tensors; nothing is called where they are cut as the tensors are.

    Args:
        tensors: With or without gradients.
        sharded: Which of them are ``DTensor``.
    """
    found: list[Tensor | None] = []
    for tensor, cut in zip(tensors, sharded, strict=True):
        grad = tensor.grad
        if cut and grad is not None:
            alike = type(grad) not in PLAIN and grad._spec.placements == tensor._spec.placements
            # The part may be the result of a collective that nobody has waited for.
            own = alike and type(grad._local_tensor) is Tensor
            grad = grad._local_tensor if own else local_gradient(tensor, grad)
        found.append(grad)
    return found


def cut_as(value: Tensor, owner: Tensor) -> Tensor:
    """A tensor of the owner's shape, cut as the owner is; a collective where a whole one is to be made of parts.

    Args:
        value: Whole on every rank, or a ``DTensor``.
        owner: Plain, or a ``DTensor``.
    """
    if not is_sharded(owner):
        return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined, no-any-return]
    wanted: Any = owner
    if value.shape != owner.shape:
        return value  # to be refused
    if not is_sharded(value):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(owner.device), wanted.device_mesh, wanted.placements, src_data_rank=None)
    given: Any = value
    if given.device_mesh == wanted.device_mesh and given.placements == wanted.placements:
        return value
    return cut_as(given.full_tensor(), owner)


def sharded_like(owner: Tensor, local: Tensor) -> Tensor:
    """A tensor that is cut as another one is; the part itself where that is not cut.

    Args:
        owner: Owner of the shape that the whole is to have.
        local: This rank's part, which is not copied.
    """
    cut = cut_of(owner)
    if cut is None:
        return local
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor.from_local(
        local, cut.spec.mesh, cut.spec.placements, run_check=False, shape=owner.shape, stride=owner.stride()
    )
    return whole
