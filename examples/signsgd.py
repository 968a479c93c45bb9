"""Signum: steps along the sign of a momentum (signSGD with momentum; Bernstein et al., arXiv 1802.04434, Algorithm 2).

An element-wise rule in one file: see docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rankwise.extension import (
    ElementOptimizer,
    ElementSpec,
    Options,
    checks,
    option,
    options_as_keywords,
    register,
    shared,
)


@dataclass(frozen=True)
class SignSGDOptions(Options):
    """Options of :class:`SignSGD`."""

    owner: ClassVar[str] = "SignSGD"
    lr: float | Tensor = shared.lr(1e-3)
    momentum: float = option(0.9, checks.Fraction(), "Decay rate of the momentum; 0: signSGD.", per_group=True)
    weight_decay: float = shared.weight_decay("Decoupled decay, times lr.")
    state_dtype: str | Mapping[str, str] | None = shared.state_dtype("momentum_buffer")
    state_rounding: str = shared.state_rounding()
    lr_scale: Mapping[str, float] | None = shared.lr_scale()
    transition_steps: int = shared.transition_steps()
    skip_nonfinite: bool = shared.skip_nonfinite()


class SignSGDSpec(ElementSpec):
    """The momentum is all that is kept."""

    states = ("momentum_buffer",)


def signum(g: Tensor, m: Tensor, momentum: float) -> Tensor:
    """``m`` becomes ``momentum m + (1 - momentum) g``; the step goes along its sign."""
    return m.mul_(momentum).add_(g, alpha=1.0 - momentum).sign()


class SignSGD(ElementOptimizer):
    """signSGD with momentum: every element moves by lr, whatever the size of its gradient."""

    spec_class = SignSGDSpec

    @options_as_keywords(SignSGDOptions)
    def __init__(self, params: Any, options: SignSGDOptions) -> None:
        super().__init__(params, options)

    def update(self, gradient: Tensor, states: dict[str, Tensor], step: int, group: Mapping[str, Any]) -> Tensor:
        """See :func:`signum`."""
        return signum(gradient, states["momentum_buffer"], group["momentum"])


register("SignSGD", SignSGD, ready={"lr": 1e-3, "weight_decay": 0.1})
