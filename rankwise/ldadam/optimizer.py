"""LDAdam: Adam in a low-dimensional subspace that follows the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rankwise.comm.owner_plan import Batch, MatrixTask, slice_tasks
from rankwise.kernels import graphs
from rankwise.kernels.dispatch import is_for_cpus
from rankwise.kernels.surroundings import undisturbed
from rankwise.layout.equal_slices import SlicedMatrix, find_slices
from rankwise.ldadam import formulas
from rankwise.ldadam.dispatch import steps_in_place_for
from rankwise.ldadam.low_rank_matrices import LDAdamRule
from rankwise.ldadam.options import LDAdamOptions
from rankwise.ldadam.signature import LowRankSignature, scratch_alone, scratch_of_a_stack
from rankwise.ldadam.sliced_formulas import exchanged
from rankwise.ldadam.spec import LDAdamSpec
from rankwise.ldadam.subspaces import Subspaces
from rankwise.ldadam.working_shards import reply_of
from rankwise.options.constructor import options_as_keywords
from rankwise.options.validation import OptionError
from rankwise.plan.notes import Note
from rankwise.plan.step_costs import Joint, ScratchMemory, StepCosts, tables
from rankwise.plan.step_unit import Bucket, Collectives, StepUnit
from rankwise.states.matrix_states import MatrixState
from rankwise.step.first_order import fallback_step
from rankwise.step.matrices import StepMatrices, step_matrices
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["LDAdam"]

_MOVED_SHAPES: Note[set[tuple[int, ...]]] = Note("shapes of matrices whose bases have been moved")


class LDAdam(ShardedOptimizer):
    r"""Adam in a rank-*r* subspace with generalised error feedback (arXiv 2410.16103).

    The owner of a matrix keeps its basis ``U`` and the two low-dimensional moments; every rank keeps the error of its
    own elements. With error feedback the error and the momentum share one buffer ``F``; a step gathers
    ``C = G + F``, and the owner returns rank-*r* factors, or, to many holders of small parts, their elements.
    Parameters that are not matrices, embeddings, heads, and matrices too small for a low rank to save anything take
    AdamW with the same lr and betas.

    Example:
        >>> optimizer = rankwise.LDAdam(model.named_parameters(), lr=1e-3, rank=32)
        >>> model(batch).loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()

    Raises:
        OptionError: A value is outside its range, or no parameter takes the low-rank rule.
    """

    options: LDAdamOptions
    spec_class = LDAdamSpec
    spec: LDAdamSpec
    held = (*ShardedOptimizer.held, "_unstepped")

    @options_as_keywords(LDAdamOptions)
    def __init__(self, params: Any, options: LDAdamOptions) -> None:
        super().__init__(params, options)
        # Matrices that are to take their first step, which is another one; the counts may lie on the device.
        self._unstepped: set[str] = set()

    @undisturbed
    def read_health(self) -> dict[str, float]:
        """See the base class; ``kept_bases``, but for CPUs: where no new basis could be factored."""
        found = super().read_health()
        if not self.spec.capturable and all(is_for_cpus(unit.kernels) for unit in self.planner.units.values()):
            found.pop("kept_bases")
        return found

    def plan(self, unit: StepUnit) -> Collectives:
        """See the base class: every matrix, or its slices."""
        slices = self._slices(unit)
        tasks = []
        for key in unit.keys("matrix"):
            whole = self._signature(unit, key)
            cost = float(10 * whole.rows * whole.columns * whole.rank + 6 * max(whole[:2]) * whole.rank**2)
            if key not in slices:
                tasks.append(MatrixTask(key, (key,), whole, cost))
                continue
            matrix = slices[key]
            cut = whole.cut_along(matrix.axis)
            signature = LowRankSignature(*matrix.shape, whole.rank, whole.group, whole.right, cut)
            tasks += slice_tasks(matrix, signature, cost)
        # Those that lie whole on their owner are then stepped together; a captured step takes stacks of them.
        form = steps_in_place_for(unit.device, unit.dtype)
        return self.planner.choose_owners(unit, tasks, slices, alone=form is not None and not self.spec.capturable)

    def _signature(self, unit: StepUnit, key: str) -> LowRankSignature:
        """Signature of a whole matrix."""
        planned = unit.parameters[key]
        rows, columns = planned.info.matrix_shape
        rank = formulas.effective_rank(planned.group["rank"], rows, columns)
        return LowRankSignature(rows, columns, rank, planned.step_group, formulas.projects_right(rows, columns))

    def _slices(self, unit: StepUnit) -> dict[str, SlicedMatrix]:
        """The matrices that ranks compute together."""
        together = self.planner.together
        if together is None or (self.spec.capturable and not together.near):
            return {}
        slices = find_slices(unit.layout, unit.keys("matrix"), together.sets)
        if not together.near:
            slower = together.slower_in_pairs
            slices = {key: matrix for key, matrix in slices.items() if self._sends_less(unit, matrix, slower)}
        if slices and self.spec.capturable:
            raise OptionError(
                f"{self.spec.name}: capturable=True is invalid under tensor parallelism: it must be false where ranks "
                "compute the slices of a matrix together, which the host directs; set capturable to false"
            )
        return slices

    def _sends_less(self, unit: StepUnit, matrix: SlicedMatrix, slower: float) -> bool:
        group = unit.parameters[matrix.key].group
        partners, products = len(set(matrix.owners[0])), 2 if group["error_feedback"] else 1
        return self._signature(unit, matrix.key).sends_less_in_slices(matrix.axis, partners, products, slower)

    def step_costs(self, unit: StepUnit) -> StepCosts:
        """See the base class: the returned factors, and what owners of slices tell each other."""

        def together(batch: Batch) -> tuple[Joint, ...]:
            signature: LowRankSignature = batch.signature
            if signature.cut is None:
                return ()
            sizes = exchanged(signature.cut, signature.short, signature.long, signature.rank)
            width = batch.sliced * unit.dtype.itemsize
            return tuple(Joint(width * size, "gather" if gathered else "sum") for size, gathered in sizes)

        alone = partial(scratch_alone, narrow=self.spec.has_narrow_subspaces)
        return StepCosts(
            reply=partial(reply_of, unit, self.step_groups),
            together=together,
            scratch=ScratchMemory(partial(self._sums, unit), alone, scratch_of_a_stack),
        )

    def _sums(self, unit: StepUnit, everything: int, largest: int) -> float:
        """Bytes for gradients with buffers of another type, where they may not lie in the gradients' memory."""
        own = self.options.error_dtype not in (None, str(unit.dtype).removeprefix("torch."))
        if not own or unit.spends_gradients or not self.options.error_feedback:
            return tables(everything, largest)
        return tables(everything, largest) + unit.share("matrix") * everything * unit.dtype.itemsize

    def _before_step(self, unit: StepUnit) -> None:
        """Other solvers and kernels than at the first step are met at the second, and a capture cannot load them."""
        super()._before_step(unit)
        if not graphs.is_capturing(unit.device) or unit.exchange is None:
            return
        owned = {task.key: (task.signature.short, task.signature.long) for task in unit.exchange.owned()}
        if self._unstepped.isdisjoint(owned) and owned.keys() <= self.matrix_states.keys():
            followed = unit.notes.obtain(_MOVED_SHAPES, set)
            if not followed.issuperset(owned.values()):
                graphs.refuse_capture(unit.device, "the first step that moves a basis")

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        step_matrices(self._matrix_rule(unit, fallback_step(unit, buckets)))

    def _matrix_rule(self, unit: StepUnit, matrices: Sequence[Bucket]) -> LDAdamRule:
        unstepped = self._unstepped if self.working_tensors.counts_on_device(unit) else None
        followed = unit.notes.obtain(_MOVED_SHAPES, set)

        def fresh(task: MatrixTask) -> MatrixState:
            graphs.refuse_capture(unit.device, "the first step of a matrix")
            return unit.fresh_states(task)

        of_states = self.matrix_states, self.step_groups, self.health, fresh
        subspaces = Subspaces(*of_states, self.spec, followed, unstepped)

        matrices_of_step = StepMatrices(unit, matrices, self.step_groups, self.health)
        return LDAdamRule(matrices_of_step, subspaces, partial(self.planner.holders, unit))
