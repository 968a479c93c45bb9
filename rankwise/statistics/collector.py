"""The collector takes MKOR's statistics from the hooks and makes vectors of them that all ranks agree on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rankwise.comm.message_format import Traffic
from rankwise.kernels.host_copies import HostCopy
from rankwise.layout.front_ends import framework_advice
from rankwise.options.validation import OptionError
from rankwise.plan.planner import Planner
from rankwise.plan.step_unit import StepUnit
from rankwise.states.parameter_table import Groups, ParameterTable
from rankwise.statistics.backward_passes import adds_to_any
from rankwise.statistics.backward_reduction import BackwardReduction, twin_group
from rankwise.statistics.factor_vectors import LayerVectors, layer_vectors, reduce_statistics
from rankwise.statistics.grad_scalers import watch_gradient_scalers
from rankwise.statistics.hooks import Capture, Describe
from rankwise.statistics.linear_views import LinearView, seen_by, views_of
from rankwise.statistics.window_sums import Record, clear

__all__ = ["Collector", "Reduced"]

logger = logging.getLogger(__name__)


class Reduced(NamedTuple):
    """Statistics of some matrices over all ranks.

    Attributes:
        vectors: Vectors of each matrix.
        numbers: (2, matrices), sums of the ranks' reports of each matrix, and its numbers of tokens.
    """

    vectors: dict[str, LayerVectors]
    numbers: HostCopy


class Collector:
    """Hooks a model's linear layers and hands over their statistics.

    Args:
        table: The optimizer's parameters and their rules.
        planner: The optimizer's units and framework.
        listens: Whether layers are hooked; otherwise a capture learns only which layers there are.

    Attributes:
        hooks: Hooks of the captured model; None before :meth:`capture`.
        records: Records of every captured matrix, by the name of its parameter.
        early: Sends statistics while the backward pass runs; None: they travel within the step.
    """

    def __init__(self, table: ParameterTable, planner: Planner, listens: bool = True) -> None:
        self._table, self._planner, self.listens = table, planner, listens
        self.hooks: Capture | None = None
        self.records: dict[str, Record] = {}
        self.early: BackwardReduction | None = None
        self._names_window = False
        self._loss_scale: Callable[[], float] | None = None
        self._last_micro_batch: Callable[[], bool] | None = None
        self._unscaled_by: Tensor | None = None
        self._twin: tuple[ProcessGroup, ProcessGroup] | None = None
        self._pauses = 0
        self._met: nn.parallel.DistributedDataParallel | None = None
        self._wrapper: nn.parallel.DistributedDataParallel | None = None
        self._told_of_ranks = False
        self._meet_uncompiled = self._meet

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy must capture anew: which model it belongs to is not known.
        return type(self), (self._table, self._planner, self.listens)

    # --- hooks --------------------------------------------------------------------------------------------------

    def capture(
        self,
        model: nn.Module,
        groups: Groups,
        window: Any,
        loss_scale: Callable[[], float] | None,
        last_micro_batch: Callable[[], bool] | None,
        describe: Describe,
        averaged_over: ProcessGroup | None,
    ) -> None:
        """Hook the layers whose weights take the matrix rule; :meth:`rankwise.MKOR.capture` describes the arguments.

        Args:
            model: A plain model, or one in a ``DistributedDataParallel``.
            groups: The optimizer's param groups.
            window: Identifies the accumulation window.
            loss_scale: Returns what the loss is multiplied by.
            last_micro_batch: Whether the present backward pass is the last before the step.
            describe: Recognises linear modules.
            averaged_over: Group over which the user averages gradients.
        """
        table = self._table
        table.exchanged = {}
        self._last_micro_batch = last_micro_batch
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self._join(model)
            model = model.module
        elif averaged_over is not None:
            self._planner.attach(table.plain.replicated_over(averaged_over))
        self._loss_scale = loss_scale
        watch_gradient_scalers()
        table.learn_roles(model, groups)
        self._planner.forget()
        self._planner.source.watch(model)
        names = {id(parameter): name for name, parameter in table.parameters.items()}

        def wanted(module: nn.Module, parameter: nn.Parameter) -> bool:
            name = names.get(id(parameter))
            return self.listens and name is not None and table.routes[name].rule == "matrix"

        self.release()
        # This is done here, not in the class's body, because the compiler takes as long to import as torch.
        self._meet_uncompiled = torch.compiler.disable(self._meet)
        place_and_ways = self._planner.source.alike()

        def views(module: nn.Module) -> list[LinearView]:
            return seen_by(views_of(module, describe(module)), place_and_ways)

        self._names_window = window is not None
        self.hooks = Capture(model, wanted, window, views, self._keeps)
        self.hooks.paused = self._pauses > 0
        self.hooks.on_training_forward = self._find_replicas
        self.records = {names[id(parameter)]: record for parameter, record in self.hooks.records.items()}
        self.early = self.hooks.listener = self._reduce_early()

    def follow_exchanged(self) -> None:
        """Replace captured parameters by those that took their place; the sums stay.

        Raises:
            OptionError: Ranks share a layer since the capture, which the hooks do not account for.
        """
        exchanged, self._table.exchanged = self._table.exchanged, {}
        if not exchanged or self.hooks is None or not self.listens:
            return
        source = self._planner.source
        self.hooks.replace_parameters(exchanged)
        if self.hooks.root is not None:
            source.watch(self.hooks.root)
        if source.alike() != (0, 1):
            raise OptionError(
                "MKOR: the captured model is invalid: it must not be cut by tensor parallelism after the capture; "
                "call optimizer.capture(model) after it is cut"
            )

    def require(self) -> None:
        """Refuse to go on without a captured model.

        Raises:
            OptionError: No model was captured.
        """
        if self.hooks is None and self.listens:
            raise OptionError(
                "MKOR has no statistics to precondition with: call optimizer.capture(model) before the first step (a "
                f"copied or unpickled optimizer's, too), or {framework_advice()}, which does it."
            )

    def release(self) -> None:
        """Take the hooks off the model."""
        if self.hooks is not None:
            self.hooks.remove()

    def put_back(self) -> None:
        """Put the hooks on again."""
        if self.hooks is not None:
            self.hooks.attach()

    def clear(self) -> None:
        """Forget what was seen since the last step."""
        if self.hooks is not None:
            self.hooks.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let nothing count inside the context."""
        self._pause(1)
        try:
            yield
        finally:
            self._pause(-1)

    def _pause(self, change: int) -> None:
        self._pauses += change
        if self.hooks is not None:
            self.hooks.paused = self._pauses > 0

    @property
    def is_paused(self) -> bool:
        """Whether nothing counts for the time being."""
        return self._pauses > 0

    def listen_to(self, keys: Collection[str], in_company: bool) -> None:
        """Collect the statistics of some matrices only, as :meth:`rankwise.statistics.hooks.Capture.listen_to` says."""
        assert self.hooks is not None
        self.hooks.listen_to([self.records[key] for key in keys], in_company)

    def listen_to_all(self) -> None:
        """Collect the statistics of all matrices."""
        if self.hooks is not None:
            self.hooks.listen_to_all()

    def window_id(self) -> Any:
        """Return the identifier of the present accumulation window; None where nobody names windows."""
        return None if self.hooks is None else self.hooks.window_id()

    def adds_to_gradients(self) -> bool:
        """Whether the backward pass that runs now adds to the gradient of a parameter."""
        return adds_to_any(self._table.parameters.values())

    def keeps_gradients(self) -> bool:
        """Whether the next backward pass adds to a gradient that an earlier one has left at some parameter."""
        for parameter in self._table.parameters.values():
            kept = self._keeps(parameter)
            if parameter.grad is not None if kept is None else kept:
                return True
        return False

    def outlast_zero_grad(self) -> bool:
        """Whether a framework keeps gradients that ``zero_grad()`` does not reach, and the next pass would add to."""
        keeps = self._planner.source.keeps_gradient
        return any(keeps(record.parameter) for record in self.records.values())

    def _keeps(self, parameter: Tensor) -> bool | None:
        """Say what :meth:`LayoutSource.keeps_gradient` says; True if windows are named, as gradients may be moved."""
        if self._names_window and self._planner.is_plain:
            return True
        return self._planner.source.keeps_gradient(parameter)

    def gradients_unscaled(self, scale: Tensor, is_over: Callable[[], bool]) -> None:
        """Note what a gradient scaler has divided this step's gradients by, and how to see that the step is over."""
        self._unscaled_by = scale
        if self.hooks is not None:
            self.hooks.is_over = is_over

    def _join(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Learn over which ranks a wrapper averages gradients, and in which backward passes."""
        self._wrapper = wrapper
        self._planner.attach(self._table.plain.replicated_over(wrapper.process_group))
        self._last_micro_batch = self._last_micro_batch or partial(getattr, wrapper, "require_backward_grad_sync")

    def _find_replicas(self, weights: Sequence[nn.Parameter]) -> None:
        """Remember the wrapper that runs these layers, where the model inside it was captured."""
        if self._planner.source.group is None and self._met is None:
            wrapper = nn.parallel.DistributedDataParallel._active_ddp_module
            if wrapper is not None:
                self._meet_uncompiled(wrapper, weights)

    def _meet(self, wrapper: nn.parallel.DistributedDataParallel, weights: Sequence[nn.Parameter]) -> None:
        """Remember a wrapper if it averages these weights; compilers leave this out, as it handles process groups."""
        if wrapper.process_group.size() > 1:
            replicated = {id(parameter) for parameter in wrapper.parameters()}
            if any(id(weight) in replicated for weight in weights):
                self._met = wrapper

    def join_replicas(self, learns: bool) -> None:
        """Join the wrapper that was met, if any, as a step begins; a collective then.

        Args:
            learns: Whether steps depend on more of a rank's batches than gradients.

        Raises:
            OptionError: A rank has taken a step before, or ranks may stop at different steps; all ranks raise.
        """
        self._refuse_uneven(self._wrapper or self._met)
        wrapper, self._met = self._met, None
        if self._planner.source.group is not None:
            return
        if wrapper is None:
            if learns and not self._told_of_ranks:
                self._tell_of_ranks_apart()
            return
        device = next(iter(self.records.values())).parameter.device
        begun = torch.tensor(float(bool(self._planner.units)), dtype=torch.float32, device=device)
        dist.all_reduce(begun, group=wrapper.process_group)
        if begun:
            raise OptionError(
                "MKOR: the captured model was wrapped in a DistributedDataParallel after the first step: every rank "
                "would precondition the same gradients by the statistics of its own batch, and the copies drift "
                "apart. Wrap the model before the first step, or call optimizer.capture(ddp_model) after wrapping it."
            )
        assert self.hooks is not None
        self._join(wrapper)
        self.early = self.hooks.listener = self._reduce_early()

    def _refuse_uneven(self, wrapper: nn.parallel.DistributedDataParallel | None) -> None:
        """Refuse a loop in which ranks that are done answer the wrapper's messages, but nobody ours."""
        how = getattr(wrapper, "_join_config", None)
        if how is not None and how.enable and not how.throw_on_early_termination:
            raise OptionError(
                "MKOR: a step within DistributedDataParallel.join() is invalid: all ranks must take as many steps, "
                "because they share the matrices out; give every rank as many batches, or write "
                "join(throw_on_early_termination=True). To torch a wrapper stays within it after the block: for steps "
                "outside, wrap the model again and call optimizer.capture(ddp_model)"
            )

    def _tell_of_ranks_apart(self) -> None:
        """Say once that no ranks are known that average gradients: if some do, their copies would drift apart."""
        # FSDP2 finds out its ranks when a step is planned.
        whole = self._planner.is_plain and not self._planner.source.missing_alike
        ranks = dist.get_world_size() if dist.is_initialized() and whole else 1
        if ranks > 1:
            self._told_of_ranks = True
            logger.warning(
                "MKOR: no DistributedDataParallel is known, so each of the %d ranks learns statistics and losses of "
                "its own batches alone. If gradients are averaged over ranks, copies drift apart: write "
                "capture(ddp_model), or capture(model, averaged_over=group) where you average them yourself. If ranks "
                "train models of their own, nothing is wrong.",
                ranks,
            )

    def _reduce_early(self) -> BackwardReduction | None:
        group, is_last = self._planner.source.group, self._last_micro_batch
        if is_last is None or group is None or group.size() == 1 or not self.records:
            return None
        if self._twin is None or self._twin[0] is not group:
            self._twin = (group, twin_group(group))
        before = None if self.early is None or self.early.group is not self._twin[1] else self.early
        return BackwardReduction(self.records, self._twin[1], is_last, before)

    # --- sums ---------------------------------------------------------------------------------------------------

    @property
    def traffic(self) -> list[Traffic]:
        """The messages that this rank has sent outside its units."""
        return [] if self.early is None else [self.early.traffic]

    def reduced(
        self, unit: StepUnit, keys: Sequence[str], first: bool, own_report: Callable[[str], Tensor | None]
    ) -> Reduced:
        """Return statistics over all ranks; a collective unless they have travelled already.

        Args:
            unit: The present unit.
            keys: Matrices of the unit.
            first: Whether the unit is the first of its round.
            own_report: This rank's report of a matrix that it owns, 0-d; None for others.
        """
        assert self.hooks is not None
        divisor = self._gradient_divisor(unit)
        if first and self._planner.is_plain:
            self.hooks.drop_thrown_away(in_step=True)
        if self.early is not None:
            sums = self.early.take(keys, first, own_report)
            like = torch.empty(0, dtype=unit.dtype, device=unit.device)
            vectors_of_sums = [layer_vectors(a.to(like), tokens.to(like), g.to(like), divisor) for a, tokens, g in sums]
            numbers = [[numbers[key] for key in keys] for numbers in (self.early.failures, self.early.tokens)]
            # The host has these numbers: it had to learn whether the sums of a bucket have changed since it left.
            host_numbers = torch.tensor(numbers, dtype=torch.float32, device="cpu")
            return Reduced(dict(zip(keys, vectors_of_sums, strict=True)), HostCopy(host_numbers))
        records = [self.records[key] for key in keys]
        vectors, packed = reduce_statistics(unit, records, [own_report(key) for key in keys], divisor)
        clear(records)
        return Reduced(dict(zip(keys, vectors, strict=True)), HostCopy(packed))

    def forget_results(self) -> None:
        """Drop results of an earlier round, as a round begins: in the first one nobody knows which unit is its last."""
        if self.early is not None:
            self.early.forget_results()

    def drop(self, keys: Sequence[str]) -> list[str]:
        """Drop what was gathered for a step, so that it is not added to the statistics of the next one.

        Args:
            keys: Matrices to drop the sums of.

        Returns:
            The matrices whose tokens nobody has taken.
        """
        assert self.hooks is not None
        self._unscaled_by = self.hooks.is_over = None
        records = [self.records[key] for key in keys]
        seen = [key for key, record in zip(keys, records, strict=True) if record.count]
        clear(records)
        if self.early is not None:
            self.early.dropped(records)
        return seen

    def _gradient_divisor(self, unit: StepUnit) -> float | Tensor:
        """Return what the framework divides summed gradients by: the number of ranks, times the loss scale."""
        source = self._planner.source
        divisor = source.gradient_divisor()
        if divisor is not None:
            return divisor
        averaged = source.averaged_over()
        ranks = unit.layout.world_size if averaged is None else averaged
        scale = source.loss_scale() if self._loss_scale is None else self._loss_scale()
        if scale is not None:
            return ranks * float(scale)
        # A scaler may have divided gradients of a step that it then skipped; that scale is over.
        if self._unscaled_by is not None and self.hooks is not None and self.hooks.is_over is not None:
            return ranks * self._unscaled_by.to(unit.device)
        return ranks
