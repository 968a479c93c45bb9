"""GaLore and APOLLO: AdamW's moments in a subspace, for matrices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["APOLLO", "GaLore", "equal_rank"]


def equal_rank(shape: tuple[int, int], rank: int, buffer_bytes: float) -> int:
    """The rank at which a basis and two moments in fp32 take the bytes that they and an error buffer take at another.

    Args:
        shape: Shape of the matrix.
        rank: With the buffer.
        buffer_bytes: Buffer bytes of the buffer, per element of the matrix.
    """
    short, long = sorted(shape)
    own = min(rank, short)
    return min(short, own + round(buffer_bytes / 4.0 * short * long / (short + 2 * long)))


class _LowRank(torch.optim.Optimizer):
    """Shared by both: moments of a projected gradient, in the orientation whose short side comes first.

    Args:
        params: Matrices.
        lr: Learning rate.
        rank: Rank of the projection.
        buffer_bytes: More rank, for as many bytes as an error buffer of so many per element, see :func:`equal_rank`.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled.
        interval: Steps between two projections.
        scale: Factor on the update.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        rank: int = 16,
        buffer_bytes: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        interval: int = 200,
        scale: float = 1.0,
    ) -> None:
        options = {"rank": rank, "buffer_bytes": buffer_bytes, "betas": betas, "eps": eps, "interval": interval}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "scale": scale, "steps": 0, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """See torch."""
        for group in self.param_groups:
            for param in group["params"]:
                tall = param.shape[0] > param.shape[1]
                grad = param.grad.T if tall else param.grad
                rank = equal_rank(tuple(param.shape), group["rank"], group["buffer_bytes"])
                state = self.state[param]
                if group["steps"] % group["interval"] == 0:
                    self.project(state, grad, rank)
                low = state["basis"] @ grad
                update = self.update(state, grad, low, _adam(state, low, group))
                param.mul_(1.0 - group["lr"] * group["weight_decay"])
                param.sub_(update.T if tall else update, alpha=group["lr"] * group["scale"])
            group["steps"] += 1

    def project(self, state: dict[str, Any], grad: Tensor, rank: int) -> None:
        """Chooses ``basis``, (rank, short side)."""
        raise NotImplementedError

    def update(self, state: dict[str, Any], grad: Tensor, low: Tensor, adam: Tensor) -> Tensor:
        """The step of the matrix, from the projected gradient and Adam's direction there."""
        raise NotImplementedError


def _adam(state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
    first, second = group["betas"]
    exp_avg = state.setdefault("exp_avg", torch.zeros_like(grad)).lerp_(grad, 1.0 - first)
    exp_avg_sq = state.setdefault("exp_avg_sq", torch.zeros_like(grad))
    exp_avg_sq.mul_(second).addcmul_(grad, grad, value=1.0 - second)
    time = group["steps"] + 1
    root = (exp_avg_sq / (1.0 - second**time)).sqrt_().add_(group["eps"])
    return exp_avg / (1.0 - first**time) / root


class GaLore(_LowRank):
    """Zhao et al., arXiv 2403.03507: the gradient's leading singular vectors, renewed now and then; moments stay."""

    def project(self, state: dict[str, Any], grad: Tensor, rank: int) -> None:
        """See the base class."""
        state["basis"] = torch.linalg.svd(grad, full_matrices=False).U[:, :rank].T.contiguous()

    def update(self, state: dict[str, Any], grad: Tensor, low: Tensor, adam: Tensor) -> Tensor:
        """See the base class."""
        return state["basis"].T @ adam


class APOLLO(_LowRank):
    """Zhu et al., arXiv 2412.05270: a random projection tells how Adam would scale each channel of the gradient."""

    _GROWTH = 1.01

    def project(self, state: dict[str, Any], grad: Tensor, rank: int) -> None:
        """See the base class. The projection can be drawn again from its seed: it counts for no bytes."""
        generator = torch.Generator().manual_seed(state.setdefault("seed", 0))
        state["seed"] += 1
        state["basis"] = torch.randn(rank, len(grad), generator=generator) / rank**0.5

    def update(self, state: dict[str, Any], grad: Tensor, low: Tensor, adam: Tensor) -> Tensor:
        """See the base class; the norm grows by one in a hundred at most from step to step, as published."""
        found = grad * (adam.norm(dim=0) / low.norm(dim=0).clamp(min=1e-30))
        norm = float(found.norm())
        limit = self._GROWTH * state.get("norm", norm)
        state["norm"] = min(norm, limit)
        return found * (state["norm"] / max(norm, 1e-30))
