"""Declarations of modules to checkpoints, or marks, say how tensor parallelism cuts a model's parameters.

Megatron does not mark all parameters that it cuts: learnable attention sinks have no mark, state-space layers have
marks without a dimension, and no mark says that a weight's parts are cut one by one. Its modules declare all of that
when they say what a checkpoint must hold of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor, nn
from torch.nn import Parameter

from megatron_patches.groups import ParallelGroups
from rankwise.layout.dtensors import is_sharded, local_view

__all__ = ["WHOLE", "ParameterCut", "declared_cuts", "equal_sections", "marked_cut", "rows_cut_again"]


class ParameterCut(NamedTuple):
    """How tensor parallelism cuts a parameter.

    Attributes:
        dim: Dimension that is cut; None where every rank holds the whole.
        sections: Rows of this rank's pieces, one from each section of the whole; empty if the whole is one section.
    """

    dim: int | None
    sections: tuple[int, ...] = ()


WHOLE = ParameterCut(None)


class _DeclaredRows(NamedTuple):
    """A module's declaration of some rows of a parameter."""

    first: int
    key: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    offset: tuple[int, ...]


def rows_cut_again(parameter: Any) -> tuple[int, int, int] | None:
    """Return which rows of its tensor-parallel shard a rank has, where these are cut once more, and their number.

    Megatron fills the shard up with rows of zeros, so that all ranks have as many.

    Returns:
        The first row, the row behind the last that is none of zeros, and the rows of the shard; None if all are here.
    """
    if not getattr(parameter, "is_gtp_weight_remat", False):
        return None
    here, ranks = parameter.shape[0], parameter.group.size()
    first, rows = here * parameter.group.rank(), here * ranks - parameter.pad_length
    return first, max(first, min(first + here, rows)), rows


def marked_cut(parameter: Tensor) -> ParameterCut | None:
    """Return the cut by the marks that Megatron's layers leave on parameters; None if a mark has no dimension."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return WHOLE
    dim = int(getattr(parameter, "partition_dim", -1))
    if dim < 0:
        return ParameterCut(0) if parameter.dim() == 1 else None
    sizes = tuple(getattr(parameter, "partition_sizes", None) or ())
    if sizes:
        return ParameterCut(dim, sizes if dim == 0 else ())
    return equal_sections(parameter, dim, int(getattr(parameter, "partition_stride", 1)))


def equal_sections(parameter: Tensor, dim: int | None, count: int) -> ParameterCut:
    """Return a cut with equal sections.

    Args:
        parameter: Parameter that is cut.
        dim: Dimension that is cut.
        count: Number of sections.
    """
    again = rows_cut_again(parameter)
    rows = parameter.shape[0] if again is None else again[2]
    return ParameterCut(dim, (rows // count,) * count if dim == 0 and count > 1 else ())


def declared_cuts(model: nn.Module, groups: ParallelGroups) -> dict[Parameter, ParameterCut | None]:
    """Return cuts of the parameters for which modules declare what a checkpoint holds.

    Args:
        model: The model, without wrappers.
        groups: This rank's process groups.

    Returns:
        The cuts; None for a parameter whose declared place does not follow from tensor parallelism alone.
    """
    places = _Places(model.parameters())
    cuts: dict[Parameter, ParameterCut | None] = {}
    for state in _declared(model, {"dp_cp_group": groups.averaging}):
        pieces: dict[Parameter, list[_DeclaredRows]] = {}
        for tensor in _tensors(state):
            place = places.find(tensor)
            if place is not None:
                pieces.setdefault(place[0], []).append(place[1])
        for parameter, parts in pieces.items():
            if cuts.get(parameter, WHOLE) not in (WHOLE, None):
                continue
            cut = _cut(parameter, parts, *groups.tensor(not getattr(parameter, "allreduce", True)))
            # Modules declare rows that FSDP2 cannot cut evenly as if it could.
            if cut is not None or not is_sharded(parameter):
                cuts[parameter] = cut
    return cuts


def _declared(module: nn.Module, metadata: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what a module declares, and what modules in its lists declare, which Megatron's default leaves out."""
    declare = getattr(module, "sharded_state_dict", None)
    if callable(declare):
        try:
            state = declare(prefix="", metadata=dict(metadata))
        except Exception:  # noqa: BLE001 - a module that cannot say may hold some that can.
            pass
        else:
            yield state
            for inner in _in_containers(module):
                yield from _declared(inner, metadata)
            return
    for child in module.children():
        yield from _declared(child, metadata)


def _in_containers(module: nn.Module, inside: bool = False) -> Iterator[nn.Module]:
    """Yield modules with declarations that lie in modules without."""
    for child in module.children():
        declares = hasattr(child, "sharded_state_dict")
        if declares and inside:
            yield child
        else:
            yield from _in_containers(child, not declares)


def _tensors(state: Any) -> Iterator[ShardedTensor]:
    sharded, _ = extract_sharded_tensors_and_factories(state)
    for entry in nested_values(sharded):
        yield from nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else (entry,)


class _Places:
    """Finds the parameter of which a declared tensor is a view."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        held = [(_address(local_view(parameter)), parameter) for parameter in parameters if parameter.numel()]
        held = sorted((place for place in held if place[0]), key=lambda place: place[0])
        self._starts, self._parameters = [start for start, _ in held], [parameter for _, parameter in held]

    def find(self, tensor: ShardedTensor) -> tuple[Parameter, _DeclaredRows] | None:
        """Return the parameter and its rows; None if the tensor is a copy, or no parameter's."""
        data: Any = tensor.data
        if not isinstance(data, Tensor) or not data.numel() or tensor.flattened_range is not None:
            return None
        address = _address(data)
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        parameter = self._parameters[place]
        local = local_view(parameter)
        distance, left = divmod(address - self._starts[place], local.element_size())
        row, between = divmod(distance, prod(local.shape[1:]) or 1)
        if left or between or row + data.shape[0] > local.shape[0] or data.shape[1:] != local.shape[1:]:
            return None
        axes = tensor.prepend_axis_num
        whole, offset = tuple(tensor.global_shape[axes:]), tuple(tensor.global_offset[axes:])
        return parameter, _DeclaredRows(row, tensor.key, tuple(data.shape), whole, offset)


def _address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # an 8-bit weight may be several tensors, or have no memory
        return 0


def _cut(parameter: Parameter, pieces: list[_DeclaredRows], rank: int, ways: int) -> ParameterCut | None:
    """Return the cut that all declared pieces of a parameter make; tied weights are declared twice, and equally."""
    parts = list({part.first: part for part in reversed(pieces)}.values())
    parts.sort(key=lambda part: part.first)
    if sum(part.shape[0] for part in parts) != local_view(parameter).shape[0]:
        return None
    if len(parts) == 1:
        return _single(parameter, parts[0], rank, ways)
    rows = [part.shape[0] for part in parts]
    total = sum({part.key: part.whole[0] for part in parts}.values())
    if any(part.whole[1:] != part.shape[1:] for part in parts) or is_sharded(parameter):
        return None
    if total == sum(rows):
        return WHOLE
    fits = all(part.offset[0] % (part.shape[0] * ways) == part.shape[0] * rank for part in parts)
    return ParameterCut(0, tuple(rows)) if total == ways * sum(rows) and fits else None


def _single(parameter: Parameter, part: _DeclaredRows, rank: int, ways: int) -> ParameterCut | None:
    shape = tuple(parameter.shape)
    dims = [dim for dim, (size, whole) in enumerate(zip(shape, part.whole, strict=True)) if size != whole]
    if not dims:
        return WHOLE
    dim = dims[0]
    # FSDP2 cuts rows once more, and offsets include that cut.
    fits = is_sharded(parameter) or part.offset[dim] == rank * shape[dim]
    return ParameterCut(dim) if len(dims) == 1 and part.whole[dim] == ways * shape[dim] and fits else None
