"""torch's sharded tensors (``DTensor``): local parts, and tensors that are cut like others.

A step works on local parts, in place, and runs no operation on a ``DTensor`` itself: each takes tens of microseconds
of the host's time.
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
"""Types that are no sharded tensors; hot paths test for them first, because that takes no call."""


class Cut(NamedTuple):
    """How a tensor is cut over ranks.

    Attributes:
        spec: torch's description of the cut: ``mesh`` and, by dimension of the mesh, ``placements``.
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
    """This rank's part of a ``DTensor``, else the tensor itself; a view of the same memory."""
    if type(tensor) in PLAIN:
        return tensor
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def cut_of(tensor: Any) -> Cut | None:
    """Return how a tensor is cut; None for one that is no ``DTensor``."""
    kind: type = type(tensor)
    if not _has_parts(kind):
        return None
    return Cut(tensor._spec, tensor._local_tensor.shape)


def local_gradient(tensor: Tensor, grad: Tensor) -> Tensor:
    """This rank's part of a gradient, cut as its tensor is.

    A gradient that is cut otherwise, as that of a weight that every tensor-parallel rank has whole, is redistributed: a
    collective of the ranks of its mesh, which all of them enter.
    """
    if type(grad) is Tensor or not is_sharded(grad):
        return grad
    spec: Any = tensor._spec  # type: ignore[attr-defined]
    if grad._spec.placements != spec.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(spec.mesh, spec.placements)  # type: ignore[attr-defined]
    local = local_view(grad)
    # The part may be the result of a collective that nobody has waited for.
    return local.wait() if hasattr(local, "wait") else local


def local_gradients(tensors: Sequence[Any], sharded: Sequence[bool]) -> list[Tensor | None]:
    """This rank's parts of gradients; no collective and no call where they are cut as their tensors are."""
    gradients: list[Tensor | None] = []
    for tensor, cut in zip(tensors, sharded, strict=True):
        grad = tensor.grad
        if cut and grad is not None:
            alike = type(grad) not in PLAIN and grad._spec.placements == tensor._spec.placements
            # The part may be the result of a collective that nobody has waited for.
            is_ready = alike and type(grad._local_tensor) is Tensor
            grad = grad._local_tensor if is_ready else local_gradient(tensor, grad)
        gradients.append(grad)
    return gradients


def cut_as(value: Tensor, owner: Tensor) -> Tensor:
    """Cut a tensor of the owner's shape as the owner is cut; a collective where it must be put together first."""
    if not is_sharded(owner):
        return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined, no-any-return]
    wanted: Any = owner
    if value.shape != owner.shape:
        return value  # the caller refuses it
    if not is_sharded(value):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(owner.device), wanted.device_mesh, wanted.placements, src_data_rank=None)
    given: Any = value
    if given.device_mesh == wanted.device_mesh and given.placements == wanted.placements:
        # The mesh of another process, which has sent its part, has no groups here.
        return value if given.device_mesh is wanted.device_mesh else sharded_like(owner, local_view(value))
    return cut_as(given.full_tensor(), owner)


def sharded_like(owner: Tensor, local: Tensor) -> Tensor:
    """Make a tensor of this rank's part, cut as ``owner`` is; returns the part itself where ``owner`` is not cut."""
    cut = cut_of(owner)
    if cut is None:
        return local
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor.from_local(
        local, cut.spec.mesh, cut.spec.placements, run_check=False, shape=owner.shape, stride=owner.stride()
    )
    return whole
