"""DeepSpeed's own map of a weight that AutoTP or AutoEP has cut says which part of it this rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap
from deepspeed.checkpoint.constants import AFFINE_MAP, DS_AUTOTP_UC_META
from torch import Tensor

from rankwise.layout.layout import LayoutError
from rankwise.layout.tensor_parallel_shards import TensorParallelShard

__all__ = ["expert_shard", "is_stack", "logical_shape", "shape_here", "tensor_parallel_shard"]

# Names of DeepSpeed 0.19.8; earlier versions do not say which experts a rank has.
_SHARED_OUT, _SHAPE, _RANK = "ds_autoep_uc_meta", "logical_shape", "ep_rank"


def is_stack(parameter: Tensor) -> bool:
    """Whether a parameter is a stack of experts that AutoEP has shared out."""
    return bool(getattr(parameter, _SHARED_OUT, None))


def shape_here(parameter: Tensor) -> Sequence[int]:
    """Return the shape of a parameter before ZeRO-3 replaced it by a placeholder."""
    shape: Sequence[int] = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def logical_shape(parameter: Tensor) -> Sequence[int]:
    """Return the shape of a parameter before AutoEP shared out its experts and ZeRO-3 put a placeholder there."""
    shape: Sequence[int] | None = (getattr(parameter, _SHARED_OUT, None) or {}).get(_SHAPE)
    return shape_here(parameter) if shape is None else shape


def expert_shard(name: str, parameter: Tensor) -> TensorParallelShard | None:
    """Return this rank's experts of a stack that AutoEP has shared out; None for other parameters.

    Args:
        name: Name of the parameter, for messages.
        parameter: The parameter after AutoEP.

    Raises:
        LayoutError: Several ranks are said to share an expert, or the stack is not what DeepSpeed's map says.
    """
    meta: dict[str, Any] | None = getattr(parameter, _SHARED_OUT, None)
    if not meta:
        return None
    everyone, rank = ParamAffineMap.from_dict(meta[AFFINE_MAP]).pieces_by_rank, meta[_RANK]
    whole = TensorParallelShard(tuple(logical_shape(parameter)), rank, len(everyone))
    local, pieces = tuple(shape_here(parameter)), everyone[rank]
    if sum(piece.numel for piece in pieces) != prod(local) or any(len(piece.locations) != 1 for piece in pieces):
        raise LayoutError(
            f"AutoEP says of '{name}', of shape {local} here, that it holds {len(pieces)} runs of the experts of "
            f"{whole.shape}, some of which are elsewhere, too, or not here: every expert must be on one rank of expert "
            "parallelism. Share them out evenly, or train the model without expert_parallel."
        )
    return _cut(name, whole, local, pieces)


def tensor_parallel_shard(
    name: str, parameter: Tensor, shape: Sequence[int], rank: int, ways: int
) -> TensorParallelShard:
    """Return what a rank holds of a parameter.

    Args:
        name: Name of the parameter, for messages.
        parameter: The parameter after AutoTP.
        shape: Shape of the parameter before AutoTP.
        rank: This rank's place among the tensor-parallel ranks.
        ways: Number of tensor-parallel ranks.

    Raises:
        LayoutError: DeepSpeed does not say how it is cut, or it is cut in a way that cannot be followed.
    """
    meta: dict[str, Any] = getattr(parameter, DS_AUTOTP_UC_META, None) or {}
    local = tuple(shape_here(parameter))
    whole = TensorParallelShard(tuple(shape), rank, ways, share=(rank, ways))
    if not meta and local == whole.shape:
        return whole
    conversion = meta.get("conversion") or {}
    encoded = conversion.get("affine_map")
    if encoded is None:
        _refuse(name, local, shape, conversion.get("unsupported_reason") or "DeepSpeed does not say how")
    everyone = ParamAffineMap.from_dict(encoded).pieces_by_rank
    pieces = everyone[rank]
    if all(len(piece.locations) == ways for piece in pieces) and local == whole.shape:
        return whole
    if any(len(piece.locations) != 1 or piece.scale != 1.0 for piece in pieces if piece.numel):
        _refuse(name, local, shape, "some of it is held, or scaled, by several ranks")
    holders = [other for other in range(ways) if any(piece.numel for piece in everyone[other])]
    place = holders.index(rank) if rank in holders else len(holders)
    return replace(_cut(name, whole, local, pieces), share=(place, len(holders)))


def _cut(
    name: str, whole: TensorParallelShard, local: tuple[int, ...], pieces: Sequence[AffinePiece]
) -> TensorParallelShard:
    """Return the shard of pieces that one rank alone holds."""
    shape, places = (whole.shape, whole.rank, whole.ways), (piece for piece in pieces if piece.numel)
    runs = sorted((run for piece in places for run in _runs(piece)), key=lambda run: run[1])
    expected = 0
    for _, before, length in runs:
        if before != expected:
            _refuse(name, local, whole.shape, "its parts lie apart in the shard")
        expected += length
    if expected != prod(local):
        _refuse(name, local, whole.shape, f"the parts that DeepSpeed names have {expected} elements")
    if not runs:
        return (
            TensorParallelShard(*shape, columns=(0, 0))
            if len(local) > 1 and local[-1] == 0
            else TensorParallelShard(*shape, runs=())
        )
    width = whole.shape[-1] if whole.shape else 1
    if all(first % width == 0 and length % width == 0 for first, _, length in runs) or len(whole.shape) == 1:
        return TensorParallelShard(*shape, runs=tuple((first, length) for first, _, length in runs))
    left, length = runs[0][0], runs[0][2]
    if [(row * width + left, length) for row in range(prod(whole.shape[:-1]))] != [(run[0], run[2]) for run in runs]:
        _refuse(name, local, whole.shape, "they are neither rows nor one block of columns")
    return TensorParallelShard(*shape, columns=(left, left + length))


def _runs(piece: AffinePiece) -> Iterator[tuple[int, int, int]]:
    """Yield runs that are contiguous in the parameter and in the shard: first elements in both, and lengths."""
    sizes = list(zip(piece.shape, piece.source_strides, piece.dest_strides, strict=True))
    length = 1
    while sizes and (sizes[-1][0] == 1 or sizes[-1][1] == sizes[-1][2] == length):
        length *= sizes.pop()[0]
    for place in product(*(range(size) for size, _, _ in sizes)):
        source = sum(at * stride for at, (_, stride, _) in zip(place, sizes, strict=True))
        here = sum(at * stride for at, (_, _, stride) in zip(place, sizes, strict=True))
        yield piece.source_offset + source, piece.dest_offset + here, length


def _refuse(name: str, local: Sequence[int], shape: Sequence[int], reason: str) -> None:
    raise LayoutError(
        f"tensor_parallel cuts '{name}' of shape {tuple(shape)} into shards, {tuple(local)} here, that cannot be "
        f"followed: {reason}. Leave the layer whole (a tensor_parallel.partition_config whose layer_specs do not "
        "name it), or train the model without tensor_parallel."
    )
