"""The fragments of a step with the rules they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rankwise.routing.roles import ParameterInfo, Route
from rankwise.sharding import Fragment
from rankwise.sharding.sources import Slice, TensorContents

__all__ = ["Entry", "cut_into_entries"]


@dataclass(frozen=True)
class Entry:
    """A local fragment with the rule its parameter takes."""

    index: int
    fragment: Fragment
    info: ParameterInfo
    route: Route

    @property
    def key(self) -> str:
        """Name of the parameter, or of one matrix of a stack."""
        return self.fragment.key


def cut_into_entries(
    contents: Sequence[TensorContents], infos: Mapping[str, ParameterInfo], routes: Mapping[str, Route]
) -> list[Entry]:
    """Turn slices into fragments, splitting a stack of matrices into its matrices.

    Args:
        contents: What each tensor of the step stores.
        infos: The parameters by name.
        routes: Their rules.

    Returns:
        The entries in storage order.
    """
    entries: list[Entry] = []
    for tensor, content in enumerate(contents):
        for piece in content.slices:
            info, chosen = infos[piece.name], routes[piece.name]
            for fragment in _fragments(piece, tensor, info, chosen):
                entries.append(Entry(len(entries), fragment, info, chosen))
    return entries


def _fragments(piece: Slice, tensor: int, info: ParameterInfo, chosen: Route) -> Iterator[Fragment]:
    if piece.start == piece.end:
        return
    if chosen.rule != "matrix" or len(info.shape) != 3:
        yield Fragment(piece.name, info.shape, piece.start, piece.end, tensor, piece.offset, piece.columns, piece.copy)
        return
    size = prod(info.matrix_shape)
    for index in range(piece.start // size, (piece.end - 1) // size + 1):
        first = index * size
        start, end = max(piece.start, first), min(piece.end, first + size)
        offset = piece.offset + start - piece.start
        place = (start - first, end - first, tensor, offset)
        yield Fragment(f"{piece.name}[{index}]", info.matrix_shape, *place, copy=piece.copy)
