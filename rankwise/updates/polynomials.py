r"""Newton-Schulz iterations take odd quintics by name: one that is repeated, or one for each step.

With a polynomial for each step, each is the best one for the interval that the steps before it leave: among all odd
quintics, its largest distance from 1 on that interval is least. It takes :math:`[l, u]` to :math:`[1 - e, 1 + e]`, the
interval of the next one, and the composition of such polynomials is the best composition.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

__all__ = ["COEFFICIENT_SETS", "LOWER_BOUND", "SAFETY", "CoefficientSet", "Quintic", "quintics"]

Quintic = tuple[float, float, float]
"""``(a, b, c)`` of ``a x + b x^3 + c x^5``."""

LOWER_BOUND = 1e-3
"""The polynomials of steps are made for singular values from this share of the Frobenius norm on."""
SAFETY = 1.01
"""By this factor rounding may lift a value above its interval before a polynomial sends it away from 1."""


class CoefficientSet(NamedTuple):
    """Quintics that go by one name.

    Attributes:
        table: Polynomial of each step; a single one serves all steps.
        fewest: Least number of steps; fewer leave values of 0.03 and less, or of 1.97.
    """

    table: tuple[Quintic, ...]
    fewest: int = 1

    @property
    def most(self) -> int | None:
        """Most steps: the length of a table, whose last polynomial leads to 1; further steps would lift rounding."""
        return len(self.table) if len(self.table) > 1 else None


def _safe(*best: Quintic) -> tuple[Quintic, ...]:
    """Return polynomials that bear values a little above their interval, and last their limit for values about 1."""
    shrunk = ((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in best)
    return (*shrunk, (1.875, -1.25, 0.375))


_POLAR_EXPRESS = _safe(
    (8.287212018145626, -23.59588651909882, 17.300387312530916),
    (4.107059111542198, -2.947849916737908, 0.5448431082926598),
    (3.948690853482296, -2.908902115962949, 0.5518191394370134),
    (3.318419657370597, -2.488488024314872, 0.5100489401237197),
    (2.30065201995482, -1.6689039845747526, 0.41880731195256793),
    (1.891301407787398, -1.2679958271945875, 0.3768040894852488),
    (1.875001480825946, -1.250001645344968, 0.3750001645199462),
)
_CANS = _safe(
    (8.47032880384807, -25.108074706661874, 18.629275599118014),
    (4.182834183293938, -3.1087011098892385, 0.5806066813500486),
    (3.9618572789615993, -2.9540637463593793, 0.5629761179538966),
    (3.2865862170279607, -2.464720134531282, 0.5073576938614548),
    (2.2737499944340396, -1.6446603679080694, 0.4161909274978861),
    (1.8887161973518287, -1.2651572253386005, 0.37651892555749045),
    (1.8750008858000282, -1.2500009841729303, 0.3750000983732329),
)

COEFFICIENT_SETS = MappingProxyType(
    {
        "published": CoefficientSet(((3.4445, -4.7750, 2.0315),)),
        "polar_express": CoefficientSet(_POLAR_EXPRESS, fewest=3),
        "cans": CoefficientSet(_CANS, fewest=3),
    }
)
"""Sets of polynomials by name.

``"published"`` has the polynomial of Muon, MARS-Shampoo and MARS-M, which was chosen for its slope at zero and not for
convergence to 1.

``"polar_express"`` has those of Polar Express (Amsel et al., arXiv 2505.16932, Algorithm 1) for :data:`LOWER_BOUND`:
each is the best one for its interval without what lies below 0.024 of the upper end, and is centred about 1 again.

``"cans"`` has those of Chebyshev-accelerated Newton-Schulz (Grishina et al., arXiv 2506.10935), by Remez' algorithm for
:data:`LOWER_BOUND`, each for its whole interval.

The last two have :data:`SAFETY` in all but the last polynomial, as in Polar Express's code; without it "cans" leaves
the intervals, and then every bound, in bfloat16.
"""


def quintics(name: str, steps: int) -> tuple[Quintic, ...]:
    """Return the polynomial of every step.

    Args:
        name: One of :data:`COEFFICIENT_SETS`.
        steps: Number of steps.

    Raises:
        ValueError: There is no such set, or it is not made for so many steps.
    """
    polynomials = COEFFICIENT_SETS.get(name)
    if polynomials is None:
        raise ValueError(f"coefficients must be one of {', '.join(COEFFICIENT_SETS)}, got {name!r}")
    if polynomials.most is None:
        return polynomials.table * steps
    if not polynomials.fewest <= steps <= polynomials.most:
        raise ValueError(f"{name!r} has polynomials for {polynomials.fewest} to {polynomials.most} steps, got {steps}")
    return polynomials.table[:steps]
