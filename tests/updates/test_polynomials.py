"""The sets of quintics against what makes them optimal, found anew in fp64, and against the lists others print."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rankwise.updates.polynomials import COEFFICIENT_SETS, LOWER_BOUND, SAFETY, quintics

TABLES = ["polar_express", "cans"]
LEFT_OUT = {"polar_express": 0.02407327424182761, "cans": 0.0}
"""The lower ends, over the upper ones, below which an interval is left out."""
LIMIT = (1.875, -1.25, 0.375)
# As in NVIDIA's Emerging-Optimizers: the first with the safety factor, the second without.
PRINTED = {
    "polar_express": [
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ],
    "cans": [
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ],
}


def value(polynomial: tuple[float, float, float], x: np.ndarray) -> np.ndarray:
    a, b, c = polynomial
    return a * x + b * x**3 + c * x**5


def high_after(polynomial: tuple[float, float, float], low: float) -> float:
    return 2.0 - float(value(polynomial, np.array(low)))


def without_safety(name: str) -> list[tuple[float, float, float]]:
    *safe, last = COEFFICIENT_SETS[name].table
    return [(a * SAFETY, b * SAFETY**3, c * SAFETY**5) for a, b, c in safe] + [last]


@pytest.mark.parametrize("name", TABLES)
def test_errors_are_equal_and_alternate_at_the_ends_and_between(name: str) -> None:
    """Chebyshev's criterion: no odd quintic has a smaller largest error on what the steps before leave.

    Where some of it is left out, the polynomial is the best one times what centres the whole about 1.
    """
    low, high = LOWER_BOUND, 1.0
    for a, b, c in without_safety(name)[:6]:
        start = max(low, LEFT_OUT[name] * high)
        turning = [math.sqrt((-3 * b + sign * math.sqrt(9 * b * b - 20 * a * c)) / (10 * c)) for sign in (-1, 1)]
        assert start < turning[0] < turning[1] < high
        values = value((a, b, c), np.array([start, *turning, high]))
        middle = (values.max() + values.min()) / 2
        np.testing.assert_allclose(values - middle, np.ptp(values) / 2 * np.array([-1, 1, -1, 1]), rtol=1e-6)
        if start == low:
            assert middle == pytest.approx(1.0, abs=1e-9)
        assert value((a, b, c), np.array([low, *turning, high])).max() <= high_after((a, b, c), low) + 1e-9
        low, high = float(value((a, b, c), np.array(low))), high_after((a, b, c), low)
    assert low > 0.99


@pytest.mark.parametrize("name", TABLES)
def test_lists_that_others_print(name: str) -> None:
    own = COEFFICIENT_SETS[name].table if name == "polar_express" else without_safety(name)
    np.testing.assert_allclose(own[: len(PRINTED[name])], PRINTED[name], atol=1e-4, rtol=0)  # some are cut, not rounded
    assert own[-1] == LIMIT


@pytest.mark.parametrize(
    ("name", "steps", "bounds"),
    [
        ("published", 5, (0.45, 1.21)),
        ("polar_express", 3, (0.13, 1.87)),
        ("polar_express", 5, (0.846, 1.124)),
        ("polar_express", 6, (0.994, 1.0012)),
        ("polar_express", 8, (1 - 1e-14, 1 + 1e-14)),
        ("cans", 3, (0.136, 1.86)),
        ("cans", 5, (0.856, 1.114)),
        ("cans", 6, (0.995, 1.001)),
        ("cans", 8, (1 - 1e-14, 1 + 1e-14)),
    ],
)
def test_where_values_end(name: str, steps: int, bounds: tuple[float, float]) -> None:
    x = np.geomspace(LOWER_BOUND, 1.0, 200_001)
    for polynomial in quintics(name, steps):
        x = value(polynomial, x)
    assert bounds[0] <= x.min() and x.max() <= bounds[1]


@pytest.mark.parametrize("name", TABLES)
def test_values_a_little_above_the_interval_stay_bounded(name: str) -> None:
    """Half a per cent is what rounding to bfloat16 adds to a matrix of rank one at each step."""
    x = np.geomspace(LOWER_BOUND, 1.0, 20_001)
    for polynomial in quintics(name, 8):
        x = value(polynomial, 1.005 * x)
        assert x.max() < 2.05
    assert abs(x - 1).max() < 0.01


def test_numbers_of_steps() -> None:
    assert quintics("published", 7) == ((3.4445, -4.7750, 2.0315),) * 7
    assert quintics("published", 200)[-1] == (3.4445, -4.7750, 2.0315)
    assert len(quintics("cans", 3)) == 3 and quintics("cans", 8)[:3] == quintics("cans", 3)
    for steps in (2, 9):
        with pytest.raises(ValueError, match=f"'cans' has polynomials for 3 to 8 steps, got {steps}"):
            quintics("cans", steps)
    with pytest.raises(ValueError, match="must be one of published, polar_express, cans, got 'quintic'"):
        quintics("quintic", 5)
