"""The device mesh of an FSDP2 run, as ``init_device_mesh`` would be given it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

__all__ = ["COPIES", "ROWS", "TENSOR", "Mesh"]

MOST_RANKS = 1 << 17
ROWS, COPIES, TENSOR = "rows", "copies", "tensor"
"""What a dimension does to a parameter: ``fully_shard`` cuts its rows, or keeps copies; tensor parallelism cuts it."""
_MEANINGS = {
    **dict.fromkeys(("dp", "shard", "fsdp", "dp_shard"), ROWS),
    **dict.fromkeys(("rep", "dp_replicate"), COPIES),
    "tp": TENSOR,
}
_ORDERS = ((ROWS,), (ROWS, TENSOR), (COPIES, ROWS), (COPIES, ROWS, TENSOR))
_RULE = "it must be dp=64, dp=8,tp=8, rep=2,shard=8 or rep=2,shard=8,tp=4, with sizes of at least 1"


@dataclass(frozen=True)
class Mesh:
    """Names and sizes of its dimensions; the last one's ranks lie next to each other.

    Attributes:
        names: As typed.
        sizes: Sizes of each.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> Mesh:
        """A mesh from text such as ``dp=8,tp=8``.

        Raises:
            ValueError: It is none that ``fully_shard`` takes, beside tensor parallelism.
        """
        pairs = [part.strip().partition("=") for part in text.split(",")]
        names, sizes = tuple(name for name, _, _ in pairs), [size for _, _, size in pairs]
        for name in names:
            if name not in _MEANINGS:
                raise ValueError(
                    f"mesh is {text!r}: {name!r} is none of {', '.join(_MEANINGS)}; {_RULE}. Ranks of context "
                    "parallelism cut rows, too: count them in dp; pipeline stages are planned one by one"
                )
        if not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ValueError(f"mesh is {text!r}: {_RULE}")
        found = cls(names, tuple(map(int, sizes)))
        if found.ranks > MOST_RANKS:
            raise ValueError(f"mesh is {text!r}: it must have at most {MOST_RANKS:,} ranks, and has {found.ranks:,}")
        if found.meanings not in _ORDERS:
            raise ValueError(f"mesh is {text!r}: {_RULE}, in this order")
        return found

    @property
    def meanings(self) -> tuple[str, ...]:
        """What each dimension does."""
        return tuple(_MEANINGS[name] for name in self.names)

    @property
    def ranks(self) -> int:
        """All of them."""
        return prod(self.sizes)

    @property
    def tp(self) -> int:
        """Ranks that tensor parallelism cuts over."""
        return prod(size for size, meaning in zip(self.sizes, self.meanings, strict=True) if meaning == TENSOR)

    @property
    def words(self) -> str:
        """As typed."""
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    def coordinates(self) -> list[tuple[int, ...]]:
        """Of every rank."""
        return list(product(*map(range, self.sizes)))
