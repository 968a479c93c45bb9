"""This module declares the options of SONew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rankwise.options import shared
from rankwise.options.checks import Choice, Fraction, Integer, Number
from rankwise.options.fields import Options, option

__all__ = ["SONewOptions"]

_WIDEST_BAND = 32


@dataclass(frozen=True)
class SONewOptions(Options):
    """Options of :class:`rankwise.SONew`."""

    owner: ClassVar[str] = "SONew"
    lr: float | Tensor = shared.lr(1e-3)
    band: int = option(
        1,
        Integer(0, _WIDEST_BAND, "as every neighbour costs one more tensor, and the solve their cube"),
        "Neighbours on each side: 0 diagonal, 1 tridiagonal, 4 as in the paper's banded runs.",
    )
    betas: tuple[float, float] = shared.betas((0.9, 0.99), "Decay rates of the momentum and of the statistics.")
    eps: float = shared.eps("Absolute damping of the bias-corrected diagonal.")
    weight_decay: float = shared.weight_decay("Decoupled decay, times lr.")
    weight_decay_method: str = shared.weight_decay_method()
    lr_scale: Mapping[str, float] | None = shared.lr_scale()
    graft: str = option(
        "adam",
        Choice("adam", "adam_official", "rmsprop", "sgd", "momentum", "none"),
        'The rule whose norm the step takes; "adam_official": Adam with a second moment that is not '
        "bias-corrected, as in the published torch code.",
    )
    graft_eps: float = option(1e-8, Number(), "Added to the roots of the graft direction.", per_group=True)
    gamma: float = option(
        1e-2,
        Fraction(),
        "Edges whose relative conditional variance is not above this are dropped.",
        per_group=True,
    )
    chain: str = option(
        "row",
        Choice("row", "tensor"),
        '"row": chains end with the rows of a matrix, which makes row cuts free of communication; "tensor": one chain '
        "per parameter in row-major order, as in the paper. Either is exact under any cut.",
    )
    state_dtype: str | Mapping[str, str] | None = shared.state_dtype("exp_avg", "exp_avg_sq", "covariance", "graft_sq")
    state_rounding: str = shared.state_rounding()
    exclude: Sequence[str] = shared.exclude()
    transition_steps: int = shared.transition_steps()
    skip_nonfinite: bool = shared.skip_nonfinite()
    store_param_remainders: bool = shared.store_param_remainders()
    capturable: bool = shared.capturable()

    def _check_together(self) -> None:
        self._refuse_capturable_skips(self.capturable)
