"""The matrices of one step: gathered to their owners, updated there and handed back, a batch ahead of the computation.

What is done with them is a :class:`MatrixRule`'s to say; how they get there and in which order is not. The pieces of
batch *k+1* travel while batch *k* is computed, and the results of *k* while *k+1* is. A profiler shows the phases of
batch *k* as ``rankwise: gather k``, ``compute k``, ``return k`` and ``deliver k``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from rankwise.comm.batch_messages import BatchPlan
from rankwise.comm.exchange import Gather, MatrixExchange, Return
from rankwise.comm.host_link import HostLink
from rankwise.comm.owner_plan import Batch, MatrixTask, Reply
from rankwise.plan.step_unit import Bucket, StepUnit
from rankwise.states.matrix_states import MatrixState
from rankwise.step.health import Health

__all__ = ["MatrixRule", "StepMatrices", "phases", "step_matrices"]


_NOTHING = nullcontext()


class StepMatrices(NamedTuple):
    """The matrices of a step.

    Attributes:
        unit: The unit of the step.
        buckets: The shards of all matrices.
        groups: Param groups by position.
        health: Counts the matrices that were updated, and what a rule itself reports.
    """

    unit: StepUnit
    buckets: Sequence[Bucket]
    groups: Sequence[Mapping[str, Any]]
    health: Health


class MatrixRule(ABC):
    """What becomes of a unit's matrices in one step; made for that step, and asked by :func:`step_matrices` alone.

    Shards are known by their index among the unit's entries. A rule finds weights and states by it; it knows no
    message, no order and no form of the kernels.

    Args:
        matrices: The matrices.

    Attributes:
        on_device: Gives a matrix's states as :meth:`update` is to use them.
    """

    def __init__(self, matrices: StepMatrices) -> None:
        self.unit, self.buckets, self.groups, self.health = matrices
        self._borrowed: dict[str, dict[str, Tensor]] = {}
        # No method of this object: a rule that held itself would keep gradients until the next garbage collection.
        self.on_device = partial(_copies_or_own, self._borrowed)

    @cached_property
    def weights(self) -> dict[int, Tensor]:
        """The weights of the shards, by their index."""
        return self.by_shard(lambda bucket: bucket.weights)

    def by_shard(self, values_of: Callable[[Bucket], Sequence[Tensor]]) -> dict[int, Tensor]:
        """What a function has for the shards of each bucket, by the shards' index."""
        return {
            entry.index: value
            for bucket in self.buckets
            for entry, value in zip(bucket.entries, values_of(bucket), strict=True)
        }

    def listed(self, values: Mapping[int, Tensor]) -> list[Tensor | None]:
        """Values by shard as :meth:`gather` may return them."""
        found: list[Tensor | None] = [None] * len(self.unit.entries)
        for index, value in values.items():
            found[index] = value
        return found

    @abstractmethod
    def gather(self, in_place: Collection[int]) -> Sequence[Tensor | None]:
        """What the owners need of every shard; asked first, so that weights can be prepared.

        Args:
            in_place: The shards of matrices that :meth:`step_in_place` will be asked about.

        Returns:
            Per local shard its 1-D values, which must stay as they are; None for shards of no matrix, and for
            those without a gradient. A matrix without any values is left out of the step.
        """

    def states(self, task: MatrixTask) -> MatrixState:
        """The states that :meth:`update` computes with, and that it changes in place.

        Where the host keeps them and another device computes, :meth:`on_device` has copies there of all that the host
        does not count with.
        """
        return {}

    def changes_states(self, task: MatrixTask) -> bool:
        """Whether :meth:`update` changes what :meth:`states` has of a matrix in this step."""
        return True

    @contextmanager
    def borrowing(self, copies: Mapping[str, dict[str, Tensor]]) -> Iterator[None]:
        """Use copies of states, by matrix, in a context."""
        self._borrowed.update(copies)
        try:
            yield
        finally:
            self._borrowed.clear()

    def reply(self, batch: Batch) -> Reply:
        """What the holders of a batch's matrices get of the results, alike on all ranks: their own elements."""
        return Reply()

    @abstractmethod
    def update(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor, spent: bool = False) -> Tensor:
        """Advance matrices that this rank owns.

        Args:
            batch: To which they belong.
            tasks: Those of its tasks that this rank owns and that have values, at least one.
            stack: (tasks, elements), what was gathered.
            spent: Whether the stack may be written to, and be what is returned; else it is read only.

        Returns:
            (tasks, result length), of which :meth:`reply` says what it is.
        """

    @abstractmethod
    def step(self, batch: Batch, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        """Step shards of this rank: all of a batch that were gathered, now that their results have arrived.

        Args:
            batch: To which they belong.
            indices: Indices of the shards, at least one.
            results: What :meth:`reply` says, for each; valid during the call only.
        """

    def step_in_place(self, matrices: Sequence[BatchPlan]) -> Sequence[BatchPlan]:
        """Update and step matrices that this rank alone has where they lie.

        Args:
            matrices: At least one. Each is the one task of its batch; its ``local`` pieces are its shards, part by
                part, of which some have values. The same list object at every step at which no shard lacks them.

        Returns:
            Those that are to be updated and stepped like all others.
        """
        return matrices


def step_matrices(rule: MatrixRule) -> None:
    """Step all matrices of a rule's unit, if any rank has some; all ranks call this alike.

    Args:
        rule: What is to become of them.

    Raises:
        RuntimeError: The rule gathers nothing of a shard that another rank waits for.
    """
    if rule.unit.exchange is not None:
        _MatrixStep(rule.unit.exchange, rule).run()


def phases(batches: int) -> Iterator[tuple[str, int]]:
    """What a step does with which of its batches, in this order.

    "gather" and "return" begin a message; "compute" waits for the gathered pieces, "deliver" for the results. "in
    place" is of the matrices that need no message.

    Args:
        batches: How many travel.
    """
    for number in range(batches):
        if number == 0:
            yield "gather", 0
        if number + 1 < batches:
            yield "gather", number + 1
        yield "compute", number
        if number > 0:
            # Before more leaves: the memory of one batch's results is there at a time.
            yield "deliver", number - 1
        yield "return", number
    yield "in place", batches
    if batches:
        yield "deliver", batches - 1


class _Loan(NamedTuple):
    """States of a batch's matrices that the host lends to the device which computes.

    Attributes:
        states: The host's, by matrix and name.
        copies: The device's.
        arrived: When they are there.
    """

    states: dict[str, dict[str, Tensor]]
    copies: dict[str, dict[str, Tensor]]
    arrived: Any


class _MatrixStep:
    """One run of a rule over the batches of an exchange, which come in one order on all ranks.

    Where the host lends matrices to a device, what a batch changes is written when all of its results are on the host:
    a matrix has the states and the weights of before, or those of after.
    """

    def __init__(self, exchange: MatrixExchange, rule: MatrixRule) -> None:
        self._exchange, self._rule, self._link = exchange, rule, exchange.link
        self._sources = rule.gather(exchange.in_place_shards)
        self._missing = rule.unit.missing()
        self._loans: dict[int, _Loan] = {}
        self._rows: dict[int, tuple[int, ...]] = {}

    def run(self) -> None:
        batches = self._exchange.batches
        # Of those in which nobody else takes part, some may have no values; the others keep their order on all ranks.
        idle = [self._is_idle(plan) for plan in batches] if self._link is not None else ()
        arriving: dict[int, Gather] = {}
        results: dict[int, Tensor] = {}
        returning: dict[int, Return] = {}
        for phase, number in phases(len(batches)):
            if phase == "in place":
                self._step_in_place()
            elif idle and idle[number]:
                continue
            elif phase == "gather":
                arriving[number] = self._gather(batches[number])
            elif phase == "compute":
                results[number] = self._computed(batches[number], arriving.pop(number))
            elif phase == "return":
                returning[number] = self._return(batches[number], results.pop(number))
            else:
                self._deliver(returning.pop(number))

    def _gather(self, plan: BatchPlan) -> Gather:
        with _profiled(plan.labels["gather"]):
            gather = self._exchange.start_gather(plan, self._sources, self._missing)
            if self._link is not None and plan.owned:
                self._lend(plan, self._link)
            return gather

    def _lend(self, plan: BatchPlan, link: HostLink) -> None:
        """Send the states of a batch's matrices to the device, behind their values."""
        states = {plan.owned[row].key: self._lent(plan.owned[row]) for row in self._live(plan)}
        with link.upward():
            brought = iter(link.bring([value for state in states.values() for value in state.values()]))
            copies = {key: {name: next(brought) for name in state} for key, state in states.items()}
            self._loans[id(plan)] = _Loan(states, copies, link.record())

    def _lent(self, task: MatrixTask) -> MatrixState:
        names = [name for name, how in self._rule.unit.stored_states(task).items() if not how.state.counted]
        state = self._rule.states(task) if names else {}
        return {name: state[name] for name in names}

    def _is_idle(self, plan: BatchPlan) -> bool:
        return not (plan.gathers or plan.returns or self._live(plan))

    def _live(self, plan: BatchPlan) -> tuple[int, ...]:
        """Places of the owned matrices of which any part has values, which stay so for all of the step."""
        if id(plan) not in self._rows:
            self._rows[id(plan)] = self._exchange.live_rows(plan, self._sources, self._missing)
        return self._rows[id(plan)]

    def _computed(self, plan: BatchPlan, arriving: Gather) -> Tensor:
        stack = self._exchange.finish_gather(plan, arriving)
        with _profiled(plan.labels["compute"]):
            if not plan.owned:
                return stack
            loan = self._loans.get(id(plan))
            if loan is None or self._link is None:
                return self._updated(plan, stack, not arriving.is_source)
            self._link.take(loan.arrived, (value for copies in loan.copies.values() for value in copies.values()))
            with self._rule.borrowing(loan.copies):
                return self._updated(plan, stack, True)

    def _return(self, plan: BatchPlan, result: Tensor) -> Return:
        with _profiled(plan.labels["return"]):
            return self._exchange.start_return(plan, result, self._rule.reply(plan.batch))

    def _updated(self, plan: BatchPlan, stack: Tensor, spent: bool) -> Tensor:
        live = self._live(plan)
        if len(live) == len(plan.owned):
            return self._of_rule(plan.batch, plan.owned, stack, spent)
        if not live:
            # Nobody reads it, but the message has the size that was planned.
            reply = self._rule.reply(plan.batch)
            return stack.new_zeros(len(plan.owned), reply.whole or reply.values * plan.length)
        index = self._exchange.indices.of(live)
        found = self._of_rule(plan.batch, [plan.owned[row] for row in live], stack.index_select(0, index), True)
        return found.new_zeros(len(plan.owned), found.shape[1]).index_copy_(0, index, found)

    def _of_rule(self, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor, spent: bool) -> Tensor:
        result = self._rule.update(batch, tasks, stack, spent)
        self._count(batch, tasks)
        return result.to(stack.dtype)

    def _count(self, batch: Batch, tasks: Sequence[MatrixTask]) -> None:
        if not batch.partners:
            self._rule.health.add("matrices_updated", len(tasks))
        elif self._rule.unit.layout.rank == batch.partners[0]:
            # Slices that several ranks compute together: one of them counts for all.
            self._rule.health.add("matrices_updated", len({task.whole for task in tasks}))

    def _deliver(self, returning: Return) -> None:
        with _profiled(returning.plan.labels["deliver"]):
            found = self._exchange.finish_return(returning, self._sources)
            if self._link is not None:
                self._take_back(returning, self._link)
            if found:
                indices, results = zip(*found, strict=True)
                self._rule.step(returning.plan.batch, indices, results)

    def _take_back(self, returning: Return, link: HostLink) -> None:
        """Write the states that a batch has changed, once they are on the host."""
        loan = self._loans.pop(id(returning.plan), None)
        if loan is None:
            return
        tasks = [task for task in returning.plan.owned if task.key in loan.states and self._rule.changes_states(task)]
        lent = [(loan.states[task.key][name], copy) for task in tasks for name, copy in loan.copies[task.key].items()]
        with link.downward(returning.computed):
            fetched = link.fetch([copy for _, copy in lent])
        for (state, _), value in zip(lent, fetched, strict=True):
            state.copy_(value)

    def _step_in_place(self) -> None:
        """Matrices that lie whole here."""
        sources, matrices = self._sources, self._exchange.in_place
        if [shard for shard in self._exchange.in_place_shards if sources[shard] is None]:
            matrices = [plan for plan in matrices if any(sources[piece.shard] is not None for piece in plan.local)]
        if not matrices:
            return
        with _profiled("rankwise: compute in place"):
            rest = self._rule.step_in_place(matrices)
        for plan in rest:
            self._deliver(self._return(plan, self._computed(plan, self._gather(plan))))
        if len(rest) < len(matrices):
            self._rule.health.add("matrices_updated", len(matrices) - len(rest))


def _profiled(label: str) -> AbstractContextManager[Any]:
    """A profiler's range; nothing, at no cost, where none runs."""
    return record_function(label) if profiler._is_profiler_enabled else _NOTHING


def _copies_or_own(borrowed: Mapping[str, dict[str, Tensor]], task: MatrixTask, state: MatrixState) -> MatrixState:
    copies = borrowed.get(task.key)
    return state if copies is None else {**state, **copies}
