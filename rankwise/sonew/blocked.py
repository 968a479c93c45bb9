"""SONew for CPUs, block after block: statistics in place, then the direction a few elements behind them.

A run is a contiguous piece of a parameter in row-major order. It is worked on as it lies, whatever its chains: an edge
that would leave its chain has the statistic zero, and a zero edge joins nothing. Where a run is cut inside a chain, its
margins hold the neighbours' gradients and statistics of before the step. The results are those of
:mod:`rankwise.sonew.formulas` to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankwise.kernels.blocked import block_size, squared_norm
from rankwise.sonew.banded import apply_factors, banded_factors
from rankwise.updates.adamw import bias_corrections

__all__ = ["Margins", "Run", "sonew_directions"]

# Below it damping may leave a zero to be divided by, which products with ones and zeros do not get rid of.
_TINY = 1e-30
_OFFICIAL_GRAFT_EPS = 1e-8


class Run(NamedTuple):
    """Where a run lies in its parameter.

    Attributes:
        start: Flat index of its first element.
        chain: Elements of a chain, which starts at every multiple of it; None: the parameter is one chain.
    """

    start: int
    chain: int | None


class Margins(NamedTuple):
    """Neighbours of a run, each (3 + band, band): gradient, momentum, diagonal, edges by distance; zero past an end."""

    left: Tensor
    right: Tensor


class _Rates(NamedTuple):
    beta1: float
    beta2: float
    correction1: float
    correction2: float
    eps: float
    gamma: float
    graft: str
    graft_eps: float


def sonew_directions(
    runs: Sequence[Run],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    covariances: Sequence[list[Tensor]],
    margins: Sequence[Margins | None],
    *,
    betas: tuple[float, float],
    eps: float,
    gamma: float,
    step: int,
    graft: str,
    graft_eps: float,
    out: list[Tensor],
) -> Tensor:
    """Advance the statistics of runs and write their directions; norms for the graft in the same pass.

    Args:
        runs: Where each lies.
        grads: Gradients, read only.
        exp_avgs: Momenta, updated in place.
        exp_avg_sqs: Diagonals, updated in place.
        covariances: For each distance of the band, the edges of every run; updated in place.
        margins: Neighbours where a run is cut inside a chain, else None.
        betas: Decay rates of momentum and statistics.
        eps: Absolute damping of the bias-corrected diagonal.
        gamma: Relative edge tolerance.
        step: Number of this step, from 1.
        graft: "adam", "adam_official", "sgd", "momentum" or "none".
        graft_eps: Added to the root of the "adam" graft.
        out: Receives the directions; may not overlap the gradients.

    Returns:
        Squared norms of directions and graft directions, (2, runs) in fp64.
    """
    rates = _Rates(*betas, *bias_corrections(betas, step), eps, gamma, graft, graft_eps)
    squares = torch.zeros(2, len(runs), dtype=torch.float64)
    for index, run in enumerate(runs):
        if grads[index].numel():
            fields = [grads[index], exp_avgs[index], exp_avg_sqs[index], *(edges[index] for edges in covariances)]
            squares[:, index] = _RunInBlocks(run, fields, margins[index], rates, out[index]).run()
    return squares


class _RunInBlocks:
    """One run's way through memory."""

    def __init__(self, run: Run, fields: list[Tensor], margins: Margins | None, rates: _Rates, out: Tensor) -> None:
        self._run, self._rates, self._out = run, rates, out
        self._grad, *self._statistics = fields
        self._numel = self._grad.numel()
        self._band = len(self._statistics) - 2
        zeros = self._grad.new_zeros(len(fields), self._band)
        left, right = margins or (zeros, zeros)
        self._following = right[0]
        # The margins' own statistics of after the step; what lies beyond the right one matters to nothing here.
        near = torch.cat([self._grad[: self._band], right[0]])[: self._band]
        self._left = self._advanced(left, near, run.start - self._band)
        self._right = self._advanced(right, torch.zeros_like(right[0]), run.start + self._numel)

    def _advanced(self, margin: Tensor, following: Tensor, position: int) -> list[Tensor]:
        statistics = [field.clone() for field in margin[1:]]
        self._advance(torch.cat([margin[0], following]), statistics, position)
        return statistics

    def _advance(self, grads: Tensor, statistics: list[Tensor], position: int) -> None:
        """Move averages on in place; ``grads`` has ``band`` elements more, ``position`` is that of the first."""
        # Here and below only products and sums, one at a time: fused forms round differently in the vector body and
        # the tail of a loop, and then the bits would depend on where a chain was cut.
        momentum, diagonal, *edges = statistics
        count = momentum.numel()
        own = grads[:count]
        beta1, beta2 = self._rates.beta1, self._rates.beta2
        momentum.mul_(beta1).add_(own * (1.0 - beta1))
        diagonal.mul_(beta2).add_((own * own).mul_(1.0 - beta2))
        for distance, edge in enumerate(edges, start=1):
            edge.mul_(beta2).add_((own * grads[distance : distance + count]).mul_(1.0 - beta2))
            self._cut(edge, distance, position)

    def _cut(self, edge: Tensor, distance: int, position: int) -> None:
        """Zero the edges that would join two chains."""
        chain = self._run.chain
        if chain is None:
            return
        if distance >= chain:
            edge.zero_()
            return
        for last in range(chain - distance, chain):
            edge[(last - position) % chain :: chain].zero_()

    def run(self) -> Tensor:
        """Squared norms of direction and graft, (2,)."""
        step = block_size()
        sums = torch.zeros(2, dtype=torch.float64)
        behind = 0
        for start in range(0, self._numel, step):
            end = min(start + step, self._numel)
            grads = self._grad[start : end + self._band]
            if missing := end + self._band - start - grads.numel():
                grads = torch.cat([grads, self._following[:missing]])
            self._advance(grads, [field[start:end] for field in self._statistics], self._run.start + start)
            # The last elements wait for the statistics of those after them.
            ready = end if end == self._numel else max(behind, end - self._band)
            sums += self._direct(behind, ready)
            behind = ready
        return sums

    def _with_margins(self, start: int, end: int) -> list[Tensor]:
        """The statistics of a stretch and of ``band`` elements on either side."""
        band, numel = self._band, self._numel
        found = []
        for field, left, right in zip(self._statistics, self._left, self._right, strict=True):
            part = field[max(0, start - band) : end + band]
            before, after = left[min(start, band) :], right[: max(0, end + band - numel)]
            found.append(torch.cat([before, part, after]) if before.numel() or after.numel() else part)
        return found

    def _direct(self, start: int, end: int) -> Tensor:
        """Write the direction of a stretch whose statistics, and whose neighbours', are those of this step."""
        rates, band = self._rates, self._band
        momentum, diagonal, *edges = self._with_margins(start, end)
        damping = rates.eps * rates.correction2
        damped = diagonal + damping
        if len(edges) == 1 and damping >= _TINY:
            direction = _tridiagonal_direction(damped, edges[0], momentum, rates.gamma)
        else:
            direction = apply_factors(*banded_factors(damped, edges, rates.gamma), momentum)
        own = self._out[start:end]
        # Bias corrections folded into the damping and this factor: no pass over memory for them.
        torch.mul(direction[band : band + end - start], rates.correction2 / rates.correction1, out=own)
        graft = self._graft(start, end)
        nothing = torch.zeros((), dtype=torch.float64)
        return torch.stack([squared_norm(own), nothing if graft is None else squared_norm(graft)])

    def _graft(self, start: int, end: int) -> Tensor | None:
        rates = self._rates
        momentum, diagonal = (field[start:end] for field in self._statistics[:2])
        if rates.graft == "adam":
            root = torch.div(diagonal, rates.correction2).sqrt_().add_(rates.graft_eps)
        elif rates.graft == "adam_official":
            root = torch.sqrt(diagonal).add_(_OFFICIAL_GRAFT_EPS)
        elif rates.graft == "momentum":
            return momentum / rates.correction1
        else:
            return self._grad[start:end] if rates.graft == "sgd" else None
        return torch.div(momentum / rates.correction1, root, out=root)


def _tridiagonal_direction(damped: Tensor, edges: Tensor, momentum: Tensor, gamma: float) -> Tensor:
    """``X m`` of the pure functions for one edge, damped; without comparisons' slow boolean tensors."""
    this, after, edge = damped[:-1], damped[1:], edges[:-1]
    coefficient = edge / after
    schur = damped.clone()
    schur[:-1].sub_(coefficient * edge)
    # NaN compares as degenerate.
    kept = torch.mul(this, gamma)
    torch.gt(schur[:-1], kept, out=kept)
    coefficient.mul_(kept)
    torch.sub(this, coefficient * edge, out=schur[:-1])
    whitened = momentum.clone()
    whitened[:-1].sub_(coefficient * momentum[1:])
    whitened.div_(schur)
    direction = whitened.clone()
    direction[1:].sub_(coefficient * whitened[:-1])
    return direction
