"""The torch class of all optimizers: it holds what a step needs, and runs one."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rankwise.comm import local_groups as local_groups  # keeps torch from holding the default group for ever
from rankwise.comm.message_format import Traffic
from rankwise.kernels import graphs
from rankwise.kernels.surroundings import undisturbed
from rankwise.layout.even_cuts import EvenCuts
from rankwise.layout.layout_source import LayoutSource, TensorContents, TensorParallel
from rankwise.options.fields import Options
from rankwise.options.validation import OptionError, called_or
from rankwise.plan.group_changes import GroupChanges
from rankwise.plan.planner import Planner
from rankwise.plan.step_costs import StepCosts
from rankwise.plan.step_unit import Bucket, Collectives, StepUnit
from rankwise.plan.transition import Transition
from rankwise.routing.given_parameters import refuse_given_twice
from rankwise.routing.roles import annotated_modules
from rankwise.routing.step_groups import PEAK, rate_of
from rankwise.saving.saved_states import SavedStates
from rankwise.saving.states_by_parameter import REPLICA, asked_by_torchft
from rankwise.states.element_states import StateTypes
from rankwise.states.group_values import GroupValues
from rankwise.states.matrix_states import MatrixState, MatrixStates
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.states.param_remainders import refuse_unless_narrow
from rankwise.states.parameter_table import ParameterTable
from rankwise.step.followed_states import MARKED, FollowedStates
from rankwise.step.reports import Explanation, Reports, health_of
from rankwise.step.undo import Undo
from rankwise.step.working_tensors import WorkingTensors, are_deferred

__all__ = ["ShardedOptimizer", "living_optimizers", "refuse_replicas"]


def _rule_of(kind: type) -> str:
    """Name of the class that declares the states; subclasses that declare nothing else share it."""
    return next(base for base in kind.__mro__ if "spec_class" in vars(base)).__name__


class ShardedOptimizer(Optimizer, ABC):
    """Base of all rankwise optimizers.

    Element states (one value per parameter element) live in ``self.state`` with the shape of the tensor the framework
    handed over, so that its checkpoints carry them. Matrix states live in ``self.matrix_states``, by parameter name, on
    their owner, or on the rank that keeps them for it. What torch keeps and replaces (``param_groups``, ``state``) is
    handed to the objects below at every call; none of them knows the optimizer.

    Args:
        params: Parameters, ``(name, parameter)`` pairs or param groups.
        options: Values of the optimizer's options.
        extra_defaults: Values of param groups that are no options.

    Attributes:
        options: Values of the optimizer's options.
        spec: Routes and states of parameters that follow from the options.
        table: Names and rules of the parameters.
        matrix_states: States of the matrices this rank owns.
        health: Counters that steps add to.
        values: Checks the values that param groups set.
        undo: Takes steps back whose gradients are not finite.
        planner: Units, owners, and the framework's layout.
        group_changes: Follows changes of param groups.
        transition: The transition from another optimizer, if there was one.
        followed: Follows what users do to ``state``.
        working_tensors: Begins and ends steps.
        saved: Saves and restores.
        reports: Describes the other objects to users.
    """

    options_type: ClassVar[type[Options]]
    spec_class: ClassVar[type[OptimizerSpec]]
    """Class of the routes and states that follow from the options."""
    held: ClassVar[tuple[str, ...]] = (
        "spec",
        "options",
        "table",
        "matrix_states",
        "health",
        "values",
        "undo",
        "planner",
        "group_changes",
        "transition",
        "followed",
        "working_tensors",
        "saved",
        "reports",
    )
    """Attributes that ``copy.deepcopy`` and ``pickle`` take along besides torch's own."""

    def __init__(self, params: Any, options: Options, extra_defaults: Mapping[str, Any] | None = None) -> None:
        spec = self.spec_class(_rule_of(type(self)), options)
        defaults = {name: getattr(spec.options, name) for name in spec.group_options}
        if spec.step_groups.independent:
            defaults[PEAK] = float(options.lr)
        # A generator may hold the last reference to its model, whose annotations are needed below.
        models = annotated_modules() if isinstance(params, Iterator) else ()
        super().__init__(params, {**defaults, **(extra_defaults or {})})
        self.spec, self.options = spec, options
        self.table = ParameterTable(spec)
        self.matrix_states = MatrixStates()
        self.health = health_of(spec)
        self.values = GroupValues(spec, self.defaults)
        self.undo = Undo(spec, self.matrix_states, self.health)
        self.planner = Planner(spec, self.table, self.values, self.matrix_states, self.undo.settle)
        self.group_changes = GroupChanges(self.planner)
        self.transition = Transition()
        self.followed = FollowedStates(self.planner, self.transition)
        self.working_tensors = WorkingTensors(self.planner, self.transition, self.followed)
        self.saved = SavedStates(self.planner)
        self.reports = Reports(self.planner, self.health)
        for index, group in enumerate(self.param_groups):
            self.values.validate(group)
            self._take_in(index)
        del models
        self.table.refuse_if_idle(unless_allowed=True)
        self.table.refuse_unmatched()
        if options.store_param_remainders:
            refuse_unless_narrow(spec.name, self.table.parameters.values())
        self.values.warn_of_tiny()
        _living[id(self)] = self

    def __getstate__(self) -> dict[str, Any]:
        self.undo.settle()
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.held}}

    # --- what only some rules need from a training loop ---------------------------------------------------------

    needs_capture: bool = False
    """Whether the rule learns from what the layers of the model compute; see :meth:`capture`."""

    @property
    def needs_loss(self) -> bool:
        """Whether the rule learns from the loss; see :meth:`record_loss`."""
        return False

    @property
    def switched(self) -> bool:
        """Whether another rule, which needs neither capture nor loss, has taken over for good."""
        return False

    def capture(self, model: nn.Module, *how: Any, **hooks: Any) -> None:
        """Watch the model's layers, where the rule needs it; see :meth:`rankwise.MKOR.capture`."""

    def release(self) -> None:
        """Undo :meth:`capture`."""

    def capture_paused(self) -> AbstractContextManager[None]:
        """Stop watching the model's layers in a context, see :meth:`rankwise.MKOR.capture_paused`. It may be nested."""
        return nullcontext()

    def record_loss(self, loss: Tensor | float, is_propagated: bool = False) -> None:
        """Report a micro-batch's loss, where the rule needs it; see :meth:`rankwise.MKOR.record_loss`."""

    # --- what a subclass adds -----------------------------------------------------------------------------------

    @abstractmethod
    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        """Update weights and states in place."""

    def plan(self, unit: StepUnit) -> Collectives:
        """Plan the unit's own collectives once, and with :attr:`planner` the owners of its matrices."""
        return Collectives()

    def step_costs(self, unit: StepUnit) -> StepCosts:
        """Costs of a step of a planned unit beyond its layout, owners and states, for estimates."""
        return StepCosts()

    def _before_step(self, unit: StepUnit) -> None:
        """Refuse a step before any state changes."""

    def _judged(self, unit: StepUnit, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Tensors that must be finite for a step to count."""
        return [grad for grad in grads if grad is not None]

    def _after_step(self, unit: StepUnit) -> None:
        """Act after a step, when weights and states are updated."""

    @property
    def further_traffic(self) -> list[Traffic]:
        """Messages that this rank has sent outside its units."""
        return []

    def extra_state(self) -> dict[str, Any]:
        """Plain data that belongs to no weight, element state or matrix state."""
        return self.transition.state_dict()

    def load_extra_state(self, state_dict: Mapping[str, Any]) -> None:
        """Restore :meth:`extra_state`; an empty dictionary begins anew."""
        self.transition.load_state_dict(state_dict)

    # --- param groups -------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and route its parameters; see :class:`torch.optim.Optimizer`.

        Raises:
            OptionError: A value of the group is outside its range.
        """
        if isinstance(param_group, dict):
            refuse_given_twice(called_or(type(self).__name__), param_group, self.param_groups)
            lr = rate_of(param_group.get("lr"))
            if PEAK in self.defaults and (isinstance(lr, int | float) or (isinstance(lr, Tensor) and not lr.dim())):
                param_group.setdefault(PEAK, float(lr))
        if "table" not in vars(self):
            # torch's constructor calls this; ours registers the groups when it is done.
            super().add_param_group(param_group)
            return
        if isinstance(param_group, dict):
            self.values.validate(param_group)
        super().add_param_group(param_group)
        try:
            self._take_in(len(self.param_groups) - 1)
        except OptionError:
            self.param_groups.pop()
            raise
        self.planner.forget()

    @property
    def step_groups(self) -> Sequence[dict[str, Any]]:
        """Views of the param groups that a step reads, see :class:`rankwise.routing.step_groups.StepGroups`."""
        return self.spec.step_groups.views(self.param_groups)

    def _take_in(self, index: int) -> None:
        group = self.param_groups[index]
        self.values.refuse_without_peak(group)
        self.table.refuse_unreadable(group)
        self.table.add_group(self.param_groups, index)
        self.values.accept(self.param_groups[index])

    def reroute(self) -> None:
        """Route again by what is known of the parameters now; see :func:`rankwise.routing.roles.annotate`.

        Parameters get the names of the annotation. Does nothing once there are states, which are kept by name.

        Raises:
            OptionError: No parameter takes this optimizer's own rule any more.
        """
        if self.state or self.matrix_states.everything():
            return
        self.planner.owner_of.clear()
        self.table.name_again(self.param_groups)
        self.planner.forget()
        self.table.refuse_if_idle(unless_allowed=True)
        self.table.refuse_unmatched()

    # --- frameworks ---------------------------------------------------------------------------------------------

    def attach(self, source: LayoutSource) -> None:
        """Tell the optimizer what a framework stores in the tensors that ``step()`` will find."""
        self.planner.attach(source)

    @undisturbed
    def plan_ahead(self, units: Sequence[Sequence[tuple[Tensor, int]]]) -> None:
        """Plan every ``step()`` call before the first one.

        Args:
            units: For each call, the tensors it will find in ``param_groups`` and the positions of their groups there.
        """
        self.planner.plan_ahead(self, self.param_groups, units)

    @property
    def planned_units(self) -> Sequence[StepUnit]:
        """The units planned so far, one for each ``step()`` call of a round."""
        return list(self.planner.units.values())

    def imagine(
        self,
        units: Sequence[Sequence[Sequence[TensorContents]] | EvenCuts],
        replicated: bool = False,
        spends_gradients: bool | None = None,
        offloaded: bool = False,
        together: TensorParallel | None = None,
    ) -> list[StepUnit]:
        """Plan for ranks that need not exist; nothing of this optimizer changes. See :meth:`Planner.imagine`."""
        how = replicated, self.plan, spends_gradients, offloaded, together
        return self.planner.imagine(self.param_groups, units, *how)

    # --- the step -----------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters from their gradients, by products in the full precision of their type.

        Args:
            closure: Evaluates the model again and returns the loss.

        Returns:
            The closure's value, if given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if self.needs_loss and (isinstance(loss, float) or (isinstance(loss, Tensor) and loss.numel() == 1)):
                self.record_loss(loss, is_propagated=True)
        if not are_deferred():
            self._step()
        return loss

    @undisturbed
    def _step(self) -> None:
        self.saved.forget_consolidated()
        self.follow_resets()
        unit = self._unit()
        self.saved.deliver(unit)
        if not graphs.is_capturing(unit.device):
            self.planner.source.agree_on_missing(unit.tensors)
        if self._is_warm_up(unit):
            return
        if self.working_tensors.counts_on_device(unit):
            self.health.accumulate_on(unit.device)
        self.working_tensors.refuse_frozen(unit, self.param_groups)
        self.undo.settle(unit)
        self._before_step(unit)
        opened = self.working_tensors.open(unit, self.state)
        if opened is not None:
            weights, grads = opened

            def update(finite: Sequence[Tensor | None]) -> None:
                with unit.stepping(self.state):
                    buckets = self.working_tensors.buckets(unit, self.state, self.param_groups, weights, finite)
                    with self.transition.ramp(buckets):
                        self._update(unit, buckets)

            if self.options.skip_nonfinite:
                self.undo.update(unit, self.state, weights, grads, self._judged(unit, grads), update)
            else:
                update(grads)
            self.working_tensors.close(unit, self.state, weights)
            if not unit.notes.get(MARKED):
                self.saved.mark(self.param_groups, self.state, states_too=self.planner.source.missing_alike)
                unit.notes[MARKED] = True
            self._after_step(unit)
            if unit is next(iter(self.planner.units.values())):
                self.health.add("steps", 1.0)
            if unit.exchange is not None:
                plan = unit.exchange.plan
                self.matrix_states.drop_foreign(plan.owners, unit.layout.rank, plan.keepers)

    def _is_warm_up(self, unit: StepUnit) -> bool:
        """Whether this step only makes states: torch's checkpoint functions take one at rate 0 on zero gradients.

        It does not count as a step, and changes nothing else.
        """
        idle = not self.state and self.planner.is_plain and not any(float(rate_of(g["lr"])) for g in self.param_groups)
        if not idle or graphs.is_capturing(unit.device) or not self.working_tensors.are_all_zero(unit):
            return False
        self.working_tensors.make_states(unit, self.state)
        for task in unit.exchange.owned() if unit.exchange is not None else ():
            self.matrix_states.obtain(task.key, partial(unit.fresh_states, task))
        self.saved.mark(self.param_groups, self.state)
        return True

    def _unit(self) -> StepUnit:
        """Return the unit of this call; plan it if need be."""
        unit = self.planner.find(self.param_groups)
        if unit is None:
            self.group_changes.replace_parameters(self.param_groups, self.state)
        if self.group_changes.follow(unit, self.param_groups, self.state) or unit is None:
            self.followed.drop_orphans(self.state)
            return self.planner.plan_present(self, self.param_groups)
        # This is the second step of the unit, so every group has been planned.
        self.reports.announce_once(self.state)
        return unit

    # --- checkpoints --------------------------------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """Class and structural choices of the optimizer; a checkpoint's states fit if they agree."""
        return self.spec.identity

    def settle(self) -> None:
        """Take back the step counts of steps that were undone."""
        self.undo.settle()

    @undisturbed
    def state_dict(self) -> dict[str, Any]:
        """Return torch's dictionary with this rank's matrix states by parameter name.

        Where ranks hold the parameters alike (``DistributedDataParallel``), the owners' states are collected first;
        every rank must then call this, or all :meth:`consolidate_state_dict` before one does. torchft's manager gets
        what this rank has, without a collective, for the same rank of another replica.
        """
        self.undo.settle()
        if self.planner.is_plain and asked_by_torchft():
            self.followed.drop_orphans(self.state)
            result = super().state_dict()
            result["state"] = self.saved.as_saved(result, self.param_groups, self.state)
            return self.saved.for_replica(result, self.param_groups, self.extra_state())
        self.follow_resets()
        self.followed.drop_orphans(self.state)
        self.group_changes.replace_parameters(self.param_groups, self.state)
        regrouped = len(self.planner.units) > 0 and self.planner.find(self.param_groups) is None
        if regrouped and self.planner.is_plain and self.spec.matrix_states and not self.saved.is_consolidated:
            # Planning drops states that the next step would begin anew, so that they are not saved.
            self._unit()
        self.saved.refuse_apart(self.param_groups, self.state)
        result = super().state_dict()
        result["state"] = self.saved.as_saved(result, self.param_groups, self.state)
        beside = self.saved.beside_torch(result, self.param_groups)
        extra = self.extra_state()
        if self.planner.is_plain:
            matrices = beside["matrix_states"]
            if self.saved.is_cut and self.state:
                if not self.planner.units:
                    self.planner.plan_present(self, self.param_groups)
                matrices, beside["matrix_states"] = self.saved.shared_matrices(), {}
            result = self.saved.under_parameters(result, self.param_groups, matrices, extra)
        return {**result, **beside, **extra}

    @undisturbed
    def consolidate_state_dict(self) -> None:
        """Collect what only owners of matrices have, so that one rank alone can call :meth:`state_dict`.

        Every rank must call this, after the last step and before that rank's :meth:`state_dict`; as in
        :class:`torch.distributed.optim.ZeroRedundancyOptimizer`. The result is kept until the next step.
        """
        self.undo.settle()
        self.saved.consolidate()

    @undisturbed
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a dictionary; matrix states go to their present owners.

        Parameters that were saved in another order are found by their names where both sides have them. States keep
        the type they were saved with until the next step, which brings them to its own.

        Raises:
            ValueError: Another optimizer has written it, or for other parameters; nothing has changed then.
        """
        self.group_changes.replace_parameters(self.param_groups, self.state)
        before_loading, after_loading = (
            self._optimizer_load_state_dict_pre_hooks,
            self._optimizer_load_state_dict_post_hooks,
        )
        state_dict = dict(state_dict)
        for hook in before_loading.values():
            state_dict = hook(self, state_dict) or state_dict
        by_parameter = "rankwise" not in state_dict
        state_dict = self.saved.fit.fitted(state_dict, self.param_groups)
        if REPLICA in state_dict:
            refuse_replicas(self)
        before = self.spec.structures_of(self.param_groups)
        # Hooks must see the whole dictionary, and the one that is checked must be the one that is loaded.
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        try:
            super().load_state_dict({**state_dict, "state": {key: {} for key in state_dict["state"]}})
        finally:
            self._optimizer_load_state_dict_pre_hooks = before_loading
            self._optimizer_load_state_dict_post_hooks = after_loading
        self.saved.restore(state_dict, self.param_groups, self.state)
        self.saved.mark(self.param_groups, self.state, states_too=by_parameter)
        if self.spec.structures_of(self.param_groups) != before:
            self.planner.route_again(self.param_groups)
        self.saved.restore_matrices(state_dict)
        self.followed.accept(self.state)
        self.load_extra_state(state_dict)
        for hook_after in after_loading.values():
            hook_after(self)

    @undisturbed
    def continue_from(self, state_dict: Mapping[str, Any]) -> str:
        """Continue the run of torch.optim's AdamW or Muon, or of another optimizer with AdamW's states.

        Weights are the model's, and stay. Averages of the gradient and of its square are taken over where they mean the
        same here; whatever else this optimizer keeps starts afresh, and its updates grow to full size over
        ``transition_steps`` steps. Rates and other options stay this optimizer's.

        Args:
            state_dict: That optimizer's dictionary, of as many groups of as many parameters.

        Returns:
            What goes on and what starts afresh, in one line, which is also logged.

        Raises:
            TypeError: ``state_dict`` is no dictionary.
            ValueError: It has other parameters, or is one of ours; nothing has changed then.
        """
        self.undo.settle()
        translated, told = self.saved.succession.translated(state_dict, self.param_groups)
        self.load_state_dict({**self.extra_state(), **translated})
        return told

    @undisturbed
    def hand_over(self, adamw: Optimizer) -> None:
        """Let an optimizer with AdamW's states go on from here.

        Args:
            adamw: Optimizer of the same parameters in the same groups; its own options stay.

        Raises:
            ValueError: It has other parameters; nothing has changed then.
        """
        self.undo.settle()
        alone = all(unit.layout.world_size == 1 for unit in self.planned_units)
        matrices = self.matrix_states.everything() if alone else {}
        states = self.saved.opened(self.param_groups, self.state)
        self.saved.succession.hand_over(self.param_groups, states, matrices, self.transition, adamw)

    @undisturbed
    def adopt(
        self,
        matrix_states: Mapping[str, MatrixState],
        steps: Mapping[int, Tensor],
        extra: Mapping[str, Any],
        fill: Callable[[], None] | None = None,
    ) -> None:
        """Take over matrix states, step counts by group and extra state from another layout's checkpoint.

        Args:
            matrix_states: Matrix states that this rank owns or keeps, by matrix.
            steps: Counts by param group.
            extra: Result of :meth:`extra_state`.
            fill: Writes weights and element states, and what is given here, once the present states are dropped; None
                where all are written already.

        Raises:
            MisfitError: A state is not of the shape of its matrix; without ``fill`` nothing has changed then.
        """
        if fill is not None:
            units = [list(zip(u.tensors, (c.group for c in u.contents), strict=True)) for u in self.planned_units]
            self.forget_states()
            if not self.planned_units:
                # Forgotten, as other parameters are matrices than before; what is filled lies where plans say.
                self.plan_ahead(units)
            fill()
        self.undo.settle()
        self.saved.adopt(self.state, matrix_states, steps)
        self.followed.accept(self.state)
        self.load_extra_state(extra)

    @undisturbed
    def forget_states(self) -> None:
        """Drop all states, on all ranks alike: the next step is a first one, as after ``state.clear()``."""
        self.undo.settle()
        self.saved.forget(self.state)
        self.followed.accept(self.state)
        self.load_extra_state({})

    def follow_resets(self) -> None:
        """Drop all other states, too, where a user has emptied ``state``."""
        if self.followed.is_reset(self.state):
            if not isinstance(self.state, defaultdict):
                self.state = defaultdict(dict)
            if self.followed.agree("everything"):
                self.forget_states()
            else:
                self.followed.put_back(self.state, list(self.followed.counts))

    def kept_states(self, name: str) -> StateTypes:
        """The element states that a parameter's rule keeps, the same on every rank.

        Raises:
            KeyError: The optimizer has no such parameter.
        """
        info, index = self.table.catalog[name]
        return self.table.element_states(info, self.table.routes[name].rule, self.param_groups[index])

    @undisturbed
    def stored_states(self, tensor: Tensor, name: str, state: str) -> list[tuple[int, Tensor]]:
        """Find an element state of one parameter; see :meth:`SavedStates.stored_states`."""
        return self.saved.stored_states(self.param_groups, self.state, tensor, name, state)

    # --- reports ------------------------------------------------------------------------------------------------

    @undisturbed
    def read_health(self) -> dict[str, float]:
        """Metrics since the last reading; every data-parallel rank must call it.

        Returns:
            Per step: ``matrices_updated``, ``collectives`` and ``bytes_sent`` (summed over ranks); ``skipped_steps``,
            the calls of ``step()`` that ``skip_nonfinite`` undid; and the optimizer's own metrics.
        """
        return self.reports.read_health(self.further_traffic)

    def explain(self) -> list[Explanation]:
        """One line per parameter: its rule, the reason, its owner, and bytes of optimizer state on this rank."""
        self.group_changes.replace_parameters(self.param_groups, self.state)
        return self.reports.explain(self.state)

    def summary(self) -> str:
        """One line: matrices routed, balance over owners, type of their products, state and bytes sent of this rank."""
        return self.reports.summary(self.state)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of optimizer state this rank holds: ``{"element": …, "matrix": …}``."""
        return self.reports.state_bytes(self.state)

    def owners(self) -> dict[str, int]:
        """Owner rank of every planned matrix."""
        return self.planner.owners()


def refuse_replicas(optimizer: ShardedOptimizer) -> None:
    """Refuse to be one of torchft's replicas, which average nothing but gradients, where steps depend on more.

    Raises:
        OptionError: Steps depend on the layers' statistics, or on the loss.
    """
    if optimizer.needs_capture or optimizer.needs_loss:
        raise OptionError(
            f"{called_or(optimizer.spec.name)} is invalid under torchft: its replicas average gradients, but not "
            f"{'statistics of layers' if optimizer.needs_capture else 'losses'}, by which their weights would drift "
            "apart; write rule='sketch' without hybrid, which learns from gradients alone, or leave torchft out"
        )


_living: weakref.WeakValueDictionary[int, ShardedOptimizer] = weakref.WeakValueDictionary()


def living_optimizers() -> list[ShardedOptimizer]:
    """Every living optimizer, for frameworks to notice that one of ours was replaced."""
    # All at once: other threads may build more meanwhile.
    found = [reference() for reference in _living.valuerefs()]
    return [optimizer for optimizer in found if optimizer is not None]
