"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner, for matrices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SOAP"]


class SOAP(torch.optim.Optimizer):
    """Vyas et al., arXiv 2409.11321, algorithms 3 and 4; both sides, the first gradient only begins the statistics.

    Args:
        params: Matrices.
        lr: Learning rate.
        betas: Decay rates of the moments; the second one is also that of the statistics of both sides.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled.
        interval: Steps between two renewals of the bases.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        interval: int = 10,
    ) -> None:
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "interval": interval}
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """See torch."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    _begin(state, param.grad, group["betas"][1])
                    continue
                direction = _direction(state, param.grad, group["betas"], group["eps"])
                param.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                _follow(state, param.grad, group["betas"][1], state["time"] % group["interval"] == 0)


def _begin(state: dict[str, Any], grad: Tensor, beta: float) -> None:
    state["left"], state["right"] = (1.0 - beta) * grad @ grad.T, (1.0 - beta) * grad.T @ grad
    for side in ("left", "right"):
        # The largest first, as the power iteration leaves them.
        state[f"{side} basis"] = torch.linalg.eigh(state[side]).eigenvectors.flip(1)
    state["exp_avg"], state["exp_avg_sq"], state["time"] = torch.zeros_like(grad), torch.zeros_like(grad), 0


def _direction(state: dict[str, Any], grad: Tensor, betas: tuple[float, float], eps: float) -> Tensor:
    left, right = state["left basis"], state["right basis"]
    state["time"] += 1
    rotated = left.T @ grad @ right
    state["exp_avg"].lerp_(grad, 1.0 - betas[0])
    state["exp_avg_sq"].lerp_(rotated.square(), 1.0 - betas[1])
    root = (state["exp_avg_sq"] / (1.0 - betas[1] ** state["time"])).sqrt().add_(eps)
    moment = left.T @ state["exp_avg"] @ right / (1.0 - betas[0] ** state["time"])
    return left @ (moment / root) @ right.T


def _follow(state: dict[str, Any], grad: Tensor, beta: float, renew: bool) -> None:
    """Takes a gradient into the statistics; renewed bases are one step of a power iteration ahead."""
    state["left"].lerp_(grad @ grad.T, 1.0 - beta)
    state["right"].lerp_(grad.T @ grad, 1.0 - beta)
    if renew:
        for side in ("left", "right"):
            state[f"{side} basis"] = torch.linalg.qr(state[side] @ state[f"{side} basis"]).Q
