"""MARS: variance-reduced AdamW, Lion, Shampoo and Muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels.forms import newton_schulz_for, orthogonal_steps_for
from rankwise.kernels.lists import decay_, subtract_scaled_
from rankwise.kernels.native.newton_schulz import Job
from rankwise.kernels.passes import STATES, Pass, Scalars
from rankwise.kernels.passes import Rule as PassRule
from rankwise.mars import formulas as updates
from rankwise.mars.declared import MARSDeclared
from rankwise.mars.options import MARSOptions
from rankwise.options.constructor import options_as_keywords
from rankwise.options.validation import OptionError
from rankwise.sharding import Batch, MatrixTask
from rankwise.sharding.sources import LayoutSource
from rankwise.step.entries import Entry
from rankwise.step.first_order import adamw_step
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.unit import Bucket, StepUnit, spans
from rankwise.step.work import StepWork

__all__ = ["MARS"]

_Signature = tuple[int, int, tuple[int, int], int]
"""Of a matrix task: rows and columns of what is orthogonalised, logical shape of the weight, its param group."""


@dataclass
class _Part:
    """A bucket's fragments of one kind with their clip coefficients."""

    bucket: Bucket
    entries: list[Entry]
    weights: list[Tensor]
    grads: list[Tensor]
    coefficients: Tensor | None
    orthogonal: bool


class MARS(ShardedOptimizer):
    r"""Variance-reduced pretraining optimizers (arXiv 2411.10438) and MARS-M (arXiv 2510.21800).

    .. math::
        c_t &= g_t + \tfrac{\gamma\beta_1}{1-\beta_1}\,(g_t - h_t), \qquad
        \tilde c_t = c_t / \max(1, \lVert c_t\rVert / \text{clip})

    takes the gradient's place in AdamW, Lion, or the orthogonalised momentum of Shampoo and Muon (Newton-Schulz).
    ``h`` is the previous gradient, or in exact mode the present batch's gradient at the previous weights. Norms are
    those of whole parameters, however the framework cuts them.

    Example:
        >>> optimizer = rankwise.MARS(model.named_parameters(), lr=6e-3, variant="muon")
        >>> model(batch).loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()

    Raises:
        OptionError: A value is outside its range, or no parameter takes the MARS rule.
    """

    options: MARSOptions
    declares = MARSDeclared
    declared: MARSDeclared
    held = (*ShardedOptimizer.held, "_recorded")
    one_by_one = True

    @options_as_keywords(MARSOptions)
    def __init__(self, params: Any, options: MARSOptions) -> None:
        super().__init__(params, options, {"lr_1d_ratio": _fallback_lr_ratio(options)})
        self._recorded = False

    def attach(self, source: LayoutSource) -> None:
        """See the base class.

        Raises:
            OptionError: Exact mode, which needs a second backward pass per step that an engine does not offer.
        """
        if self.options.exact:
            raise OptionError(
                "MARS: exact=True is invalid under a framework engine: it needs two gradients per step, and the engine "
                "hands over one; set exact to false (the published default) or train with plain PyTorch"
            )
        super().attach(source)

    @torch.no_grad()
    def record_reference(self) -> None:
        """Exact mode: copy the current ``.grad`` as the comparison gradient of the step after the next one.

        Call it with the *next* batch's gradient at today's weights, then ``zero_grad()``, compute the present batch's
        gradient and ``step()`` (arXiv 2411.10438, Algorithm 1 with one batch of look-ahead).

        Raises:
            RuntimeError: The optimizer was not built with ``exact=True``.
        """
        if not self.options.exact:
            raise RuntimeError("record_reference() belongs to exact mode; build MARS with exact=True.")
        unit = self._unit()
        for entry in unit.entries:
            tensor = unit.tensors[entry.fragment.tensor]
            if entry.route.rule != "matrix":
                continue
            if tensor.grad is not None:
                flat = tensor.grad.reshape(-1)[entry.fragment.offset : entry.fragment.offset + entry.fragment.numel]
                unit.states.views(self.state, "next_reference", [entry])[0].copy_(flat)
            elif "next_reference" in self.state.get(tensor, {}):
                # The batch does not touch it: what is there belongs to an earlier step.
                unit.states.views(self.state, "next_reference", [entry])[0].zero_()
        self._recorded = True

    def plan(self, unit: StepUnit) -> None:
        """See the base class: the matrices that are orthogonalised."""
        tasks = []
        for key in unit.keys("matrix"):
            info = unit.infos[key]
            if self.declared.is_orthogonal(info):
                rows, columns = info.matrix_shape
                short, long = min(rows, columns), max(rows, columns)
                signature = (rows, columns, info.logical_matrix_shape, unit.group_position[key])
                tasks.append(MatrixTask(key, (key,), signature, cost=float(6 * short * short * long)))
        self.planner.choose_owners(unit, tasks)

    def work(self, unit: StepUnit) -> StepWork:
        """See the base class: the norms of the corrected gradients."""
        return StepWork(sums=(1,), element_flops=24.0)

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            if bucket.rule == "fallback":
                self._fallback(unit, bucket)
        matrices = [bucket for bucket in buckets if bucket.rule == "matrix"]
        coefficients = self._clip_coefficients(unit, matrices)
        orthogonal: list[_Part] = []
        for bucket, span in spans(matrices):
            for part in self._parts(bucket, None if coefficients is None else coefficients[span]):
                self._element_wise(unit, part)
                if part.orthogonal:
                    orthogonal.append(part)
                else:
                    self.health.add("matrices_updated", len(part.entries))
        if unit.exchange is not None:
            self._orthogonalise(unit, orthogonal)

    def _fallback(self, unit: StepUnit, bucket: Bucket) -> None:
        group = bucket.group
        adamw_step(
            unit,
            bucket,
            lr=group["lr"] * group["lr_1d_ratio"],
            betas=group["betas_1d"],
            weight_decay=group["weight_decay"] if self.options.variant == "muon" else group["weight_decay_1d"],
        )

    def _clip_coefficients(self, unit: StepUnit, buckets: list[Bucket]) -> Tensor | None:
        """For every fragment, what clips the corrected gradient of its whole parameter: one collective."""
        clipping = any(bucket.group["clip"] is not None for bucket in buckets)
        # Other ranks may have something to clip where this one has nothing.
        if not clipping and not unit.sums.straddlers:
            return None
        norms = [torch.zeros(0, dtype=torch.float64, device=unit.device)]
        for bucket in buckets:
            norms.append(unit.kernels.squared_norms(bucket.grads, bucket.state("reference"), _factor(bucket)))
        entries = [entry for bucket in buckets for entry in bucket.entries]
        squares = unit.sum_over_ranks(entries, torch.cat(norms))[0]
        found = []
        for bucket, span in spans(buckets):
            clip = bucket.group["clip"]
            if clip is None:
                found.append(torch.ones(len(bucket.entries), dtype=unit.dtype, device=unit.device))
            else:
                found.append(updates.clip_coefficient(squares[span], clip).to(unit.dtype))
                self.health.add("clip_rate", (found[-1] < 1).sum(), len(bucket.entries))
        return torch.cat(found) if clipping else None

    def _parts(self, bucket: Bucket, coefficients: Tensor | None) -> list[_Part]:
        """A bucket's fragments by what becomes of their momentum."""
        parts = []
        for orthogonal in (False, True):
            chosen = [
                i for i, entry in enumerate(bucket.entries) if self.declared.is_orthogonal(entry.info) == orthogonal
            ]
            if len(chosen) == len(bucket.entries):
                return [_Part(bucket, bucket.entries, bucket.weights, bucket.grads, coefficients, orthogonal)]
            if chosen:
                own = None if coefficients is None else torch.stack([coefficients[i] for i in chosen])
                entries = [bucket.entries[i] for i in chosen]
                weights, grads = ([tensors[i] for i in chosen] for tensors in (bucket.weights, bucket.grads))
                parts.append(_Part(bucket, entries, weights, grads, own, orthogonal))
        return parts

    def _element_wise(self, unit: StepUnit, part: _Part) -> None:
        """The variant's rule, or the momentum alone, which is to be orthogonalised."""
        rule: PassRule = "momentum" if part.orthogonal else "lion" if self.options.variant == "lion" else "adamw"
        group, state = part.bucket.group, part.bucket.state
        fields = {name: state(name, part.entries) for name in ("reference", *STATES[rule])} | {"grad": part.grads}
        scalars = Scalars(betas=group["betas"], k=_factor(part.bucket))
        # In exact mode the reference is recorded; it is not the gradient of the step before.
        scalars.advance = not self.options.exact
        if not part.orthogonal:
            fields["param"] = part.weights
            scalars.lr, scalars.weight_decay, scalars.eps = (group[name] for name in ("lr", "weight_decay", "eps"))
        if rule == "adamw":
            scalars.step = part.bucket.step_of(part.entries)
        unit.kernels.run(Pass(rule, fields, scalars, part.coefficients))

    def _before_step(self, unit: StepUnit) -> None:
        # Before any state changes: the step can be repeated once the gradient is recorded.
        if self.options.exact and not self._recorded and any(tensor.grad is not None for tensor in unit.tensors):
            raise RuntimeError(
                "MARS exact mode: step() without a recorded comparison gradient; call record_reference() with the next "
                "batch's gradient before computing the present batch's."
            )

    def _judged(self, unit: StepUnit, grads: Sequence[Tensor | None]) -> list[Tensor]:
        judged = super()._judged(unit, grads)
        if self.options.exact:
            # Recorded one step ago, when nobody looked at it.
            states = (self.state[tensor] for tensor, grad in zip(unit.tensors, grads, strict=True) if grad is not None)
            judged += [state["reference"] for state in states if "reference" in state]
        return judged

    def _orthogonalise(self, unit: StepUnit, parts: list[_Part]) -> None:
        assert unit.exchange is not None
        sources: list[Tensor | None] = [None] * len(unit.entries)
        targets: dict[int, Tensor] = {}
        for part in parts:
            exp_avgs = part.bucket.state("exp_avg", part.entries)
            decay_(part.weights, part.bucket.group["lr"], part.bucket.group["weight_decay"])
            for entry, weight, exp_avg in zip(part.entries, part.weights, exp_avgs, strict=True):
                sources[entry.index] = exp_avg
                targets[entry.index] = weight

        def compute(batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
            self.health.add("matrices_updated", len(tasks))
            return self._directions(unit, batch.signature, stack)

        weights: list[Tensor] = []
        directions: list[Tensor] = []

        def deliver(task: MatrixTask, fragment: int, direction: Tensor) -> None:
            weights.append(targets[fragment])
            directions.append(direction)

        def delivered(batch: Batch) -> None:
            subtract_scaled_(weights, directions, self.param_groups[batch.signature[-1]]["lr"])
            weights.clear()
            directions.clear()

        product = self.declared.product_type(unit.device, unit.dtype)
        assert product is not None
        steps = orthogonal_steps_for(unit.device, unit.dtype, product)
        jobs: list[Job] = []

        def at_once(task: MatrixTask, indices: Sequence[int], parts: Sequence[Tensor]) -> None:
            self.health.add("matrices_updated", 1)
            (index,), (exp_avg,) = indices, parts
            if steps is not None:
                jobs.append(self._job(task.signature, exp_avg, targets[index]))
                return
            direction = self._directions(unit, task.signature, exp_avg.view(1, -1))
            subtract_scaled_([targets[index]], [direction[0]], self.param_groups[task.signature[-1]]["lr"])

        unit.exchange.run(sources, compute, deliver, delivered=delivered, at_once=at_once)
        if steps is not None:
            steps(jobs)

    def _directions(self, unit: StepUnit, signature: _Signature, exp_avgs: Tensor) -> Tensor:
        """Of a stack of momenta (tasks, elements)."""
        rows, columns, logical, position = signature
        group = self.param_groups[position]
        directions = updates.orthogonal_direction(
            exp_avgs.view(-1, rows, columns),
            self.options.variant,  # type: ignore[arg-type]
            *logical,
            beta1=group["betas"][0],
            eps=self._eps(group),
            ns_steps=group["ns_steps"],
            ns_dtype=self.declared.product_type(unit.device, unit.dtype),
            orthogonalise=newton_schulz_for(unit.device),
        )
        return directions.reshape(len(exp_avgs), -1)

    def _job(self, signature: _Signature, exp_avg: Tensor, weight: Tensor) -> Job:
        rows, columns, logical, position = signature
        group, variant = self.param_groups[position], self.options.variant
        return Job(
            (rows, columns),
            exp_avg,
            weight,
            eps=updates.norm_offset(variant, group["betas"][0], self._eps(group)),  # type: ignore[arg-type]
            factor=updates.shape_factor(variant, *logical),  # type: ignore[arg-type]
            lr=float(group["lr"]),
            steps=group["ns_steps"],
        )

    def _eps(self, group: Mapping[str, Any]) -> float | None:
        return group["eps"] if self.options.variant == "shampoo" else None

    def _after_step(self, unit: StepUnit) -> None:
        if self.options.exact and self._recorded:
            for tensor in unit.tensors:
                state = self.state[tensor]
                if "next_reference" in state and self.declared.capturable and "reference" in state:
                    # Where a graph reads it.
                    state["reference"].copy_(state["next_reference"])
                elif "next_reference" in state:
                    upcoming = state["next_reference"]
                    spent = state.get("reference")
                    state["next_reference"] = torch.zeros_like(upcoming) if spent is None else spent
                    state["reference"] = upcoming
            self._recorded = False


def _factor(bucket: Bucket) -> float:
    return updates.correction_factor(bucket.group["gamma"], bucket.group["betas"][0])


def _fallback_lr_ratio(options: MARSOptions) -> float:
    if options.lr_1d is None:
        return 1.0 if options.variant == "muon" else 0.5
    if float(options.lr) == 0.0:
        raise OptionError(
            f"MARS: lr_1d={options.lr_1d!r} is invalid with lr=0: the fallback's rate is a multiple of lr; pass the "
            "peak lr and let the scheduler start from 0"
        )
    return options.lr_1d / float(options.lr)
