"""Options of MARS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rankwise.options import shared
from rankwise.options.checks import Choice, Flag, FloatType, Number, OrNone
from rankwise.options.fields import Options, option
from rankwise.updates.polynomials import COEFFICIENT_SETS

__all__ = ["MARSOptions"]

_NAMES = {
    "mars": "adamw",
    "mars-adamw": "adamw",
    "mars-lion": "lion",
    "mars-shampoo": "shampoo",
    "mars-m": "muon",
    "mars_m": "muon",
}
"""The variant for the name of the optimizer that has it."""

_SETS = {
    "simple": "published",
    "muon": "published",
    "polarexpress": "polar_express",
    "chebyshev": "cans",
}
"""What others call the polynomials."""


@dataclass(frozen=True)
class MARSOptions(Options):
    """Options of :class:`rankwise.MARS`."""

    owner: ClassVar[str] = "MARS"
    decay_options: ClassVar[tuple[str, ...]] = ("weight_decay", "weight_decay_1d")
    lr: float | Tensor = shared.lr(3e-3)
    variant: str = option(
        "adamw",
        Choice("adamw", "lion", "shampoo", "muon", words=_NAMES),
        'The rule behind the correction; "shampoo": orthogonalised momentum with the factor sqrt(max(1, rows / '
        'columns)), "muon": MARS-M, with the factor 0.2 sqrt(max(rows, columns)).',
    )
    scale: str = option(
        "published",
        Choice("published", "rms", "spectral", "unit_rms_norm", "shape_scaling"),
        'Factor of orthogonalised updates. "published": the variant\'s. "rms": 0.2 sqrt(max(rows, columns)) of each '
        "whole logical matrix, as in Moonlight (arXiv 2502.16982): a root mean square of 0.2, about AdamW's, so that "
        'its lr suits matrices and fallback alike; with "muon" that is the published one. By the '
        'usual names of Muon\'s scale modes: "spectral", sqrt(max(rows, columns)); "unit_rms_norm", '
        'sqrt(rows / columns), for rates that are to suit any width; "shape_scaling", sqrt(max(1, rows / columns)).',
    )
    betas: tuple[float, float] = shared.betas((0.95, 0.99), "Decay rates; Lion, Shampoo and Muon use the first alone.")
    eps: float = shared.eps("Added to the bias-corrected root.")
    weight_decay: float = shared.weight_decay("Decoupled decay, times lr.")
    weight_decay_method: str = shared.weight_decay_method()
    lr_scale: Mapping[str, float] | None = shared.lr_scale()
    gamma: float = option(0.025, Number(), "Strength of the correction; 0 switches it off.", per_group=True)
    exact: bool = option(
        False,
        Flag(),
        "Compare with the same batch at the previous weights; see record_reference(). Plain PyTorch only.",
    )
    clip: float | None = option(
        1.0,
        OrNone(Number(above=True)),
        'Largest norm of a corrected gradient, per parameter. None does not clip: "lion", "shampoo" and "muon" then '
        "keep an average of the gradients, and no previous gradient; whether there is a clip is fixed for them by the "
        "first step.",
        per_group=True,
    )
    reference_dtype: str | None = option(
        None,
        OrNone(FloatType(narrow=False)),
        "Type of what gradients are compared with, the previous gradient: bfloat16 halves its memory and rounds it to "
        "the nearest, by 0.2 % at most. None: that of the computation.",
    )
    state_dtype: str | Mapping[str, str] | None = shared.state_dtype("exp_avg", "exp_avg_sq", "reference")
    state_rounding: str = shared.state_rounding()
    optimize_1d: bool = option(False, Flag(), "Vectors take the variance-reduced rule too, instead of AdamW.")
    lr_1d: float | None = option(
        None,
        OrNone(Number()),
        'Learning rate of the AdamW fallback. None: lr / 2, as in the published runs ("muon", and any scale but '
        '"published": lr). The ratio to lr is kept under schedules.',
    )
    betas_1d: tuple[float, float] = shared.betas((0.9, 0.95), "Decay rates of the fallback.")
    weight_decay_1d: float = option(
        0.1,
        Number(),
        'Decay of the fallback ("muon": weight_decay, as published), whatever a group\'s weight_decay is.',
        per_group=True,
    )
    ns_steps: int = shared.ns_steps()
    ns_coefficients: str = option(
        "published",
        Choice(*COEFFICIENT_SETS, words=_SETS),
        'Polynomials of the Newton-Schulz iterations. "published": Muon\'s, for any number of them, which leaves '
        'singular values between 0.7 and 1.2. "polar_express" (arXiv 2505.16932) and "cans" (Chebyshev-accelerated, '
        "arXiv 2506.10935): the best for each of 3 to 8 iterations; after 5, singular values of at least 0.001 of the "
        "norm differ from 1 by 0.15 at most, after 6 by 0.006.",
        per_group=True,
    )
    ns_dtype: str = shared.ns_dtype()
    comm_dtype: str | None = shared.comm_dtype('straddling matrices of "shampoo" and "muon"')
    exclude: Sequence[str] = shared.exclude()
    blocks: Mapping[str, Any] | None = shared.blocks()
    split_heads: bool = shared.split_heads()
    offload_compute: str = shared.offload_compute()
    transition_steps: int = shared.transition_steps()
    skip_nonfinite: bool = shared.skip_nonfinite()
    store_param_remainders: bool = shared.store_param_remainders()
    capturable: bool = shared.capturable()

    def beyond_engines(self) -> Mapping[str, str]:
        """Refuse exact mode under engines, with the reason."""
        return {"exact": "exact mode needs the next batch's gradient too"} if self.exact else {}

    @property
    def fallback_ratio(self) -> float:
        """The fallback's rate over lr where none is given."""
        return 1.0 if self.variant == "muon" or self.scale != "published" else 0.5

    def unread(self) -> Mapping[str, tuple[str, str]]:
        """Name the scale and the polynomials, which variants without a matrix rule do not read."""
        if self.variant in ("shampoo", "muon"):
            return {}
        reason = f"variant={self.variant!r} orthogonalises nothing, and its steps are those of AdamW or Lion"
        fix = 'leave it out, or choose the variant "shampoo" or "muon"'
        return {"scale": (reason, fix), "ns_coefficients": (reason, fix)}

    def _check_together(self) -> None:
        self._refuse_unread()
        known = COEFFICIENT_SETS[self.ns_coefficients]
        if known.most is not None and not known.fewest <= self.ns_steps <= known.most:
            self._fail(
                "ns_steps",
                f"it must be from {known.fewest} to {known.most} with ns_coefficients={self.ns_coefficients!r}, which "
                "has a polynomial for each",
                'write 5, or set ns_coefficients to "published"',
            )
        self._refuse_capturable_skips(self.capturable)
