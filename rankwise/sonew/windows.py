"""SONew's directions are computed here in blocks of whole chains, on every device, for every type, graft and cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rankwise.comm.halo import Halo
from rankwise.layout.layout import Shard
from rankwise.sonew.formulas import graft_direction
from rankwise.sonew.rule import direction, statistics
from rankwise.updates.adamw import Step, bias_corrections

__all__ = ["windowed_directions"]


def windowed_directions(
    shards: Sequence[Shard],
    fields: Sequence[list[Tensor]],
    halos: Sequence[Sequence[Halo] | None],
    *,
    chain: str,
    rms: list[Tensor] | None,
    grad_norms: Tensor | None,
    betas: tuple[float, float],
    eps: float,
    gamma: float,
    step: Step,
    graft: str,
    graft_eps: float,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Advance the statistics of shards in place, and return their directions.

    Args:
        shards: Places of the runs in their parameters.
        fields: Lists of gradients, momenta, diagonals and the edges of each distance, with a tensor per shard.
        halos: Neighbours of each shard in every field; None for a whole parameter.
        chain: "row" or "tensor".
        rms: Second moments of the "rmsprop" graft, changed in place.
        grad_norms: (shards,), norms of the whole parameters' gradients, for "rmsprop".
        betas: Decay rates of momentum and statistics.
        eps: Absolute damping of the bias-corrected diagonal.
        gamma: Relative edge tolerance.
        step: Number of this step, from 1; or (shards,), a number for each.
        graft: One of :data:`rankwise.sonew.formulas.GRAFTS`.
        graft_eps: Number added to the roots of the graft.

    Returns:
        Directions, and graft directions unless ``graft`` is "none".
    """
    corrections = bias_corrections(betas, step)
    directions: list[Tensor] = []
    grafts: list[Tensor] = []
    for index, shard in enumerate(shards):
        correction1, correction2 = (of[index] if isinstance(of, Tensor) else of for of in corrections)
        grad, *states = (field[index] for field in fields)
        window = _Window(shard, chain, len(states) - 2)
        embedded = window.embed((grad, *states), halos[index])
        momentum, diagonal, covariances = statistics(embedded[0], embedded[1], embedded[2], embedded[3:], betas)
        # Bias corrections go into the damping and the result, and take no pass over memory of their own.
        update = direction(momentum, diagonal, covariances, eps * correction2, gamma)
        directions.append(window.extract(update) * (correction2 / correction1))
        for stored, new in zip(states, (momentum, diagonal, *covariances), strict=True):
            stored.copy_(window.extract(new))
        taken, new_rms = graft_direction(
            graft,
            grad,
            states[0] / correction1,
            states[1],
            states[1] / correction2,
            eps=graft_eps,
            rms=None if rms is None else rms[index],
            grad_norm=None if grad_norms is None else grad_norms[index],
            beta2=betas[1],
        )
        if rms is not None and new_rms is not None:
            rms[index].copy_(new_rms)
        if taken is not None:
            grafts.append(taken)
    return directions, None if graft == "none" else grafts


class _Window:
    """The place of a shard in a block of whole chains, which is padded to full rows or has a halo on either side.

    In a block of columns every row is a window of its own chain, with a halo at both ends.
    """

    def __init__(self, shard: Shard, chain: str, width: int) -> None:
        self._numel = shard.numel
        self._width = width
        by_row = shard.columns is not None or (chain == "row" and len(shard.shape) > 1)
        self._margin = width if shard.columns is not None else 0
        if by_row:
            length = shard.row_length
            first = shard.start // length
            rows = -(-shard.end // length) - first
            self._shape: tuple[int, ...] = (rows, length)
            self._start = shard.start - first * length
            self._size = rows * length
        else:
            margin = 0 if shard.is_whole else width
            self._start = margin
            self._size = self._numel + 2 * margin
            self._shape = (self._size,)

    def embed(self, fields: Sequence[Tensor], halos: Sequence[Halo] | None) -> list[Tensor]:
        """Return the fields as blocks of chains, with the neighbours that the block has room for."""
        if self._size == self._numel and not self._margin:
            return [field.view(self._shape) for field in fields]
        return [self._block(field, None if halos is None else halos[index]) for index, field in enumerate(fields)]

    def _block(self, field: Tensor, halo: Halo | None) -> Tensor:
        block = field.new_zeros(self._size)
        end = self._start + self._numel
        block[self._start : end] = field
        if halo is not None:
            left, right = min(self._width, self._start), min(self._width, self._size - end)
            block[self._start - left : self._start] = halo.left[self._width - left :]
            block[end : end + right] = halo.right[:right]
        block = block.view(self._shape)
        if not self._margin:
            return block
        strips = field.new_zeros(self._shape[0], 2, self._width) if halo is None or halo.rows is None else halo.rows
        return torch.cat([strips[:, 0], block, strips[:, 1]], dim=1)

    def extract(self, block: Tensor) -> Tensor:
        """Return the elements of the shard, 1-D."""
        if self._margin:
            block = block[:, self._margin : -self._margin]
        return block.reshape(-1)[self._start : self._start + self._numel]
