"""SONew: sparsified online Newton, diagonal, tridiagonal or banded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.kernels import foreach
from rankwise.optimizers.base import ShardedOptimizer
from rankwise.optimizers.element_states import StateTypes
from rankwise.optimizers.entries import Entry
from rankwise.optimizers.first_order import adamw_step
from rankwise.optimizers.options import Options, SONewOptions, patterns
from rankwise.optimizers.routing import ParameterInfo, RoutingPolicy, Rule
from rankwise.optimizers.unit import Bucket, StepUnit, spans
from rankwise.optimizers.work import StepWork
from rankwise.sharding import Fragment, Halo, HaloExchange
from rankwise.updates import sonew as updates
from rankwise.updates.adamw import bias_corrections

__all__ = ["SONew"]


class SONew(ShardedOptimizer):
    r"""Sparsified online Newton (arXiv 2311.10085).

    Keeps the covariance of neighbouring gradient entries on a band and steps along ``X m``, ``X`` the positive
    definite matrix of largest determinant whose inverse agrees with the band. The step takes its length, per parameter,
    from a graft direction. Vectors take AdamW with the same lr and betas.

    Args:
        params: Parameters, ``(name, parameter)`` pairs or param groups.
        lr: Learning rate.
        band: Neighbours on each side: 0 diagonal, 1 tridiagonal, 4 as in the paper's banded runs.
        betas: Decay rates of the momentum and of the statistics.
        eps: Absolute damping of the bias-corrected diagonal.
        weight_decay: Decoupled decay, times lr.
        graft: Whose norm the step takes: "adam", "adam_official" (second moment not bias-corrected, as the published
            torch code), "rmsprop", "sgd", "momentum" or "none".
        graft_eps: Added to the roots of the graft direction.
        gamma: Edges whose relative conditional variance is not above this are dropped.
        chain: "row": chains end with the rows of a matrix, which makes row cuts free of communication; "tensor": one
            chain per parameter in row-major order, as in the paper. Either is exact under any cut.
        exclude: Name patterns sent to the fallback.
        skip_nonfinite: Leave every weight and state as it was where a gradient of the step is infinite or NaN on any
            rank, and count it in :attr:`health`. Costs a copy of weights and states while a step runs.

    Raises:
        OptionError: A value is outside its range, or no parameter takes the SONew rule.
    """

    options_type: ClassVar[type[Options]] = SONewOptions
    options: SONewOptions
    health_means = ("graft_ratio",)
    group_options = ("lr", "betas", "eps", "weight_decay", "graft_eps", "gamma")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        band: int = 1,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        graft: str = "adam",
        graft_eps: float = 1e-8,
        gamma: float = 1e-2,
        chain: str = "row",
        exclude: Sequence[str] = (),
        skip_nonfinite: bool = False,
    ) -> None:
        options = SONewOptions(
            lr=lr,
            band=band,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            graft=graft,
            graft_eps=graft_eps,
            gamma=gamma,
            chain=chain,
            exclude=patterns(exclude),
            skip_nonfinite=skip_nonfinite,
        )
        super().__init__(params, options)

    @property
    def policy(self) -> RoutingPolicy:
        """Every matrix, embeddings included, as published."""
        return RoutingPolicy(embeddings=True, exclude=self.options.exclude)

    @property
    def _covariance_names(self) -> list[str]:
        return [f"covariance_{distance}" for distance in range(1, self.options.band + 1)]

    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """Momentum, diagonal, one tensor per band distance, and the second moment of the RMSprop graft."""
        names = ["exp_avg", "exp_avg_sq"]
        if rule == "matrix":
            names += self._covariance_names
            names += ["graft_sq"] if self.options.graft == "rmsprop" else []
        return dict.fromkeys(names)

    def _plan(self, unit: StepUnit) -> None:
        keys = unit.keys("matrix") if self.options.band else []
        by_row = self.options.chain == "row"
        unit.halo = HaloExchange(unit.layout, self.options.band, keys, unit.device, unit.dtype, by_row)

    def work(self, unit: StepUnit) -> StepWork:
        """See the base class: the norms of step and graft; "rmsprop" needs those of the gradients before."""
        sums = {"none": (), "rmsprop": (1, 2)}.get(self.options.graft, (2,))
        return StepWork(sums=sums, halo_fields=3 + self.options.band, element_flops=30.0 + 12.0 * self.options.band**2)

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        matrices = [bucket for bucket in buckets if bucket.rule == "matrix"]
        halos = self._halos(unit, matrices)
        grad_norms = self._grad_norms(unit, matrices) if self.options.graft == "rmsprop" else None
        directions: list[Tensor] = []
        grafts: list[Tensor | None] = []
        entries: list[Entry] = []
        for bucket, span in spans(matrices):
            norms = None if grad_norms is None else grad_norms[span]
            bucket_directions, bucket_grafts = self._directions(bucket, halos, norms)
            directions += bucket_directions
            grafts += bucket_grafts
            entries += bucket.entries
        ratios = self._graft_ratios(unit, entries, directions, grafts)
        self.health.add("matrices_updated", len(entries))
        for bucket, span in spans(matrices):
            if ratios is not None:
                foreach.scale_by_(directions[span], ratios[span])
            lr, decay = bucket.group["lr"], bucket.group["weight_decay"]
            foreach.decoupled_step_(bucket.weights, directions[span], lr, decay)
        for bucket in buckets:
            if bucket.rule == "fallback":
                adamw_step(bucket)

    def _halos(self, unit: StepUnit, buckets: list[Bucket]) -> dict[int, list[Halo]]:
        """For each cut fragment, the neighbours of gradient, momentum, diagonal and covariances."""
        halo = unit.halo
        assert halo is not None
        if halo.empty:
            return {}
        count = 3 + self.options.band
        empty = torch.empty(0, dtype=unit.dtype, device=unit.device)
        fields: list[list[Tensor]] = [[empty] * len(unit.entries) for _ in range(count)]
        for bucket in buckets:
            names = ("exp_avg", "exp_avg_sq", *self._covariance_names)
            columns = [bucket.grads, *(bucket.state(name) for name in names)]
            for field, column in zip(fields, columns, strict=True):
                for entry, value in zip(bucket.entries, column, strict=True):
                    field[entry.index] = value
        found = halo(fields)
        return {
            entry.index: [found[field][entry.index] for field in range(count)]
            for bucket in buckets
            for entry in bucket.entries
            if not entry.fragment.is_whole
        }

    def _grad_norms(self, unit: StepUnit, buckets: list[Bucket]) -> Tensor:
        grads = [grad for bucket in buckets for grad in bucket.grads]
        entries = [entry for bucket in buckets for entry in bucket.entries]
        return unit.sum_over_ranks(entries, foreach.squared_norms(grads))[0].sqrt().to(unit.dtype)

    def _directions(
        self, bucket: Bucket, halos: Mapping[int, list[Halo]], grad_norms: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Advance the statistics of a bucket; return the directions and the graft directions of its fragments."""
        group = bucket.group
        correction1, correction2 = bias_corrections(group["betas"], bucket.step)
        names = ("exp_avg", "exp_avg_sq", *self._covariance_names)
        states = list(zip(*(bucket.state(name) for name in names), strict=True))
        rms = bucket.state("graft_sq") if self.options.graft == "rmsprop" else [None] * len(bucket.entries)
        directions: list[Tensor] = []
        grafts: list[Tensor | None] = []
        for index, (entry, grad) in enumerate(zip(bucket.entries, bucket.grads, strict=True)):
            window = _Window(entry.fragment, self.options.chain, self.options.band)
            fields = window.embed((grad, *states[index]), halos.get(entry.index))
            momentum, diagonal, covariances = updates.statistics(
                fields[0], fields[1], fields[2], fields[3:], group["betas"]
            )
            # Bias corrections folded into the damping and the result: no pass over memory for them.
            direction = updates.direction(
                momentum, diagonal, covariances, eps=group["eps"] * correction2, tolerance=group["gamma"]
            )
            directions.append(window.extract(direction) * (correction2 / correction1))
            for stored, new in zip(states[index], (momentum, diagonal, *covariances), strict=True):
                stored.copy_(window.extract(new))
            graft, new_rms = updates.graft_direction(
                self.options.graft,
                grad,
                states[index][0] / correction1,
                states[index][1],
                states[index][1] / correction2,
                eps=group["graft_eps"],
                rms=rms[index],
                grad_norm=None if grad_norms is None else grad_norms[index],
                beta2=group["betas"][1],
            )
            stored_rms = rms[index]
            if stored_rms is not None and new_rms is not None:
                stored_rms.copy_(new_rms)
            grafts.append(graft)
        return directions, grafts

    def _graft_ratios(
        self, unit: StepUnit, entries: list[Entry], directions: list[Tensor], grafts: list[Tensor | None]
    ) -> Tensor | None:
        """Per fragment, the factor that gives its whole parameter's step the norm of the graft: one collective."""
        if self.options.graft == "none":
            return None
        present = [graft for graft in grafts if graft is not None]
        squares = unit.sum_over_ranks(entries, foreach.squared_norms(present), foreach.squared_norms(directions))
        ratios = updates.graft_ratio(squares[0], squares[1]).to(unit.dtype)
        self.health.add("graft_ratio", ratios.sum(), len(entries))
        return ratios


class _Window:
    """Where a fragment sits in a block of whole chains: padded to full rows, or with a halo on either side.

    In a block of columns every row is a window of its own chain, with a halo at both ends.
    """

    def __init__(self, fragment: Fragment, chain: str, width: int) -> None:
        self._numel = fragment.numel
        self._width = width
        by_row = fragment.columns is not None or (chain == "row" and len(fragment.shape) > 1)
        self._margin = width if fragment.columns is not None else 0
        if by_row:
            length = fragment.row_length
            first = fragment.start // length
            rows = -(-fragment.end // length) - first
            self._shape: tuple[int, ...] = (rows, length)
            self._start = fragment.start - first * length
            self._size = rows * length
        else:
            margin = 0 if fragment.is_whole else width
            self._start = margin
            self._size = self._numel + 2 * margin
            self._shape = (self._size,)

    def embed(self, fields: Sequence[Tensor], halos: Sequence[Halo] | None) -> list[Tensor]:
        """The fields as blocks of chains; neighbours outside the block belong to other chains and stay out."""
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
        """The fragment's own elements, 1-D."""
        if self._margin:
            block = block[:, self._margin : -self._margin]
        return block.reshape(-1)[self._start : self._start + self._numel]
