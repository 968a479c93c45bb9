"""Where the rows of a block lie."""

import pytest

from rankwise.routing.fused import Fused


@pytest.mark.parametrize(
    ("fused", "length", "runs"),
    [
        (Fused((("q", 6), ("k", 2), ("v", 2))), 10, {"q": [(0, 6)], "k": [(6, 8)], "v": [(8, 10)]}),
        (
            Fused((("q", 4), ("k", 2), ("v", 2)), groups=2),
            16,
            {"q": [(0, 4), (8, 12)], "k": [(4, 6), (12, 14)], "v": [(6, 8), (14, 16)]},
        ),
        (Fused((("gate", 1), ("up", 1)), dim=-1, groups=3), 6, {"gate": [(0, 1), (2, 3), (4, 5)]}),
    ],
)
def test_runs_of_blocks(fused: Fused, length: int, runs: dict[str, list[tuple[int, int]]]) -> None:
    assert fused.length == length
    for name, expected in runs.items():
        assert list(fused.runs(name)) == expected
        assert fused.size(name) == sum(end - start for start, end in expected)


@pytest.mark.parametrize(
    ("parts", "heads", "words"),
    [
        ((("q", 6), ("k", 2)), (3,), "1 numbers of heads for 2 parts"),
        ((("q", 6), ("k", 2)), (3, 3), "the 2 rows of 'k' are not 3 heads"),
    ],
)
def test_heads_fill_their_part(parts: tuple[tuple[str, int], ...], heads: tuple[int, ...], words: str) -> None:
    Fused((("q", 6), ("gate", 5)), heads=(3, 0))
    with pytest.raises(ValueError, match=words):
        Fused(parts, heads=heads)
