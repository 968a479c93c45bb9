"""MKOR preconditions gradients with Kronecker factors, moved by rank-1 updates, for a first-order optimizer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rankwise.comm.message_format import Traffic
from rankwise.comm.owner_plan import Batch, MatrixTask
from rankwise.comm.quantized_messages import wire_of
from rankwise.kernels.surroundings import stand_ins, undisturbed, undisturbed_anywhere
from rankwise.layout.equal_slices import SlicedMatrix, find_slices
from rankwise.mkor.factor_steps import WATCHED, FactorSteps
from rankwise.mkor.hybrid_switch import Switch
from rankwise.mkor.layer_signature import LayerSignature, layer_of
from rankwise.mkor.options import MKOROptions
from rankwise.mkor.preconditioned_matrices import (
    MKORRule,
    divisible,
    matrix_tasks,
    sliced_tasks,
    uncaptured_tasks,
)
from rankwise.mkor.preconditioning import scratch_of
from rankwise.mkor.sliced_windows import coded_wire, exchanged, sends_less
from rankwise.mkor.spec import MKORSpec
from rankwise.mkor.workspace import SPACE
from rankwise.options.constructor import options_as_keywords
from rankwise.plan.kept_states import fetch_kept_states, refuse_stranded, return_kept_states
from rankwise.plan.notes import Note
from rankwise.plan.step_costs import Joint, ScratchMemory, StepCosts
from rankwise.plan.step_unit import Bucket, Collectives, StepUnit
from rankwise.statistics.collector import Collector
from rankwise.statistics.factor_vectors import LayerVectors
from rankwise.statistics.hooks import Capture, Describe
from rankwise.statistics.linear_views import describe_linear
from rankwise.step.matrices import StepMatrices, step_matrices
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.working_tensors import BEGUN

__all__ = ["MKOR"]

logger = logging.getLogger(__name__)

_MOVED: Note[list[str]] = Note("matrices whose factors the step under way has moved")


def _scratch_of(tasks: Sequence[MatrixTask]) -> int:
    return scratch_of([sum(task.signature.sizes) for task in tasks])


def _follow_resets(optimizer: weakref.ref[MKOR]) -> None:
    """Follow resets in a forward pass on real tensors, so that layers that begin anew are listened to."""
    alive = optimizer()
    if alive is not None and not alive.state and stand_ins() is None:
        ShardedOptimizer.follow_resets(alive)


def _let_go(hooks: weakref.ref[Capture]) -> None:
    alive = hooks()
    if alive is not None:
        alive.let_go()


class MKOR(ShardedOptimizer):
    r"""Momentum-enabled Kronecker-factor-based optimizer with rank-1 updates, and MKOR-H (arXiv 2306.01685).

    Every ``update_interval`` steps the inverses of a layer's two factors move by one rank-1 update each, from the mean
    input ``a`` and the gradient ``g`` of a (virtual) bias; every step the gradient becomes
    :math:`G^{-1} D A^{-1}`, rescaled to the norm of ``D``, and goes to the backend. A layer's bias gradient rides along
    as one more column if weight and bias are in one param group. The owner of a matrix alone keeps its factors.

    The statistics come from module hooks: call :meth:`capture` once with the model. The DeepSpeed plugin does it. With
    rule "sketch" they come from the gradient itself, and there is nothing to capture.

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
    spec_class = MKORSpec
    spec: MKORSpec
    held = (*ShardedOptimizer.held, "needs_capture", "statistics", "factor_steps", "switch", "_first_order", "_factors")

    @options_as_keywords(MKOROptions)
    def __init__(self, params: Any, options: MKOROptions) -> None:
        if options.rule == "paper_literal":
            logger.warning("MKOR: rule='paper_literal' is the printed formula; it amplifies what it should damp.")
        super().__init__(params, options)
        self._first_order, self._factors = self.spec.first_order, self.spec.factors
        self.needs_capture = not options.sketches
        self.statistics = Collector(self.table, self.planner, listens=self.needs_capture)
        self.factor_steps = FactorSteps(options, self.table, self.planner, self.statistics, self.matrix_states)
        self.switch = Switch(options, self.statistics, self.matrix_states, self.planner)

    def __getstate__(self) -> dict[str, Any]:
        self.factor_steps.learn(self.param_groups)
        return super().__getstate__()

    # --- statistics ---------------------------------------------------------------------------------------------

    @undisturbed
    def capture(
        self,
        model: nn.Module,
        window: Any = None,
        loss_scale: Callable[[], float] | None = None,
        last_micro_batch: Callable[[], bool] | None = None,
        describe: Describe = describe_linear,
        averaged_over: ProcessGroup | None = None,
    ) -> None:
        """Hook the model's linear layers. Call once, before the first step.

        With rule "sketch" it need not be called and hooks nothing. It tells which weights are linear and which way they
        lie, as :func:`rankwise.annotate` does, and of a wrapper whose ranks are to divide the matrices among them.

        Args:
            model: The model whose parameters this optimizer updates. A ``DistributedDataParallel`` model also tells
                the optimizer its process group, over which statistics are then reduced and matrices distributed; one
                that is put around the model later is met in the forward pass, and joined as the first step begins.
            window: Callable that identifies the current accumulation window, for a loop that moves gradients elsewhere
                between micro-batches: statistics last as long as the window. By default they last as long as the
                gradients that they belong to, until ``step()``.
            loss_scale: What the loss is multiplied by before ``backward()``, where gradients are unscaled before the
                step. An engine's own scale is known, and ``torch.amp.GradScaler`` tells its own.
            last_micro_batch: Whether the present backward pass is the last before the step; the statistics then travel
                while it runs, otherwise in ``step()``. Known for ``DistributedDataParallel``.
            describe: Recognises linear modules, see :class:`rankwise.statistics.hooks.Capture`.
            averaged_over: Ranks that hold this model alike and whose gradients a loop of your own averages before the
                step, without ``DistributedDataParallel``; a collective of them.

        Raises:
            OptionError: No parameter of this optimizer belongs to a linear module of ``model``.
        """
        self.factor_steps.learn(self.param_groups)
        self.group_changes.replace_parameters(self.param_groups, self.state)
        before = {name: info for name, (info, _) in self.table.catalog.items()}
        how = window, loss_scale, last_micro_batch, describe, averaged_over
        self.statistics.capture(model, self.param_groups, *how)
        if self.statistics.hooks is not None and self.needs_capture:
            # These are weak references, because the model may outlive the optimizer.
            self.statistics.hooks.on_forward = partial(_follow_resets, weakref.ref(self))
            weakref.finalize(self, _let_go, weakref.ref(self.statistics.hooks)).atexit = False
        self.factor_steps.drop_turned(before)
        self.factor_steps.route_captured()
        self.planner.forget()
        self.table.refuse_if_idle(unless_allowed=True)
        self.switch.drop_factors()

    def release(self) -> None:
        """Take the hooks of :meth:`capture` off the model: others will train it."""
        self.statistics.release()

    @contextmanager
    def capture_paused(self) -> Iterator[None]:
        """Let forward and backward passes of the captured model leave no statistics, and losses not count.

        This is for passes whose gradients a step uses, but whose inputs are not those of training. Evaluation,
        penalties by ``torch.autograd.grad``, frozen layers and batches that are thrown away need no pause.
        """
        with self.statistics.paused():
            yield

    @undisturbed_anywhere
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as torch does, and forget the statistics that belong to them."""
        super().zero_grad(set_to_none=set_to_none)
        if not self.statistics.outlast_zero_grad():
            self.statistics.clear()
            # Other losses stay: one may be recorded between the forward pass and this call.
            self.switch.losses.drop_propagated()

    def gradients_unscaled(self, scale: Tensor, is_over: Callable[[], bool]) -> None:
        """Note what a gradient scaler divided this step's gradients by; it does not say when it skips the step.

        Args:
            scale: What this step's gradients have been divided by; the statistics have not been.
            is_over: Whether the scaler is done with this step.
        """
        self.statistics.gradients_unscaled(scale, is_over)

    @undisturbed
    def record_loss(self, loss: Tensor | float, is_propagated: bool = False) -> None:
        """Report a micro-batch's loss to MKOR-H; a step uses the mean over micro-batches and ranks.

        Args:
            loss: Scalar, not multiplied by a loss scale. If it is given with its graph, before its backward pass, it is
                forgotten if that pass's gradients are thrown away.
            is_propagated: Whether its backward pass has run; the loss is then forgotten with its gradients, too.
        """
        self.switch.record(loss, is_propagated)

    @property
    def needs_loss(self) -> bool:
        """Whether steps need losses, as those of MKOR-H do."""
        return self.options.hybrid

    @property
    def switched(self) -> bool:
        """Whether MKOR-H's first-order optimizer has taken over."""
        return self.switch.is_over

    @property
    def further_traffic(self) -> list[Traffic]:
        """The messages that carry statistics."""
        return self.statistics.traffic

    @undisturbed
    def read_health(self) -> dict[str, float]:
        """Return the counters, with ``layers_never_seen``: captured layers of which no input was seen so far."""
        self.factor_steps.learn(self.param_groups)
        return {**super().read_health(), "layers_never_seen": float(self.factor_steps.unheard)}

    # --- plan ---------------------------------------------------------------------------------------------------

    def plan(self, unit: StepUnit) -> Collectives:
        """Plan the owners of the captured matrices, unless the backend has taken over."""
        self.statistics.require()
        self.statistics.follow_exchanged()
        if self.switch.is_over:
            return Collectives()
        table = self.table
        records, window = self.statistics.records, self.options.window
        listens = self.needs_capture
        tasks = matrix_tasks(unit, records, table, window) if listens else uncaptured_tasks(unit, table)
        product = self._factors.product_type(unit.device, unit.dtype)
        # Matrices that lie whole on their owner are then stepped together.
        alone = self._factors.together(unit.device, unit.dtype, product) is not None
        slices = self._slices(unit, tasks)
        tasks = sliced_tasks(tasks, slices)
        self.factor_steps.watch(unit, tasks)
        return self.planner.choose_owners(unit, tasks, slices, alone=alone)

    def _slices(self, unit: StepUnit, tasks: Sequence[MatrixTask]) -> dict[str, SlicedMatrix]:
        """The matrices that ranks compute together, one slice each.

        Of far ranks all must take part: sets of them would wait for one another.
        """
        together = self.planner.together
        signatures = {task.key: task.signature for task in tasks if divisible(task.signature)}
        if together is None or not signatures:
            return {}
        if not together.near and len(together.sets) > 1:
            return {}
        worth, found = partial(self._sends_less, unit), {}
        for key, matrix in find_slices(unit.layout, signatures, together.sets).items():
            # Parts of vectors are put together in the order of the ranks.
            in_order = all(list(ranks) == sorted(set(ranks)) for ranks in matrix.owners)
            if in_order and self.options.window % matrix.count == 0 and (together.near or worth(matrix)):
                found[key] = matrix
        return found

    def _sends_less(self, unit: StepUnit, matrix: SlicedMatrix) -> bool:
        """Whether slices of a matrix send less than gathering it would."""
        shape = list(matrix.shape)
        shape[matrix.axis] *= matrix.count
        wire, block = wire_of(self.options.comm_dtype, unit.dtype), 1 << 10
        together = self.planner.together
        slower = 1.0 if together is None else together.slower_in_pairs
        widths = (*self._widths(unit), slower * wire.bytes_of(block) / block)
        cut = (shape[0], shape[1]), matrix.axis, matrix.count
        return sends_less(self.options.window, *cut, widths, coded_wire(self.options.comm_dtype, unit.dtype))

    def _widths(self, unit: StepUnit) -> tuple[int, int]:
        """Bytes of an element in the sums of products of slices, and in the gathers of vectors."""
        summed = 2 if self.options.comm_dtype else unit.dtype.itemsize
        return summed, getattr(torch, self.options.factor_dtype).itemsize

    def _together(self, unit: StepUnit, batch: Batch) -> tuple[Joint, ...]:
        """The messages between ranks that compute slices together."""
        signature: LayerSignature = batch.signature
        if signature.cut is None:
            return ()
        matrix = signature.window, signature.whole_shape, signature.cut, signature.slices
        wire = coded_wire(self.options.comm_dtype, unit.dtype)
        joint = exchanged(*matrix, self._widths(unit), wire, batch.sliced)
        return joint if self._factors.rescales else joint[:-1]

    def _at_factor_steps(self, unit: StepUnit, batch: Batch) -> tuple[int, ...]:
        """Bytes of the further messages of factor steps: vectors of the side that is cut, and norms for each side."""
        signature: LayerSignature = batch.signature
        if signature.cut is None:
            return ()
        matrices, window = batch.sliced, signature.window
        shape, (_, of_vector) = signature.whole_shape, self._widths(unit)
        sides = [side for side in shape if side <= self.options.max_factor_dim]
        # Of the side that is not cut every step gathers the vectors; exact ones are gathered where those are coded.
        coded = coded_wire(self.options.comm_dtype, unit.dtype) is not None
        exact = [shape[signature.cut], *[shape[1 - signature.cut]] * coded]
        vectors = [matrices * window * side // signature.slices * of_vector for side in exact if side in sides]
        if self.options.stabilizer is None:
            return tuple(vectors)
        of_norm = max(4, of_vector, unit.dtype.itemsize)
        return (*vectors, *([of_norm * matrices] * len(sides)))

    def _unit(self) -> StepUnit:
        self.statistics.join_replicas(self.needs_capture or self.needs_loss)
        if self.factor_steps.has_news:
            self.factor_steps.learn_before(self.planner.find(self.param_groups), self.param_groups)
        self.factor_steps.warn_of_unfrozen()
        self.factor_steps.plan_again(self, self.param_groups)
        return super()._unit()

    def step_costs(self, unit: StepUnit) -> StepCosts:
        """Return the costs of a step: LAMB's norms, the factors, and the vectors of factor steps."""
        tasks = [] if unit.exchange is None else [task for batch in unit.exchange.plan.batches for task in batch.tasks]
        # A layer sends two vectors, its number of tokens and its number of failures.
        elements = sum(
            sum(shape) + 2 for shape in {layer_of(task): task.signature.whole_shape for task in tasks}.values()
        )
        return StepCosts(
            sums=(2,) if self.options.backend == "lamb" else (),
            periodic=self._periodic_messages(unit, elements * unit.dtype.itemsize),
            period=self.options.interval,
            brought=_vectors_of if self.needs_capture else lambda task: 0,
            scratch=ScratchMemory(alone=_scratch_of, stacked=_scratch_of, spends_stack=True),
            together=partial(self._together, unit),
            periodic_together=partial(self._at_factor_steps, unit),
            scalars=(8,) * (bool(tasks) and not unit.layout.all_hold) + (16,) * self.switch.watches(unit),
        )

    def _periodic_messages(self, unit: StepUnit, size: int) -> tuple[int, ...]:
        if self.switch.is_over or not size or not self.needs_capture:
            return ()
        if self.statistics.early is None:
            return (size,)
        # These messages carry the vectors of all units.
        first = unit is next(iter(self.planner.units.values()), unit)
        return self.statistics.early.message_bytes if first else ()

    # --- the step -----------------------------------------------------------------------------------------------

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        self.switch.consider(unit)
        if unit.notes.get(WATCHED) and not self.switch.is_over:
            buckets = self._precondition(unit, buckets)
        else:
            unit.notes.drop(SPACE)
        self._first_order.apply(unit, buckets)

    def _precondition(self, unit: StepUnit, buckets: list[Bucket]) -> list[Bucket]:
        """Replace the gradients of preconditioned matrices by their preconditioned forms.

        Returns:
            Buckets that the first-order rule has yet to step.
        """
        if unit.notes[BEGUN]:
            self.factor_steps.begin_anew(unit, unit.notes[BEGUN], self.param_groups)
        counts = self.factor_steps.counts(unit, self.state)
        due = self.factor_steps.due(counts)
        vectors = self._measured(unit, counts, due) if self.needs_capture else self.factor_steps.sketches(unit, due)
        if unit.exchange is None:
            return buckets
        refuse_stranded(unit, self.matrix_states, "failures")
        fetch_kept_states(unit, self.matrix_states)
        unit.notes[_MOVED] = list(due)
        matrices = StepMatrices(unit, buckets, self.param_groups, self.health)
        holders = partial(self.planner.holders, unit)
        rule = MKORRule(matrices, self._first_order, self._factors, self.matrix_states, vectors, holders)
        step_matrices(rule)
        return rule.remaining()

    def _measured(
        self, unit: StepUnit, counts: Mapping[str, int], due: Mapping[str, int]
    ) -> Mapping[str, LayerVectors]:
        vectors = self.factor_steps.reduced(unit, due, self.param_groups)
        self.factor_steps.drop_statistics(unit)
        self.factor_steps.prepare(unit, counts, self.state)
        return vectors

    def _after_step(self, unit: StepUnit) -> None:
        # Here the device knows whether the step counts.
        return_kept_states(unit, self.matrix_states, unit.notes.drop(_MOVED) or ())

    # --- checkpoints --------------------------------------------------------------------------------------------

    def follow_resets(self) -> None:
        """Follow users who reset states; a step, which calls this too, comes after the statistics of its layers."""
        if self.followed.is_reset(self.state):
            self.factor_steps.miss_unheard()
        super().follow_resets()

    def extra_state(self) -> dict[str, Any]:
        """Return when factors are due, and the state of the hybrid switch."""
        self.factor_steps.learn(self.param_groups)
        extra = {"factor_schedule": self.factor_steps.schedule.state_dict(), "hybrid": self.switch.state_dict()}
        return {**super().extra_state(), **extra}

    def load_extra_state(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`extra_state` gave; after an empty one every matrix is due at its first step.

        Statistics gathered since the last step stay, as the gradients do that they belong to.
        """
        super().load_extra_state(state_dict)
        if not state_dict:
            self.factor_steps.load_schedule({}, self.param_groups)
            self.switch.begin_anew()
            return
        self.switch.losses.clear()
        self.factor_steps.load_schedule(state_dict.get("factor_schedule", {}), self.param_groups)
        self.switch.load_state_dict(state_dict.get("hybrid", {}))


def _vectors_of(task: MatrixTask) -> int:
    """Elements of what a layer's factors follow: an input, an output gradient and the number of tokens."""
    return int(sum(task.signature.whole_shape)) + 1
