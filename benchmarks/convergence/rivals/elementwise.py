"""LAMB and Lion."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rankwise.updates.lamb import lamb_direction, trust_ratio

__all__ = ["LAMB", "Lion"]


class LAMB(torch.optim.Optimizer):
    """You et al., arXiv 1904.00962, with bias correction: what MKOR's backend of that name does to any gradient.

    Args:
        params: Parameters.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Inside the trust ratio.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """See torch."""
        for group in self.param_groups:
            group["steps"] += 1
            corrections = tuple(1.0 - beta ** group["steps"] for beta in group["betas"])
            for param in group["params"]:
                state = self.state[param] or dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.zeros_like(param))
                *moments, direction = lamb_direction(
                    param.grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    param,
                    group["betas"],
                    group["eps"],
                    group["weight_decay"],
                    corrections,
                )
                self.state[param] = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
                param.sub_(group["lr"] * trust_ratio(param.norm(), direction.norm()) * direction)


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv 2302.06675: the sign of an interpolated momentum.

    Args:
        params: Parameters.
        lr: Learning rate.
        betas: Betas of the interpolation and of the momentum.
        weight_decay: Decoupled.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """See torch."""
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                momentum: Tensor = self.state[param].setdefault("momentum", torch.zeros_like(param))
                param.mul_(1.0 - group["lr"] * group["weight_decay"])
                param.sub_(torch.lerp(param.grad, momentum, first).sign_(), alpha=group["lr"])
                momentum.lerp_(param.grad, 1.0 - second)
