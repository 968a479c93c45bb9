"""MKOR: Kronecker-factored preconditioning by rank-1 inverse updates, in front of a first-order optimizer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.kernels.forms import is_for_cpus
from rankwise.mkor.blocked import Workspace
from rankwise.mkor.factors import KroneckerFactors
from rankwise.mkor.options import MKOROptions
from rankwise.mkor.preconditioned import Preconditioned
from rankwise.mkor.switch import SwitchingOptimizer
from rankwise.options.constructor import options_as_keywords
from rankwise.routing.roles import ParameterInfo, Role, Route, RoutingPolicy, Rule
from rankwise.sharding import Batch, MatrixTask
from rankwise.statistics.vectors import LayerVectors
from rankwise.step.element_states import StateTypes
from rankwise.step.first_order import FirstOrder
from rankwise.step.matrix_states import MatrixState
from rankwise.step.unit import Bucket, StepUnit
from rankwise.step.work import StepWork

__all__ = ["MKOR"]

logger = logging.getLogger(__name__)


class MKOR(SwitchingOptimizer):
    r"""Momentum-enabled Kronecker-factor-based optimizer with rank-1 updates, and MKOR-H (arXiv 2306.01685).

    Every ``update_interval`` steps the inverses of a layer's two factors move by one rank-1 update each, from the mean
    input ``a`` and the gradient ``g`` of a (virtual) bias; every step the gradient becomes
    :math:`G^{-1} D A^{-1}`, rescaled to the norm of ``D``, and goes to the backend. A layer's bias gradient rides along
    as one more column if weight and bias are in one param group. The owner of a matrix alone keeps its factors.

    The statistics come from module hooks: call :meth:`capture` once with the model. The DeepSpeed plugin does it.

    Example:
        >>> optimizer = rankwise.MKOR(model.named_parameters(), lr=3e-3, backend="lamb")
        >>> optimizer.capture(model)
        >>> model(batch).loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()

    Raises:
        OptionError: A value is outside its range, or there is no matrix to precondition.
    """

    options: MKOROptions
    needs_capture = True
    health_totals = ("factors_updated", "factors_skipped")
    product_option = "product_dtype"
    matrix_state_names = ("left", "right", "failures")
    copied_attributes = (*SwitchingOptimizer.copied_attributes, "_first_order", "_factors")
    one_by_one = True
    idle_advice: ClassVar[Mapping[str, str]] = {"both sides above": "raise 'max_factor_dim'"}
    sums_cover_fallback = True  # LAMB's trust ratios are per parameter, whatever its rule

    @options_as_keywords(MKOROptions)
    def __init__(self, params: Any, options: MKOROptions) -> None:
        if options.rule == "paper_literal":
            logger.warning("MKOR: rule='paper_literal' is the printed formula; it amplifies what it should damp.")
        self._first_order = FirstOrder(options.backend, options.nesterov)
        self._factors = KroneckerFactors(options)
        super().__init__(params, options)

    # --- routing ------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> RoutingPolicy:
        """Linear weights; embeddings and heads take the backend."""
        return RoutingPolicy(embeddings=False, exclude=self.options.exclude)

    def _adjust_route(self, info: ParameterInfo, group: Mapping[str, Any], chosen: Route) -> Route:
        if chosen.rule == "matrix" and info.role is Role.EXPERT:
            # Their inputs are padded to a capacity that depends on how many ranks there are, and so does their mean.
            return Route("fallback", "expert")
        if chosen.rule == "matrix" and len(info.shape) != 2:
            return Route("fallback", "only 2-D weights of linear modules are captured")
        if chosen.rule == "matrix" and min(info.shape) > self.options.max_factor_dim:
            return Route("fallback", f"both sides above {self.options.max_factor_dim}")
        return chosen

    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """Those of the backend."""
        return dict.fromkeys(self._first_order.states)

    def matrix_state_shapes(
        self, info: ParameterInfo, group: Mapping[str, Any]
    ) -> Mapping[str, Collection[tuple[int, ...]]]:
        """The factors (side, side); the right one has a column more where the bias rides along."""
        outputs, inputs = info.logical_matrix_shape
        return {"left": [(outputs, outputs)], "right": [(inputs, inputs), (inputs + 1, inputs + 1)]}

    # --- plan ---------------------------------------------------------------------------------------------------

    def _plan(self, unit: StepUnit) -> None:
        self._require_capture()
        if self._switched:
            return
        tasks = self._matrix_tasks(unit)
        self._choose_owners(unit, tasks)
        self._watch(unit, tasks)

    def work(self, unit: StepUnit) -> StepWork:
        """See the base class: LAMB's norms, the factors, and the vectors of factor steps."""
        tasks = [] if unit.exchange is None else [task for batch in unit.exchange.plan.batches for task in batch.tasks]
        # Two vectors per layer, the number of its tokens and of its failures.
        elements = sum(task.signature.outputs + task.signature.inputs + 2 for task in tasks)
        return StepWork(
            sums=(2,) if self.options.backend == "lamb" else (),
            matrix_state=lambda task, device: self._factors.fresh(task.signature, device),
            periodic=self._periodic_messages(unit, elements * unit.dtype.itemsize),
            period=self.options.update_interval,
            scalars=(8,) * (bool(tasks) and not all(unit.layout.ranks)) + (16,) * self._watches_loss(unit),
        )

    def _periodic_messages(self, unit: StepUnit, size: int) -> tuple[int, ...]:
        if self._switched or not size:
            return ()
        if self._reduction is None:
            return (size,)
        # They carry the vectors of all units.
        return self._reduction.message_bytes if unit is next(iter(self._units.values()), unit) else ()

    # --- the step -----------------------------------------------------------------------------------------------

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        self._maybe_switch(unit)
        if unit.scratch.get("statistics") and not self._switched:
            buckets = self._precondition(unit, buckets)
        else:
            unit.scratch.pop("space", None)
        self._first_order.apply(unit, buckets)

    def product_type(self, unit: StepUnit) -> torch.dtype:
        """See the base class."""
        return self._factors.product_type(unit.device, unit.dtype)

    def _precondition(self, unit: StepUnit, buckets: list[Bucket]) -> list[Bucket]:
        """Replace the gradients of preconditioned matrices by their preconditioned forms.

        Returns:
            What the first-order rule has yet to step.
        """
        counts = self._step_counts(unit)
        due = {key: count for key, count in counts.items() if self._schedule.is_due(key, count)}
        vectors = self._reduced_statistics(unit, due)
        self._drop_statistics(unit)
        self._prepare_capture(unit, counts)
        if unit.exchange is None:
            return buckets
        gradients = Preconditioned(unit, buckets, self._first_order)
        space: Workspace = unit.scratch.setdefault("space", Workspace())
        product = self.product_type(unit)

        def moved(tasks: Sequence[MatrixTask]) -> list[MatrixState]:
            self.health.add("matrices_updated", len(tasks))
            fresh = partial(self._factors.fresh, tasks[0].signature, unit.device)
            states = [self.matrix_states.obtain(task.key, fresh) for task in tasks]
            moving = [place for place, task in enumerate(tasks) if task.key in vectors]
            if moving:
                self._move_factors([tasks[place] for place in moving], [states[place] for place in moving], vectors)
            return states

        def compute(batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
            return self._factors.apply(batch.signature, moved(tasks), stack, product, space)

        def at_once(task: MatrixTask, indices: Sequence[int], parts: Sequence[Tensor]) -> None:
            (state,), sizes = moved([task]), task.signature.sizes
            results = space.take("result", (sum(sizes),), unit.dtype).split(sizes)
            self._factors.apply_to_one(task.signature, state, parts, results, product, space)
            gradients.step(task, indices, results)

        in_place = is_for_cpus(unit.kernels)
        unit.exchange.run(gradients.sources, compute, gradients.receive, at_once=at_once if in_place else None)
        return gradients.remaining()

    def _move_factors(
        self, tasks: Sequence[MatrixTask], states: Sequence[MatrixState], vectors: Mapping[str, LayerVectors]
    ) -> None:
        updated, skipped = self._factors.move(tasks, states, vectors)
        self.health.add("factors_updated", updated)
        self.health.add("factors_skipped", skipped)

    def _drop_untouched(self, keys: Sequence[str]) -> None:
        for key in keys:
            state = self.matrix_states.get(key, {})
            factors = [value for side, value in state.items() if side != "failures"]
            if all(torch.equal(factor, torch.eye(len(factor)).to(factor)) for factor in factors):
                self.matrix_states.pop(key, None)

    # --- checkpoints --------------------------------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """Class and backend: another backend has other element states."""
        return f"MKOR-{self.options.backend}"
