"""Describes weights that hold several logical matrices: which rows or columns belong to which."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FusedShape"]


@dataclass(frozen=True)
class FusedShape:
    """How logical matrices ("blocks") are laid out in a weight: ``groups`` repetitions of consecutive parts.

    Parts that follow each other once (``qkv_proj``, ``gate_up_proj``, GPT-2's ``c_attn``) are one group. Megatron's
    ``linear_qkv`` has a group for each key-value head, with the queries that share it; GPT-NeoX and BLOOM have one for
    each head; rows that alternate are groups of single rows. A layer of queries alone is one part with heads: one
    matrix, unless each head is to be one.

    It describes :attr:`ParameterInfo.shape`: where a framework cuts a weight over tensor-parallel ranks and its adapter
    tells the shape of the whole, the parts are those of the whole, too.

    Attributes:
        parts: Name and rows of each part within one group, in their order.
        dim: The stored dimension that is cut, counted from the end: -2 for rows, -1 for columns (of weights that are
            stored as (inputs, outputs)).
        groups: Number of repetitions of the parts along this dimension.
        heads: Attention heads that each part has within one group, one below the other; 0 for a part that has none.
            Empty where no part has any.
    """

    parts: tuple[tuple[str, int], ...]
    dim: int = -2
    groups: int = 1
    heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads and len(self.heads) != len(self.parts):
            raise ValueError(f"{len(self.heads)} numbers of heads for {len(self.parts)} parts")
        for (name, size), heads in zip(self.parts, self.heads, strict=False):
            if heads and size % heads:
                raise ValueError(f"the {size} rows of '{name}' are not {heads} heads")

    @property
    def length(self) -> int:
        """Length of the dimension that is cut."""
        return self.groups * sum(size for _, size in self.parts)
