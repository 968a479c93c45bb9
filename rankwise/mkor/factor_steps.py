"""This module decides which steps move which factors, on which statistics, and what becomes of unused layers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.kernels.host_copies import HostCopy
from rankwise.mkor.factor_schedule import FactorSchedule
from rankwise.mkor.layer_signature import layer_of
from rankwise.mkor.options import MKOROptions
from rankwise.mkor.sketches import Sketches, sign_table
from rankwise.mkor.vector_windows import is_identity
from rankwise.plan.notes import Note
from rankwise.plan.planner import Planned, Planner
from rankwise.plan.step_unit import StepUnit
from rankwise.routing.roles import ParameterInfo
from rankwise.states.element_states import States
from rankwise.states.matrix_states import MatrixStates
from rankwise.states.parameter_table import Groups, ParameterTable
from rankwise.statistics.collector import Collector
from rankwise.statistics.factor_vectors import GLIMPSE, LayerVectors, refuse_broken_factors
from rankwise.statistics.hooks import has_compiled

__all__ = ["WATCHED", "FactorSteps"]

logger = logging.getLogger(__name__)

_FROZEN = "frozen when capture() was called; call it again once it is trained"
_COMPILED = (
    ", or torch.compile reuses code that it compiled for a module of the same class without hooks (compile and run "
    "others after this one, or set torch._dynamo.config.skip_nnmodule_hook_guards = False)"
)


WATCHED: Note[list[str]] = Note("matrices whose statistics the unit's steps look at")
_TENSORS: Note[dict[str, Tensor]] = Note("their tensors, where those are parameters")
_AWAITED: Note[list[str]] = Note("those that are listened to for the next step")
_CERTAIN: Note[bool] = Note("whether the next step will want what is listened to")
_STALE: Note[bool] = Note("whether a matrix has changed its rule since the unit was planned")
_SIGNS: Note[Tensor] = Note("table of the signs of sketches")


class _News(NamedTuple):
    """A factor step of which the host has yet to learn.

    Attributes:
        unit: Unit that took the step.
        counts: Numbers of the step by matrix.
        numbers: Reports and numbers of tokens, as :class:`rankwise.statistics.collector.Reduced` has them.
    """

    unit: StepUnit
    counts: dict[str, int]
    numbers: HostCopy


class FactorSteps:
    """Follows the schedule of every matrix and learns from its factor steps.

    Args:
        options: Options of MKOR.
        table: The parameters and their rules.
        planner: The planner of the units.
        statistics: Collector of statistics, which is told what is due.
        matrix_states: Factors of this rank.

    Attributes:
        schedule: Says when factors are due.
    """

    def __init__(
        self,
        options: MKOROptions,
        table: ParameterTable,
        planner: Planner,
        statistics: Collector,
        matrix_states: MatrixStates,
    ) -> None:
        self.schedule = FactorSchedule(options.interval)
        self._options, self._table, self._planner = options, table, planner
        self._statistics, self._matrix_states = statistics, matrix_states
        self._frozen: set[str] = set()
        # Whether a bias's gradient rode along with a matrix when it was planned last.
        self._rides_along: dict[str, bool] = {}
        # Matrices that begin anew, but for which nothing was gathered for this step.
        self._unheard: set[str] = set()
        self._news: list[_News] = []
        self._failures: dict[str, float] = {}
        # Whose count of failures is a matrix's: its own, or that of its first slice.
        self._reports: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy has captured no model.
        return {**vars(self), "_frozen": set()}

    # --- rules --------------------------------------------------------------------------------------------------

    def route_captured(self) -> None:
        """Send weights that no linear module uses to the fallback, after a capture."""
        if not self._statistics.listens:
            return
        table, records = self._table, self._statistics.records
        unused = [name for name, chosen in table.routes.items() if chosen.rule == "matrix" and name not in records]
        self._frozen = {name for name in unused if not table.parameters[name].requires_grad}
        for name in unused:
            table.send_to_fallback([name], _FROZEN if name in self._frozen else "no linear module uses it")
        self._route_left_out()

    def drop_turned(self, before: Mapping[str, ParameterInfo]) -> None:
        """Drop the factors of weights that turn out to be transposed, or to hold several matrices.

        Args:
            before: Catalog entries of the parameters before the capture, by name.
        """
        for name, (info, _) in self._table.catalog.items():
            if (info.transposed, info.fused) != (before[name].transposed, before[name].fused):
                self._matrix_states.pop(name, None)

    def _route_left_out(self) -> None:
        left_out = self.schedule.left_out.intersection(self._statistics.records)
        self._table.send_to_fallback(left_out, "no input was seen: its module has not been called")

    def warn_of_unfrozen(self) -> None:
        """Warn once of parameters that were frozen when the model was captured and are trained by now."""
        thawed = [name for name in sorted(self._frozen) if self._table.parameters[name].requires_grad]
        if thawed:
            self._frozen.difference_update(thawed)
            logger.warning(
                "MKOR: %s was frozen when capture() was called and uses %s alone; call optimizer.capture(model) again "
                "to give it factors.",
                ", ".join(thawed),
                self._options.backend,
            )

    def plan_again(self, optimizer: Planned, groups: Groups) -> None:
        """Plan units anew if some of their matrices have changed their rule.

        That happens between two rounds of steps, so that all units of a round are planned by one set of routes.
        """
        planner = self._planner
        for key, old in [(key, unit) for key, unit in planner.units.items() if unit.notes.get(_STALE)]:
            self._drop_untouched(sorted(self.schedule.left_out.intersection(old.layout.shapes)))
            position_of = {identity: position for position, *members in key for identity in members}
            positions = [position_of[id(tensor)] for tensor in old.tensors]
            new = planner.new_unit(optimizer, groups, old.tensors, positions, old.planned_groups)
            new.traffic.add(old.total_traffic)

    def _drop_untouched(self, keys: Sequence[str]) -> None:
        """Drop the states of matrices that are left out if their factors are still the identity."""
        for task, state in list(self._matrix_states.items()):
            if self._table.base_name(task) in keys and all(map(is_identity, state, state.values())):
                self._matrix_states.pop(task)

    # --- when ---------------------------------------------------------------------------------------------------

    def watch(self, unit: StepUnit, tasks: Sequence[MatrixTask]) -> None:
        """Plan which statistics the unit's steps look at: those of its matrices and of layers that are left out.

        A weight that has joined its bias's param group, or left it, starts its factors anew, as their sides differ.
        """
        self._reports |= {layer_of(task): task.key for task in reversed(tasks)}
        rode = {task.key: self._rides_along.get(task.key, task.signature.has_bias) for task in tasks}
        self._matrix_states.drop([task.key for task in tasks if rode[task.key] != task.signature.has_bias])
        self._rides_along.update((task.key, task.signature.has_bias) for task in tasks)
        left_out = self.schedule.left_out.intersection(unit.layout.shapes, self._statistics.records)
        keys = sorted({layer_of(task) for task in tasks} | left_out)
        places = dict(unit.key_tensors)
        if unit.tensors and not places and unit.missing_alike:
            places = {entry.key: entry.shard.tensor for entry in unit.entries}
        unit.notes[WATCHED] = keys
        unit.notes[_TENSORS] = {key: unit.tensors[places[key]] for key in keys} if places else {}

    def counts(self, unit: StepUnit, states: States) -> dict[str, int]:
        """Return the number of this step for every watched matrix that takes it."""
        if not unit.missing_alike:
            return dict.fromkeys(unit.notes[WATCHED], unit.common_step(states))
        tensors = unit.notes[_TENSORS]
        return {key: int(states[tensor]["step"]) for key, tensor in tensors.items() if tensor.grad is not None}

    def begin_anew(self, unit: StepUnit, keys: Sequence[str], groups: Groups) -> None:
        """Note that some matrices of the unit take their first step again, as users have reset their states.

        Args:
            unit: Unit of the step.
            keys: Names of the matrices.
            groups: The optimizer's param groups.
        """
        self.learn(groups)
        self.schedule.forget(keys)
        self._unheard.update(set(keys).difference(keys if (awaited := unit.notes.get(_AWAITED)) is None else awaited))

    def miss_unheard(self) -> None:
        """Note, between a backward pass and its step, which matrices were not listened to and so cannot begin yet."""
        for unit in self._planner.units.values():
            if _AWAITED in unit.notes:
                self._unheard.update(set(unit.notes[WATCHED]).difference(unit.notes[_AWAITED]))

    def due(self, counts: Mapping[str, int]) -> dict[str, int]:
        """Return the matrices whose factors move at this step, with their numbers of the step."""
        for key in self._unheard.intersection(counts):
            self._unheard.discard(key)
            self.schedule.put_off(key, counts[key] + 1)
        return {key: count for key, count in counts.items() if self.schedule.is_due(key, count)}

    def prepare(self, unit: StepUnit, counts: Mapping[str, int], states: States) -> None:
        """Listen to what may be due at the next step."""
        tensors = unit.notes[_TENSORS]
        awaited = []
        for key in unit.notes[WATCHED]:
            count = counts[key] if key in counts else int(states.get(tensors[key], {}).get("step", 0))
            # A factor step that turns out to have been undone is repeated.
            again = self._options.skip_nonfinite and self.schedule.is_due(key, count)
            if again or self.schedule.is_due(key, count + 1):
                awaited.append(key)
        # Vectors leave early only if the next step will want them; a layer that is unused now may stay so.
        unit.notes[_CERTAIN] = any(key in counts for key in awaited)
        unit.notes[_AWAITED] = sorted({*awaited, *self.schedule.missed.intersection(unit.notes[WATCHED])})
        units = list(self._planner.units.values())
        keys_of_units = [other.notes.get(_AWAITED if _AWAITED in other.notes else WATCHED) or () for other in units]
        keys = [key for unit_keys in keys_of_units for key in unit_keys]
        self._statistics.listen_to(keys, any(other.notes.get(_CERTAIN) is not False for other in units))

    # --- statistics ---------------------------------------------------------------------------------------------

    def reduced(self, unit: StepUnit, counts: Mapping[str, int], groups: Groups) -> dict[str, LayerVectors]:
        """Return statistics over all ranks for some matrices of the unit.

        Args:
            unit: Unit of the step.
            counts: Numbers of the step for these matrices.
            groups: The optimizer's param groups.

        Raises:
            RuntimeError: A matrix's factors have failed too often, and the host learns of it at once.
        """
        first = unit is next(iter(self._planner.units.values()))
        if first:
            self._statistics.forget_results()
        if not counts:
            return {}
        statistics = self._statistics.reduced(unit, list(counts), first, self._own_report)
        self._news.append(_News(unit, dict(counts), statistics.numbers))
        if statistics.numbers.is_here:
            self.learn(groups)
            self._refuse_broken()
        return statistics.vectors

    def sketches(self, unit: StepUnit, due: Mapping[str, int]) -> Sketches:
        """Return what makes vectors for some matrices of the unit from their gradients.

        Args:
            unit: Unit of the step.
            due: Numbers of the step for these matrices.
        """
        table = unit.notes.get(_SIGNS)
        if table is None:
            longest = max(max(unit.parameters[key].info.matrix_shape) for key in unit.notes[WATCHED])
            table = unit.notes[_SIGNS] = sign_table(longest, unit.work_device, unit.dtype)
        return Sketches(due, table, self._options.decay, self._options.interval)

    def learn_before(self, unit: StepUnit | None, groups: Groups) -> None:
        """Learn from the factor steps of the last round as the next one begins.

        Args:
            unit: Unit to be stepped; None if it has yet to be planned.
            groups: The optimizer's param groups.

        Raises:
            RuntimeError: A matrix's factors have failed too often.
        """
        if unit is None or any(unit is news.unit for news in self._news):
            self.learn(groups)
        self._refuse_broken()

    def learn(self, groups: Groups) -> None:
        """Learn from all factor steps so far, for which the host may have to wait; steps raise for broken factors.

        Args:
            groups: The optimizer's param groups.
        """
        while self._news:
            self._note(self._news.pop(0), groups)

    def _refuse_broken(self) -> None:
        failures, self._failures = self._failures, {}
        refuse_broken_factors(list(failures), list(failures.values()))

    def drop_statistics(self, unit: StepUnit) -> None:
        """Drop statistics of a step that took none, which must not be added to those of the next one."""
        seen = self._statistics.drop(unit.notes[WATCHED])
        self.schedule.glimpsed.update(self.schedule.missed.intersection(seen))

    def _own_report(self, key: str) -> Tensor | None:
        """Return what this rank adds to the report on a matrix: failures if it is the owner, and a glimpse."""
        failures = self._matrix_states.get(self._reports.get(key, key), {}).get("failures")
        if key not in self.schedule.glimpsed:
            return failures
        device = self._statistics.records[key].sum_input.device
        return torch.full((), GLIMPSE, dtype=torch.float32, device=device) + (
            0 if failures is None else failures.to(device)
        )

    def _note(self, news: _News, groups: Groups) -> None:
        """Learn from a factor step; the numbers are sums over all ranks, which therefore come to one decision."""
        unit, counts = news.unit, news.counts
        schedule, keys = self.schedule, list(counts)
        reports, tokens = news.numbers.read()
        missed = set(schedule.missed)
        self._failures |= {key: float(int(report)) for key, report in zip(keys, reports, strict=True)}
        for key, report, number in zip(keys, reports, tokens, strict=True):
            schedule.note(key, counts[key], number > 0, report % 1 > 0)
        self._warn_of_replaced(unit, schedule.missed - missed)
        silent = sorted(counts.keys() - schedule.heard - schedule.left_out)
        regained = sorted(schedule.left_out & schedule.heard)
        if silent and unit.layout.rank == 0:
            logger.warning(
                "MKOR: no input was seen of %s, so the update is that of %s alone: a weight is used without calling "
                "its module (as nn.MultiheadAttention uses out_proj)%s, or it is not used yet. It gets factors once "
                "its module is called.",
                ", ".join(silent),
                self._options.backend,
                _COMPILED if has_compiled() else "",
            )
        if silent or regained:
            schedule.left_out = (schedule.left_out | set(silent)) - set(regained)
            self._take_back(regained, groups)
            for other in self._planner.units.values():
                # The unit of the step may have been planned anew since, so that all units are looked at.
                if any(key in other.layout.shapes for key in (*silent, *regained)):
                    other.notes[_STALE] = True

    def _warn_of_replaced(self, unit: StepUnit, missed: Collection[str]) -> None:
        """Warn of layers that a step has missed for the first time because other modules use their weights now."""
        hooks = self._statistics.hooks
        if not missed or hooks is None or unit.layout.rank != 0:
            return
        replaced = hooks.replaced()
        names = [key for key in sorted(missed) if self._table.parameters[key] in replaced]
        if names:
            logger.warning(
                "MKOR: %s: another module than when capture() was called uses the weight now, of which nothing is "
                "heard: its factors stay as they are; call optimizer.capture(model) again.",
                ", ".join(names),
            )

    def _take_back(self, found: Sequence[str], groups: Groups) -> None:
        """Route matrices again as their options ask."""
        for name in found:
            self._table.route_by(groups, name)
        self._route_left_out()

    @property
    def has_news(self) -> bool:
        """Whether the host has yet to learn from factor steps, or to raise for failures."""
        return len(self._news) + len(self._failures) > 0

    @property
    def unheard(self) -> int:
        """Number of captured layers of which no input was seen so far."""
        return len(self._statistics.records.keys() - self.schedule.heard)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def load_schedule(self, state: Mapping[str, Any], groups: Groups) -> None:
        """Take over when factors are due.

        Args:
            state: Result of :meth:`FactorSchedule.state_dict`.
            groups: The optimizer's param groups.
        """
        self._statistics.listen_to_all()
        self._news.clear()
        self._failures.clear()
        before = set(self.schedule.left_out)
        self.schedule.load_state_dict(state)
        for unit in self._planner.units.values():
            unit.notes.drop(_AWAITED)
            unit.notes.drop(_CERTAIN)
        if self.schedule.left_out != before:
            self._take_back(sorted(before - self.schedule.left_out), groups)
            self._planner.forget()
