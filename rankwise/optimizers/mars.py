"""MARS: variance-reduced AdamW, Lion, Shampoo and Muon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.kernels import foreach
from rankwise.optimizers.base import ShardedOptimizer
from rankwise.optimizers.element_states import StateTypes
from rankwise.optimizers.entries import Entry
from rankwise.optimizers.first_order import adamw_step
from rankwise.optimizers.options import MARSOptions, OptionError, Options, patterns
from rankwise.optimizers.routing import ParameterInfo, RoutingPolicy, Rule
from rankwise.optimizers.sources import LayoutSource
from rankwise.optimizers.unit import Bucket, StepUnit, spans
from rankwise.optimizers.work import StepWork
from rankwise.sharding import Batch, MatrixTask
from rankwise.updates import mars as updates

__all__ = ["MARS"]

_ORTHOGONAL = ("shampoo", "muon")


@dataclass
class _Corrected:
    """A bucket's fragments of one kind with their clipped corrected gradients."""

    bucket: Bucket
    entries: list[Entry]
    weights: list[Tensor]
    clipped: list[Tensor]
    orthogonal: bool


class MARS(ShardedOptimizer):
    r"""Variance-reduced pretraining optimizers (arXiv 2411.10438) and MARS-M (arXiv 2510.21800).

    .. math::
        c_t &= g_t + \tfrac{\gamma\beta_1}{1-\beta_1}\,(g_t - h_t), \qquad
        \tilde c_t = c_t / \max(1, \lVert c_t\rVert / \text{clip})

    takes the gradient's place in AdamW, Lion, or the orthogonalised momentum of Shampoo and Muon (Newton-Schulz).
    ``h`` is the previous gradient, or in exact mode the present batch's gradient at the previous weights. Norms are
    those of whole parameters, however the framework cuts them.

    Args:
        params: Parameters, ``(name, parameter)`` pairs or param groups.
        lr: Learning rate.
        variant: "adamw", "lion", "shampoo" (orthogonalised momentum, factor ``sqrt(max(1, rows / columns))``) or
            "muon" (MARS-M: factor ``0.2 sqrt(max(rows, columns))``).
        betas: Decay rates; Lion, Shampoo and Muon use the first alone.
        eps: Added to the bias-corrected root.
        weight_decay: Decoupled decay, times lr.
        gamma: Strength of the correction; 0 switches it off.
        exact: Compare with the same batch at the previous weights; see :meth:`record_reference`.
        clip: Largest norm of a corrected gradient, per parameter; None does not clip.
        optimize_1d: Vectors take the variance-reduced rule too, instead of AdamW.
        lr_1d: Learning rate of the AdamW fallback. None: lr / 2, as in the published runs ("muon": lr). The ratio to lr
            is kept under schedules.
        betas_1d: Decay rates of the fallback.
        weight_decay_1d: Decay of the fallback ("muon": ``weight_decay``, as published).
        ns_steps: Newton-Schulz iterations.
        ns_dtype: Type of its products.
        comm_dtype: Type in which straddling matrices of "shampoo" and "muon" travel to their owners and back.
            None: their own, which rounds nothing; "bfloat16" halves the bytes.
        exclude: Name patterns sent to the fallback.
        skip_nonfinite: Leave every weight and state as it was where a gradient of the step is infinite or NaN on any
            rank, and count it in :attr:`health`. Costs a copy of weights and states while a step runs.

    Raises:
        OptionError: A value is outside its range, or no parameter takes the MARS rule.
    """

    options_type: ClassVar[type[Options]] = MARSOptions
    options: MARSOptions
    health_means = ("clip_rate",)
    copied_attributes = (*ShardedOptimizer.copied_attributes, "_recorded")
    group_options = (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "gamma",
        "clip",
        "betas_1d",
        "weight_decay_1d",
        "ns_steps",
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 3e-3,
        variant: str = "adamw",
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        gamma: float = 0.025,
        exact: bool = False,
        clip: float | None = 1.0,
        optimize_1d: bool = False,
        lr_1d: float | None = None,
        betas_1d: tuple[float, float] = (0.9, 0.95),
        weight_decay_1d: float = 0.1,
        ns_steps: int = 5,
        ns_dtype: str = "bfloat16",
        comm_dtype: str | None = None,
        exclude: Sequence[str] = (),
        skip_nonfinite: bool = False,
    ) -> None:
        options = MARSOptions(
            lr=lr,
            variant=variant,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            gamma=gamma,
            exact=exact,
            clip=clip,
            optimize_1d=optimize_1d,
            lr_1d=lr_1d,
            betas_1d=betas_1d,
            weight_decay_1d=weight_decay_1d,
            ns_steps=ns_steps,
            ns_dtype=ns_dtype,
            comm_dtype=comm_dtype,
            exclude=patterns(exclude),
            skip_nonfinite=skip_nonfinite,
        )
        self._recorded = False
        super().__init__(params, options, {"lr_1d_ratio": _fallback_lr_ratio(options)})

    @property
    def policy(self) -> RoutingPolicy:
        """Embeddings take the element-wise variants' rule, as published; orthogonalisation leaves them out."""
        options = self.options
        return RoutingPolicy(
            embeddings=options.variant not in _ORTHOGONAL, exclude=options.exclude, vectors=options.optimize_1d
        )

    @property
    def identity(self) -> str:
        """Class and variant: variants have different element states."""
        return f"MARS-{self.options.variant}"

    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """The momentum, the second moment where AdamW is involved, and the comparison gradient(s)."""
        if rule == "fallback":
            return {"exp_avg": None, "exp_avg_sq": None}
        second = () if self.options.variant == "lion" or self._is_orthogonal(info) else ("exp_avg_sq",)
        references = ("reference", "next_reference") if self.options.exact else ("reference",)
        return dict.fromkeys(("exp_avg", *second, *references))

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

    def _plan(self, unit: StepUnit) -> None:
        tasks = []
        for key in unit.keys("matrix"):
            info = unit.infos[key]
            if self._is_orthogonal(info):
                rows, columns = info.matrix_shape
                short, long = min(rows, columns), max(rows, columns)
                signature = (rows, columns, info.logical_matrix_shape, unit.group_position[key])
                tasks.append(MatrixTask(key, (key,), signature, cost=float(6 * short * short * long)))
        self._choose_owners(unit, tasks)

    def work(self, unit: StepUnit) -> StepWork:
        """See the base class: the norms of the corrected gradients."""
        return StepWork(sums=(1,), element_flops=24.0)

    def _is_orthogonal(self, info: ParameterInfo) -> bool:
        return self.options.variant in _ORTHOGONAL and len(info.shape) >= 2

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            if bucket.rule == "fallback":
                self._fallback(bucket)
        corrected = self._correct(unit, [bucket for bucket in buckets if bucket.rule == "matrix"])
        for part in corrected:
            self._element_wise(part)
            if not part.orthogonal:
                self.health.add("matrices_updated", len(part.entries))
        if unit.exchange is not None:
            self._orthogonalise(unit, [part for part in corrected if part.orthogonal])

    def _fallback(self, bucket: Bucket) -> None:
        group = bucket.group
        adamw_step(
            bucket,
            lr=group["lr"] * group["lr_1d_ratio"],
            betas=group["betas_1d"],
            weight_decay=group["weight_decay"] if self.options.variant == "muon" else group["weight_decay_1d"],
        )

    def _correct(self, unit: StepUnit, buckets: list[Bucket]) -> list[_Corrected]:
        """Corrected gradients of all buckets, clipped by the norms of whole parameters: one collective."""
        entries: list[Entry] = []
        corrected: list[Tensor] = []
        for bucket in buckets:
            references = bucket.state("reference")
            k = updates.correction_factor(bucket.group["gamma"], bucket.group["betas"][0])
            corrected.extend(foreach.mars_corrected(bucket.grads, references, k))
            entries.extend(bucket.entries)
            self._advance_reference(unit, bucket, references)
        if any(bucket.group["clip"] is not None for bucket in buckets) or unit.sums.straddlers:
            self._clip(unit, buckets, entries, corrected)
        return self._split(buckets, corrected)

    def _clip(self, unit: StepUnit, buckets: list[Bucket], entries: list[Entry], corrected: list[Tensor]) -> None:
        squares = unit.sum_over_ranks(entries, foreach.squared_norms(corrected))[0]
        for bucket, span in spans(buckets):
            if bucket.group["clip"] is not None:
                coefficients = updates.clip_coefficient(squares[span], bucket.group["clip"]).to(unit.dtype)
                self.health.add("clip_rate", (coefficients < 1).sum(), len(bucket.entries))
                foreach.scale_by_(corrected[span], coefficients)

    def _advance_reference(self, unit: StepUnit, bucket: Bucket, references: list[Tensor]) -> None:
        if not self.options.exact:
            # A copy: frameworks reuse their gradient buffers, and a reference would compare g with itself.
            foreach.copy_(references, bucket.grads)

    def _open(self, unit: StepUnit) -> tuple[list[Tensor | None], list[Tensor | None]] | None:
        # Before any state changes: the step can be repeated once the gradient is recorded.
        if self.options.exact and not self._recorded and any(tensor.grad is not None for tensor in unit.tensors):
            raise RuntimeError(
                "MARS exact mode: step() without a recorded comparison gradient; call record_reference() with the next "
                "batch's gradient before computing the present batch's."
            )
        return super()._open(unit)

    def _judged(self, unit: StepUnit, grads: Sequence[Tensor | None]) -> list[Tensor]:
        judged = super()._judged(unit, grads)
        if self.options.exact:
            # Recorded one step ago, when nobody looked at it.
            states = (self.state[tensor] for tensor, grad in zip(unit.tensors, grads, strict=True) if grad is not None)
            judged += [state["reference"] for state in states if "reference" in state]
        return judged

    def _split(self, buckets: list[Bucket], corrected: list[Tensor]) -> list[_Corrected]:
        parts = []
        for bucket, span in spans(buckets):
            clipped = corrected[span]
            for orthogonal in (False, True):
                chosen = [i for i, e in enumerate(bucket.entries) if self._is_orthogonal(e.info) == orthogonal]
                if chosen:
                    parts.append(
                        _Corrected(
                            bucket,
                            [bucket.entries[i] for i in chosen],
                            [bucket.weights[i] for i in chosen],
                            [clipped[i] for i in chosen],
                            orthogonal,
                        )
                    )
        return parts

    def _element_wise(self, part: _Corrected) -> None:
        group = part.bucket.group
        exp_avgs = part.bucket.state("exp_avg", part.entries)
        if part.orthogonal:
            foreach.momentum_(exp_avgs, part.clipped, group["betas"][0])
        elif self.options.variant == "lion":
            foreach.lion_(
                part.weights,
                part.clipped,
                exp_avgs,
                lr=group["lr"],
                beta1=group["betas"][0],
                weight_decay=group["weight_decay"],
            )
        else:
            foreach.adamw_(
                part.weights,
                part.clipped,
                exp_avgs,
                part.bucket.state("exp_avg_sq", part.entries),
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=part.bucket.step,
            )

    def _orthogonalise(self, unit: StepUnit, parts: list[_Corrected]) -> None:
        assert unit.exchange is not None
        sources: list[Tensor | None] = [None] * len(unit.entries)
        targets: dict[int, tuple[Tensor, Mapping[str, Any]]] = {}
        for part in parts:
            exp_avgs = part.bucket.state("exp_avg", part.entries)
            foreach.decay_(part.weights, part.bucket.group["lr"], part.bucket.group["weight_decay"])
            for entry, weight, exp_avg in zip(part.entries, part.weights, exp_avgs, strict=True):
                sources[entry.index] = exp_avg
                targets[entry.index] = (weight, part.bucket.group)

        def compute(batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
            rows, columns, logical, position = batch.signature
            self.health.add("matrices_updated", len(tasks))
            group = self.param_groups[position]
            direction = updates.orthogonal_direction(
                stack.view(-1, rows, columns),
                self.options.variant,  # type: ignore[arg-type]
                *logical,
                beta1=group["betas"][0],
                eps=group["eps"] if self.options.variant == "shampoo" else None,
                ns_steps=group["ns_steps"],
                ns_dtype=getattr(torch, self.options.ns_dtype),
            )
            return direction.reshape(len(tasks), -1)

        def deliver(task: MatrixTask, fragment: int, direction: Tensor) -> None:
            weight, group = targets[fragment]
            weight.sub_(direction * group["lr"])

        unit.exchange.run(sources, compute, deliver)

    def _close(self, unit: StepUnit, weights: Sequence[Tensor | None]) -> None:
        super()._close(unit, weights)
        if self.options.exact and self._recorded:
            for tensor in unit.tensors:
                state = self.state[tensor]
                if "next_reference" in state:
                    upcoming = state["next_reference"]
                    spent = state.get("reference")
                    state["next_reference"] = torch.zeros_like(upcoming) if spent is None else spent
                    state["reference"] = upcoming
            self._recorded = False


def _fallback_lr_ratio(options: MARSOptions) -> float:
    if options.lr_1d is None:
        return 1.0 if options.variant == "muon" else 0.5
    if float(options.lr) == 0.0:
        raise OptionError(
            f"MARS: lr_1d={options.lr_1d!r} is invalid with lr=0: the fallback's rate is a multiple of lr; pass the "
            "peak lr and let the scheduler start from 0"
        )
    return options.lr_1d / float(options.lr)
