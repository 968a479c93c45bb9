"""Element states in codes: whatever the layout, the same trajectory, down to the last code.

Blocks that share an exponent belong to the parameter: where ranks, or runs of one rank, have parts of one, they agree
on it. In float64 a layout must follow one process to 1e-10; where a rule sums nothing over a parameter, it must do so
bit for bit in float32. What is kept in codes is decided for a parameter, whatever else its tensor stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import run_ranks
from simulated import Case, Framework, run_of, world_group
from torch import Tensor

from rankwise import MARS, MKOR, LDAdam, SONew
from rankwise.layout.layout_source import Slice
from rankwise.states import optimizer_spec as spec

STEPS = 5
BLOCKS: dict[str, Any] = {"c.weight": {"q": 3, "k": 3, "groups": 2}}
INT8: dict[str, Any] = {"state_dtype": "int8"}
MKOR_OPTIONS: dict[str, Any] = {"update_interval": 2, "factor_dtype": "float64", "factor_decay": 0.9, **INT8}
CASES = (
    Case("mars-adamw", MARS, INT8),
    Case("mars-lion-stochastic", MARS, {"variant": "lion", "state_rounding": "stochastic", **INT8}),
    Case("mars-muon-blocks", MARS, {"variant": "muon", "ns_dtype": "float64", "blocks": BLOCKS, **INT8}),
    Case(
        "mars-muon-unclipped", MARS, {"variant": "muon", "ns_dtype": "float64", "clip": None, "blocks": BLOCKS, **INT8}
    ),
    Case("mars-mixed", MARS, {"state_dtype": {"exp_avg": "int8", "exp_avg_sq": "bfloat16"}}),
    Case("sonew", SONew, {"band": 1, "chain": "tensor", **INT8}),
    Case("ldadam", LDAdam, {"rank": 2, "blocks": BLOCKS, **INT8}),
    Case("mkor-adamw", MKOR, MKOR_OPTIONS),
    Case("mkor-lamb", MKOR, {"backend": "lamb", **MKOR_OPTIONS}),
    Case("mkor-sgd", MKOR, {"backend": "sgd", **MKOR_OPTIONS}),
)
EXACT = (
    Case("mars-adamw", MARS, {"clip": None, "state_rounding": "stochastic", **INT8}),
    Case("mars-mixed", MARS, {"clip": None, "state_dtype": {"exp_avg": "int8", "reference": "bfloat16"}}),
    Case("mars-bfloat16", MARS, {"clip": None, "state_dtype": "bfloat16"}),
    Case("mars-lion", MARS, {"variant": "lion", "clip": None, "state_rounding": "stochastic", **INT8}),
    Case("mars-lion-bfloat16", MARS, {"variant": "lion", "clip": None, "state_dtype": "bfloat16"}),
    Case("sonew-diagonal", SONew, {"band": 0, "state_rounding": "stochastic", **INT8}),
    Case("sonew", SONew, {"band": 1, "graft": "none", "chain": "tensor", "state_rounding": "stochastic", **INT8}),
    Case("sonew-mixed", SONew, {"band": 2, "graft": "none", "state_dtype": {"exp_avg": "int8", "covariance": "int8"}}),
)
# Elements from which on states are in codes: those of all parameters, or of three matrices and the stack of experts.
FEWEST = (1, 85)
LAYOUTS = ("flat", "cut", "views", "narrowed")
Held = list[tuple[Slice, Tensor]]


def _follow(
    rank: int, world: int, cases: Sequence[Case], dtype: torch.dtype, layouts: Sequence[str], fewest: int
) -> list[Held]:
    spec.FEWEST_CODED = fewest
    found = []
    for case in cases:
        for layout in layouts:
            framework = Framework(layout, case, dtype, rank, world, world_group())
            for _ in range(STEPS):
                framework.step()
            found.append(framework.pieces())
    return found


@pytest.fixture(scope="module", autouse=True)
def _as_before() -> Any:
    before = spec.FEWEST_CODED
    yield
    spec.FEWEST_CODED = before


_ALONE: dict[tuple[str, torch.dtype, int], dict[str, Tensor]] = {}


def _alone(case: Case, dtype: torch.dtype, fewest: int) -> dict[str, Tensor]:
    """What one process makes of a case, by parameter."""
    key = (case.name, dtype, fewest)
    if key not in _ALONE:
        (held,) = _follow(0, 1, [case], dtype, ["replicated"], fewest)
        _ALONE[key] = {piece.key: values for piece, values in held}
    return _ALONE[key]


def _sizes(*usual: tuple[int, int]) -> list[Any]:
    """Ranks and fewest elements; what is not usual is exhaustive."""
    every = [(world, fewest) for fewest in FEWEST for world in (1, 2, 3, 4)]
    return [pytest.param(*size, marks=() if size in usual else pytest.mark.exhaustive) for size in every]


@pytest.mark.parametrize(("world", "fewest"), _sizes((1, 1), (2, 1)))
def test_a_layout_follows_one_process(world: int, fewest: int) -> None:
    arguments = (CASES, torch.float64, LAYOUTS, fewest)
    outcomes = [_follow(0, 1, *arguments)] if world == 1 else run_ranks(world, _follow, *arguments)
    for at, (case, layout) in enumerate((case, layout) for case in CASES for layout in LAYOUTS):
        expected = _alone(case, torch.float64, fewest)
        held = [each for outcome in outcomes for each in outcome[at]]
        error = max(float((values - run_of(expected[piece.key], piece)).abs().max()) for piece, values in held)
        assert error <= 1e-10, (case.name, layout, error)


@pytest.mark.parametrize(("world", "fewest"), _sizes((1, 1), (2, 1), (2, 85)))
def test_where_nothing_is_summed_bit_for_bit(world: int, fewest: int) -> None:
    arguments = (EXACT, torch.float32, LAYOUTS, fewest)
    outcomes = [_follow(0, 1, *arguments)] if world == 1 else run_ranks(world, _follow, *arguments)
    for at, (case, layout) in enumerate((case, layout) for case in EXACT for layout in LAYOUTS):
        expected = _alone(case, torch.float32, fewest)
        for piece, values in (each for outcome in outcomes for each in outcome[at]):
            assert torch.equal(values, run_of(expected[piece.key], piece)), (case.name, layout)
