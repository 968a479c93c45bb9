"""A rank's modules show linear layers whole, or a slice of the features, or a share of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from rankwise.layout.dtensors import cut_of, local_view

__all__ = ["LinearShape", "LinearView", "SummedPart", "describe_linear", "placed", "seen_by", "views_of"]


class LinearShape(NamedTuple):
    """The shape of a layer's weight: the features that it takes and gives, and whether the weight is (in, out)."""

    in_features: int
    out_features: int
    transposed: bool = False


class SummedPart(NamedTuple):
    """The part of a layer's input, or of its output's gradient, that this rank sums up.

    The parts of all ranks are disjoint and together make the whole, so that sums over ranks are those of one process.

    Attributes:
        runs: Positions [start, end) in the whole layer of the features that this rank sums; None for all features.
        alike: Position of this rank among the ranks that see the same tokens, and the number of these ranks. A rank
            with some of the features sums them over all these tokens; one with all features takes its share of the
            tokens, and none if its position is beyond the last.
    """

    runs: tuple[tuple[int, int], ...] | None = None
    alike: tuple[int, int] = (0, 1)

    def width(self, features: int) -> int:
        """Return the number of features that this rank sums.

        Args:
            features: Number of features of the whole layer.
        """
        return features if self.runs is None else sum(end - start for start, end in self.runs)

    def share(self, tokens: int) -> slice:
        """Return this rank's share of the tokens that several ranks see."""
        rank, ways = self.alike
        return slice(rank * tokens // ways, (rank + 1) * tokens // ways)

    def part(self, rows: Tensor, features: int) -> Tensor:
        """Return the part of a module's tensor that this rank sums up.

        Args:
            rows: (tokens, features), of this rank's slice or of the whole layer.
            features: Number of features of the whole layer.
        """
        if self.runs is None:
            return rows if self.alike == (0, 1) else rows[self.share(rows.shape[0])]
        if rows.shape[1] != features or self.width(features) == features:
            return rows
        return torch.cat([rows[:, start:end] for start, end in self.runs], dim=1)

    def widened(self, vector: Tensor, features: int) -> Tensor:
        """Put this rank's sums to their positions in the whole layer, with zeros elsewhere."""
        if self.runs is None:
            return vector
        whole = vector.new_zeros(features)
        offset = 0
        for start, end in self.runs:
            whole[start:end] = vector[offset : offset + end - start]
            offset += end - start
        return whole


def placed(tensor: Tensor, side: SummedPart) -> tuple[Tensor, SummedPart]:
    """Return this rank's shard of a module's tensor, and the part of it to sum up, by the placements of a ``DTensor``.

    Args:
        tensor: Input, or gradient of the output.
        side: The part to sum up of a tensor that is no ``DTensor``.
    """
    cut = cut_of(tensor)
    if cut is None:
        return tensor, side
    position, ways, runs = 0, 1, None
    for dim, placement in enumerate(cut.spec.placements):
        number, count = cut.spec.mesh.get_local_rank(dim), cut.spec.mesh.size(dim)
        if placement.is_shard() and placement.dim % tensor.dim() == tensor.dim() - 1:
            size = -(-tensor.shape[-1] // count)
            runs = ((min(number * size, tensor.shape[-1]), min((number + 1) * size, tensor.shape[-1])),)
        if placement.is_replicate() or (runs is not None and placement.is_shard()):
            # All ranks of this dimension see these tokens. With a pending sum, each has a term, and none is left out.
            position, ways = position * count + number, ways * count
    return local_view(tensor), SummedPart(runs, (position, ways))


def seen_by(described: list[LinearView], alike: tuple[int, int]) -> list[LinearView]:
    """Return views for ranks that see the same tokens, each of which then takes a share of the tokens.

    Args:
        described: Views of one process.
        alike: Position of this rank among the ranks that see the same tokens, and their number.
    """
    if alike[1] == 1:
        return described
    share = SummedPart(None, alike)
    return [replace(view, inputs=share, outputs=share) for view in described]


@dataclass(frozen=True, eq=False)
class LinearView:
    """One weight of a module, and the parts of the module's input and output that belong to it.

    Attributes:
        weight: Weight that the module multiplies by.
        bias: Bias that the module adds, or hands on to be added, after multiplying by the weight.
        shape: Shape of the whole layer, before any rank cut it.
        inputs: The part of the input to sum up.
        outputs: The part of the output gradient to sum up.
        rows: Finds the weight's rows among all tokens, from the call's arguments, where a module has several weights.
        prepare: Does to the input, (tokens, features), what the module does before the multiplication.
    """

    weight: Parameter
    bias: Parameter | None
    shape: LinearShape
    inputs: SummedPart = SummedPart()
    outputs: SummedPart = SummedPart()
    rows: Callable[[tuple[Any, ...], Mapping[str, Any]], slice] | None = None
    prepare: Callable[[Tensor], Tensor] | None = None


def describe_linear(module: nn.Module) -> LinearShape | None:
    """Recognise ``torch.nn.Linear`` and the ``Conv1D`` of Hugging Face's GPT-2, with their subclasses.

    Returns:
        The shape of its weight, or None if it is neither.
    """
    if isinstance(module, nn.Linear):
        return LinearShape(module.in_features, module.out_features)
    is_conv1d = any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)
    if is_conv1d and isinstance(getattr(module, "nx", None), int) and isinstance(getattr(module, "nf", None), int):
        return LinearShape(int(module.nx), int(module.nf), transposed=True)  # type: ignore[arg-type]
    return None


def views_of(module: nn.Module, described: LinearShape | list[LinearView] | None) -> list[LinearView]:
    """Return the views of a module: those described, or that of ``module.weight`` where a shape was described."""
    if isinstance(described, list):
        return described
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if described is None or not isinstance(weight, Parameter):
        return []
    return [LinearView(weight, bias if isinstance(bias, Parameter) else None, described)]
