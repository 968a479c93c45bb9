"""What ranks that share a linear layer sum up: parts that are disjoint and together are everything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.statistics.hooks import Capture
from rankwise.statistics.linear_views import LinearShape, LinearView, SummedPart

quick = settings(max_examples=30, deadline=None)
FEATURES, TOKENS = 12, 7
CUTS = [
    [((0, 12),)],
    [((0, 6),), ((6, 12),)],
    [((0, 2), (6, 8)), ((2, 4), (8, 10)), ((4, 6), (10, 12))],  # gate and up projection in one weight, three ranks
]


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@quick
@given(st.integers(0, 50), st.integers(1, 7))
def test_shares_of_the_tokens_tile_them(tokens: int, ways: int) -> None:
    shares = [list(range(tokens))[SummedPart(None, (rank, ways)).share(tokens)] for rank in range(ways)]
    assert sum(shares, []) == list(range(tokens))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("cut", CUTS, ids=len)
@pytest.mark.parametrize("gathered", [False, True])
def test_parts_add_up(cut: list[tuple[tuple[int, int], ...]], gathered: bool) -> None:
    """By features, whether the module shows a rank its own or all of them, and by tokens."""
    data = rows(0, TOKENS, FEATURES)
    total, by_token = torch.zeros(FEATURES, dtype=torch.float64), torch.zeros(FEATURES, dtype=torch.float64)
    for rank, runs in enumerate(cut):
        side = SummedPart(runs, (rank, len(cut)))
        shown = data if gathered else torch.cat([data[:, start:end] for start, end in runs], dim=1)
        part = side.part(shown, FEATURES)
        assert part.shape == (TOKENS, side.width(FEATURES))
        total += side.widened(part.sum(0), FEATURES)
        by_token += SummedPart(None, (rank, len(cut))).part(data, FEATURES).sum(0)
    torch.testing.assert_close(total, data.sum(0))
    torch.testing.assert_close(by_token, data.sum(0))


class Experts(nn.Module):
    """Two weights in one module, each for its part of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight0, self.weight1 = (nn.Parameter(rows(seed, 3, 4)) for seed in (1, 2))

    def forward(self, x: Tensor, first: int) -> Tensor:
        return torch.cat([F.linear(x[:first], self.weight0), F.linear(x[first:], self.weight1)])


def views(module: nn.Module) -> list[LinearView] | None:
    if not isinstance(module, Experts):
        return None
    shape = LinearShape(4, 3)
    return [
        LinearView(module.weight0, None, shape, rows=lambda args, kwargs: slice(0, args[1])),
        LinearView(
            module.weight1, None, shape, rows=lambda args, kwargs: slice(args[1], None), prepare=lambda x: 2 * x
        ),
    ]


@pytest.mark.parametrize("first", [0, 2, TOKENS])
def test_a_module_with_several_weights(first: int) -> None:
    module, x, dy = Experts(), rows(3, TOKENS, 4), rows(4, TOKENS, 3)
    capture = Capture(module, describe=views)
    (module(x, first) * dy).sum().backward()
    for weight, part, gain in ((module.weight0, slice(0, first), 1), (module.weight1, slice(first, None), 2)):
        inputs, count, outputs = capture.take(weight)
        assert count == len(x[part])
        torch.testing.assert_close(inputs, gain * x[part].sum(0))
        torch.testing.assert_close(outputs, dy[part].sum(0))


def test_a_weight_cut_differently_by_two_modules_is_refused() -> None:
    layer = nn.Linear(4, 3)
    seen = iter([SummedPart(), SummedPart(None, (0, 2))])
    with pytest.raises(ValueError, match="share a weight"):
        Capture(
            nn.ModuleDict({"a": layer, "b": _Other(layer.weight)}),
            describe=lambda m: (
                [LinearView(layer.weight, None, LinearShape(4, 3), next(seen))] if hasattr(m, "weight") else None
            ),
        )


class _Other(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
