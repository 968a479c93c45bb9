"""MARS: variance-reduced AdamW, Lion, Shampoo and Muon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.kernels.dispatch import orthogonal_product_for
from rankwise.kernels.orthogonal_step import Square
from rankwise.kernels.passes import STATES, Pass, Scalars
from rankwise.kernels.passes import Rule as PassRule
from rankwise.kernels.surroundings import undisturbed
from rankwise.layout.dtensors import local_gradient, local_view
from rankwise.layout.layout_source import LayoutSource
from rankwise.mars.options import MARSOptions
from rankwise.mars.orthogonal_matrices import MARSRule, MomentumSignature, steps_in_place
from rankwise.mars.rule import correction_factor
from rankwise.mars.spec import MARSSpec
from rankwise.options.constructor import options_as_keywords
from rankwise.options.validation import OptionError, called_or
from rankwise.plan.step_costs import ScratchMemory, StepCosts, tables
from rankwise.plan.step_unit import AT_ONCE, Bucket, Collectives, StepUnit, joined, portion_sizes, portions, spans
from rankwise.states.element_states import offset_runs
from rankwise.states.entries import Entry
from rankwise.step.first_order import adamw_step
from rankwise.step.matrices import StepMatrices, step_matrices
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.updates.polynomial_steps import SCRATCH, operations_on_devices, scratch
from rankwise.updates.polynomials import quintics

__all__ = ["MARS"]


_FOLDED = {"exp_avg": "grad_avg"}
"""What passes take as the momentum where :meth:`MARSSpec.folds` says so."""


class _Part(NamedTuple):
    """A bucket's shards of one kind with the squared norms that a clip looks at."""

    bucket: Bucket
    norms: Tensor | None
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
    spec_class = MARSSpec
    spec: MARSSpec
    held = (*ShardedOptimizer.held, "_recorded")

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
                f"{self.spec.name}: exact=True is invalid under a framework engine: it needs two gradients per step, "
                "and the engine hands over one; set exact to false (the published default) or train with plain PyTorch"
            )
        super().attach(source)

    @undisturbed
    def record_reference(self) -> None:
        """Exact mode: copy the current ``.grad`` as the comparison gradient of the step after the next one.

        Call it with the *next* batch's gradient at today's weights, then ``zero_grad()``, compute the present batch's
        gradient and ``step()`` (arXiv 2411.10438, Algorithm 1 with one batch of look-ahead).

        Raises:
            RuntimeError: The optimizer was not built with ``exact=True``.
        """
        if not self.options.exact:
            raise RuntimeError(
                f"{self.spec.name}: record_reference() belongs to exact mode; build {self.spec.name} with exact=True"
            )
        unit = self._unit()
        for entry in unit.entries:
            tensor = unit.tensors[entry.shard.tensor]
            if entry.route.rule != "matrix":
                continue
            if tensor.grad is not None:
                place = offset_runs([entry])
                (values,) = place.runs.cut([local_gradient(tensor, tensor.grad).reshape(-1)])
                unit.states.views(self.state, "next_reference", [entry])[0].copy_(values)
            elif "next_reference" in self.state.get(tensor, {}):
                # The batch does not touch it: what is there belongs to an earlier step.
                unit.states.views(self.state, "next_reference", [entry])[0].zero_()
        self._recorded = True

    def plan(self, unit: StepUnit) -> Collectives:
        """See the base class: the matrices that are orthogonalised."""
        tasks = []
        for key in unit.keys("matrix"):
            info = unit.parameters[key].info
            if self.spec.is_orthogonal(info):
                rows, columns = info.matrix_shape
                short, long = min(rows, columns), max(rows, columns)
                signature = MomentumSignature(rows, columns, info.logical_matrix_shape, unit.parameters[key].step_group)
                cost = operations_on_devices(short, long, self.param_groups[0]["ns_steps"])
                tasks.append(MatrixTask(key, (key,), signature, cost))
        product = self.spec.product_type(unit.device, unit.dtype)
        # Those that lie whole on their owner are then stepped together.
        alone = product is not None and steps_in_place(unit, product) is not None
        return self.planner.choose_owners(unit, tasks, alone=alone)

    def step_costs(self, unit: StepUnit) -> StepCosts:
        """See the base class: the norms of the corrected gradients."""
        return StepCosts(sums=(1,), element_flops=24.0, scratch=self._scratch_memory(unit))

    def _scratch_memory(self, unit: StepUnit) -> ScratchMemory:
        """Scratch of the orthogonalisation in bfloat16, as on a device: all matrices of a shape together, or a batch.

        And of momenta that are not kept, where the gradients' own may not be taken.
        """
        group = self.param_groups[0]
        folded = [self.spec.folds(True, each) for each in self.param_groups]
        # Kept momenta are orthogonalised as they are opened.
        opened = self.spec.orthogonalises and self.spec.asked_type("exp_avg") and not all(folded)
        folds = any(folded) and not unit.spends_gradients
        matrices = [unit.parameters[key].info for key in unit.keys("matrix")]
        sizes = [prod(info.shape) for info in matrices if self.spec.is_orthogonal(info)]
        widest = max(sizes, default=0)

        def elements(everything: int, largest: int) -> float:
            formed = sum(sizes) if folds else 0
            kept = unit.share("matrix") * everything if opened else 0
            if unit.layout.world_size > 1:
                momenta = min(formed, everything) + kept
            else:
                momenta = portion_sizes(formed, widest)[0] + portion_sizes(kept, widest)[1]
            return tables(everything, largest) + 4 * momenta

        def kind(rows: int, columns: int) -> torch.dtype:
            free = self.options.ns_dtype == "auto"
            return orthogonal_product_for(torch.device("cuda"), torch.bfloat16, *((rows, columns) if free else (1, 1)))

        def together(tasks: Sequence[MatrixTask], most: int) -> int:
            shapes = Counter((task.signature.rows, task.signature.columns) for task in tasks)
            table = quintics(group["ns_coefficients"], group["ns_steps"]) if shapes else ()
            each = {shape: 2 * scratch(min(shape), max(shape), kind(*shape), table) for shape in shapes}
            if opened and unit.layout.world_size == 1:
                at_once = min(1.0, AT_ONCE / max(sum(sizes), 1))
                shapes = Counter({shape: ceil(count * at_once) for shape, count in shapes.items()})
            stacks = (min(count, max(1, most // each[shape])) * each[shape] for shape, count in shapes.items())
            return max(stacks, default=0)

        alone, stacked = (partial(together, most=most) for most in (SCRATCH, 1 << 62))
        return ScratchMemory(elements, alone, stacked)

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            if bucket.rule == "fallback":
                self._fallback(unit, bucket)
        matrices = [bucket for bucket in buckets if bucket.rule == "matrix"]
        clipped = self._clipped(unit, matrices)
        squares: dict[int, Square] = {}
        orthogonal: list[Bucket] = []
        folded: list[Bucket] = []
        opened: list[_Part] = []
        for bucket in matrices:
            for part in self._parts(bucket, clipped.get(id(bucket))):
                if part.orthogonal and self.spec.folds(True, bucket.group):
                    folded.append(part.bucket)
                    continue
                if part.orthogonal and unit.layout.world_size == 1 and unit.narrow.is_narrow(part.bucket, "exp_avg"):
                    opened += _in_portions(part)
                    continue
                squares |= self._element_wise(unit, part)
                if part.orthogonal:
                    orthogonal.append(part.bucket)
                else:
                    self.health.add("matrices_updated", len(part.bucket.entries))
        product = self.spec.product_type(unit.work_device, unit.dtype)
        if product is None:
            return

        def step(some: list[Bucket]) -> None:
            matrices = StepMatrices(unit, some, self.step_groups, self.health)
            step_matrices(MARSRule(matrices, self.options, product, squares))

        for some in _at_once(unit, folded):
            squares |= _form_momenta(unit, some)
            step([*orthogonal, *some])
            orthogonal = []
        for part in opened:
            squares |= self._element_wise(unit, part)
            step([part.bucket])
            unit.narrow.keep_apart()
            part.bucket.found.clear()

    def _fallback(self, unit: StepUnit, bucket: Bucket) -> None:
        group, ratio = bucket.group, bucket.group["lr_1d_ratio"]
        decay = group["weight_decay"] if self.options.variant == "muon" else group["weight_decay_1d"]
        if self.spec.step_groups.independent:
            # Of the rate that it is multiplied by below.
            decay = decay / ratio if ratio else 0.0
        adamw_step(unit, bucket, lr=group["lr"] * ratio, betas=group["betas_1d"], weight_decay=decay)

    def _clipped(self, unit: StepUnit, buckets: list[Bucket]) -> dict[int, Tensor]:
        """Squared norms of the whole corrected gradients of a bucket's shards, by its ``id``: one collective."""
        measured = [bucket for bucket in buckets if bucket.group["clip"] is not None]
        # Other ranks may have something to clip where this one has nothing.
        if not measured and not unit.sums.straddlers:
            return {}
        norms = [_corrected_norms(unit, bucket) for bucket in measured] or [
            torch.zeros(0, dtype=torch.float64, device=unit.device)
        ]
        entries = [entry for bucket in measured for entry in bucket.entries]
        squares = unit.sum_over_ranks(entries, joined(norms))[0]
        for bucket, span in spans(measured):
            self.health.add("clip_rate", (squares[span] > bucket.group["clip"] ** 2).sum(), len(bucket.entries))
        return {id(bucket): squares[span] for bucket, span in spans(measured)}

    def _parts(self, bucket: Bucket, norms: Tensor | None) -> list[_Part]:
        """A bucket's shards by what becomes of their momentum."""
        places: dict[bool, list[int]] = bucket.entries.once("momenta", self._places_by_momentum)
        if len(places) == 1:
            return [_Part(bucket, norms, orthogonal) for orthogonal in places]
        parts = []
        for orthogonal, chosen in places.items():
            own = None if norms is None else torch.stack([norms[place] for place in chosen])
            parts.append(_Part(bucket.only(chosen), own, orthogonal))
        return parts

    def _places_by_momentum(self, entries: Sequence[Entry]) -> dict[bool, list[int]]:
        """Whether momenta are orthogonalised, and the places of these entries."""
        found: dict[bool, list[int]] = {False: [], True: []}
        for place, entry in enumerate(entries):
            found[self.spec.is_orthogonal(entry.info)].append(place)
        return {orthogonal: places for orthogonal, places in found.items() if places}

    def _element_wise(self, unit: StepUnit, part: _Part) -> dict[int, Square]:
        """The variant's rule, or the momentum alone, which is to be orthogonalised: then see :func:`_measured`."""
        rule: PassRule = "momentum" if part.orthogonal else "lion" if self.options.variant == "lion" else "adamw"
        bucket, group = part.bucket, part.bucket.group
        scalars = Scalars(betas=group["betas"], k=_factor(bucket), clip=group["clip"])
        # In exact mode the reference is recorded; it is not the gradient of the step before.
        scalars.advance = not self.options.exact
        if not part.orthogonal:
            scalars.lr, scalars.weight_decay, scalars.eps = (group[name] for name in ("lr", "weight_decay", "eps"))
        else:
            bucket.state("exp_avg")  # opened: what is orthogonalised has not been rounded
        if rule == "adamw":
            scalars.step = bucket.step
        states = {name: name for name in ("reference", *STATES[rule])}
        if self.spec.folds(part.orthogonal, group):
            states, scalars.nesterov = _FOLDED, group["gamma"]
        passes = bucket.passes(rule, states, scalars, part.norms)
        return _measured(unit, bucket, passes, part.orthogonal)

    def load_extra_state(self, state_dict: Mapping[str, Any]) -> None:
        """Restore extra state; the gradient that was recorded for the next step is dropped."""
        super().load_extra_state(state_dict)
        self._recorded = False

    def _before_step(self, unit: StepUnit) -> None:
        # Before any state changes: the step can be repeated once the gradient is recorded.
        if self.options.exact and not self._recorded and any(tensor.grad is not None for tensor in unit.tensors):
            raise RuntimeError(
                f"{self.spec.name}: step() with exact=True must follow record_reference(), which has not been called "
                "since the last step; call record_reference() with the next batch's gradient before computing that of "
                "the present one"
            )

    def _judged(self, unit: StepUnit, grads: Sequence[Tensor | None]) -> list[Tensor]:
        judged = super()._judged(unit, grads)
        if self.options.exact:
            # Recorded one step ago, when nobody looked at it.
            states = (self.state[tensor] for tensor, grad in zip(unit.tensors, grads, strict=True) if grad is not None)
            judged += [local_view(state["reference"]) for state in states if "reference" in state]
        return judged

    def _after_step(self, unit: StepUnit) -> None:
        if self.options.exact and self._recorded:
            for tensor in unit.tensors:
                state = self.state[tensor]
                if "next_reference" in state and self.spec.capturable and "reference" in state:
                    # Where a graph reads it.
                    local_view(state["reference"]).copy_(local_view(state["next_reference"]))
                elif "next_reference" in state:
                    upcoming = state["next_reference"]
                    spent = state.get("reference")
                    state["next_reference"] = torch.zeros_like(upcoming) if spent is None else spent
                    state["reference"] = upcoming
            self._recorded = False


def _at_once(unit: StepUnit, folded: Sequence[Bucket]) -> Iterator[list[Bucket]]:
    """Portions of buckets whose momenta exist at the same time: all buckets where other ranks wait for some."""
    if unit.layout.world_size > 1:
        return iter([list(folded)])
    return portions(folded, lambda entry, grad: 0 if unit.spends(entry, grad) else grad.numel())


def _in_portions(part: _Part) -> Iterator[_Part]:
    """A part whose momenta are opened, some at a time."""
    first = 0
    for some in portions([part.bucket], lambda entry, grad: grad.numel()):
        for bucket in some:
            last = first + len(bucket.entries)
            own = None if part.norms is None else part.norms[first:last]
            yield _Part(bucket, own, True)
            first = last


def _form_momenta(unit: StepUnit, buckets: Sequence[Bucket]) -> dict[int, Square]:
    """Momenta to be orthogonalised, for this step only; in the gradients' own memory where that may be spent."""
    squares: dict[int, Square] = {}
    for bucket in buckets:
        momenta = bucket.found["exp_avg"] = [
            grad if unit.spends(entry, grad) else torch.empty_like(grad)
            for entry, grad in zip(bucket.entries, bucket.grads, strict=True)
        ]
        scalars = Scalars(betas=bucket.group["betas"], nesterov=bucket.group["gamma"])
        squares |= _measured(unit, bucket, bucket.passes("nesterov", _FOLDED, scalars, onto=momenta))
    return squares


def _measured(unit: StepUnit, bucket: Bucket, passes: Iterator[Pass], measured: bool = True) -> dict[int, Square]:
    """Run a bucket's passes: squared norms of the momenta, by the shards' index, where one pass has measured all."""
    found = []
    for update in passes:
        # Of matrices that travel, their owners measure what they gather.
        update.measured = measured and unit.exchange is not None and len(unit.exchange.in_place_shards) > 0
        found.append(unit.run(update))
    if len(found) != 1 or found[0] is None:
        return {}
    return {entry.index: (found[0], place) for place, entry in enumerate(bucket.entries)}


def _corrected_norms(unit: StepUnit, bucket: Bucket) -> Tensor:
    """Squared norms of a bucket's gradients, corrected by the change since their references."""
    norms: Tensor | None = None
    for part in bucket.parts(("reference",)):
        squares = unit.squared_norms(part.cut(bucket.grads), part.states["reference"], _factor(bucket))
        if part.parts is None and len(part.places) == len(bucket.entries):
            return squares
        if norms is None:
            norms = torch.zeros(len(bucket.entries), dtype=torch.float64, device=unit.device)
        norms.index_add_(0, unit.indices.of(tuple(part.places)), squares)
    assert norms is not None
    return norms


def _factor(bucket: Bucket) -> float:
    return correction_factor(bucket.group["gamma"], bucket.group["betas"][0])


def _fallback_lr_ratio(options: MARSOptions) -> float:
    if options.lr_1d is None:
        return options.fallback_ratio
    if float(options.lr) == 0.0:
        raise OptionError(
            f"{called_or('MARS')}: lr_1d={options.lr_1d!r} is invalid with lr=0: the fallback's rate is a "
            "multiple of lr; pass the peak lr and let the scheduler start from 0"
        )
    return options.lr_1d / float(options.lr)
