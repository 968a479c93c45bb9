"""LDAdam: Adam in a low-dimensional subspace that follows the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rankwise.kernels import graphs, native
from rankwise.kernels.lists import copy_, decay_
from rankwise.ldadam import formulas as updates
from rankwise.ldadam.declared import LDAdamDeclared
from rankwise.ldadam.forms import step_for
from rankwise.ldadam.fragments import Fragments, Signature, split_factors
from rankwise.ldadam.in_place import SubspacesInPlace
from rankwise.ldadam.joint import holders_of, step_slices
from rankwise.ldadam.on_device import Triple, step_on_device
from rankwise.ldadam.options import LDAdamOptions
from rankwise.ldadam.slices import Cut, exchanged
from rankwise.options.constructor import options_as_keywords
from rankwise.options.validation import OptionError
from rankwise.sharding import Batch, MatrixTask, Reply, find_slices
from rankwise.step.first_order import adamw_step
from rankwise.step.matrix_states import MatrixState
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.unit import Bucket, StepUnit
from rankwise.step.work import StepWork

__all__ = ["LDAdam"]

_TENSORS = ("basis", "exp_avg", "exp_avg_sq")
_Past = tuple[int, float] | None
"""Steps that a matrix has taken, and the ``beta1`` of the last; None: only the device knows, but not a first step."""


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
    declares = LDAdamDeclared
    declared: LDAdamDeclared
    held = (*ShardedOptimizer.held, "_unstepped")
    one_by_one = True

    @options_as_keywords(LDAdamOptions)
    def __init__(self, params: Any, options: LDAdamOptions) -> None:
        super().__init__(params, options)
        # Matrices that are to take their first step, which is another one; the counts may lie on the device.
        self._unstepped: set[str] = set()

    def read_health(self) -> dict[str, float]:
        """See the base class; ``kept_bases``, of a capturable optimizer: where no new basis could be factored."""
        found = super().read_health()
        if not self.declared.capturable:
            found.pop("kept_bases")
        return found

    def plan(self, unit: StepUnit) -> None:
        """See the base class: every matrix, or its slices."""
        keys = unit.keys("matrix")
        tensor_parallel = self.planner.source.tensor_parallel
        slices = find_slices(unit.layout, keys, tensor_parallel.sets) if tensor_parallel else {}
        if slices and self.declared.capturable:
            raise OptionError(
                "LDAdam: capturable=True is invalid under tensor parallelism: it must be false where ranks compute the "
                "slices of a matrix together, which the host directs; set capturable to false"
            )
        tasks = []
        for key in keys:
            rows, columns = unit.infos[key].matrix_shape
            position = unit.group_position[key]
            rank = updates.effective_rank(unit.planned_groups[position]["rank"], rows, columns)
            cost = float(10 * rows * columns * rank + 6 * max(rows, columns) * rank**2)
            right = updates.projects_right(rows, columns)
            if key not in slices:
                tasks.append(MatrixTask(key, (key,), Signature(rows, columns, rank, position, right), cost))
                continue
            matrix = slices[key]
            cut: Cut = "long" if right == (matrix.axis == 0) else "short"
            signature = Signature(*matrix.shape, rank, position, right, cut)
            tasks += [MatrixTask(part, (part,), signature, cost / matrix.count, key) for part in matrix.parts]
        self.planner.choose_owners(unit, tasks, slices)

    def work(self, unit: StepUnit) -> StepWork:
        """See the base class: the returned factors, and what owners of slices tell each other."""

        def matrix_state(task: MatrixTask, device: torch.device) -> MatrixState:
            return self._fresh(torch.empty(0, dtype=unit.dtype, device=device), task.signature)

        def together(batch: Batch) -> tuple[int, ...]:
            signature: Signature = batch.signature
            if signature.cut is None:
                return ()
            matrices = len({task.whole for task in batch.tasks})
            sizes = exchanged(signature.cut, signature.short, signature.long, signature.rank)
            return tuple(matrices * size for size in sizes)

        return StepWork(
            reply=partial(self._reply, unit), matrix_state=matrix_state, together=together, cut_states=_cut_states
        )

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        fragments = Fragments(unit)
        later = unit.exchange.alone if unit.exchange is not None and unit.kernels is native else ()
        for bucket in buckets:
            group = bucket.group
            if bucket.rule == "fallback":
                adamw_step(unit, bucket)
                continue
            decay_(bucket.weights, group["lr"], group["weight_decay"])
            errors = bucket.state("error") if group["error_feedback"] else None
            fragments.add(bucket.entries, bucket.weights, bucket.grads, errors, later)
        if unit.exchange is not None:
            self._follow_subspaces(unit, fragments)

    def _follow_subspaces(self, unit: StepUnit, fragments: Fragments) -> None:
        assert unit.exchange is not None
        one_by_one = unit.exchange.one_by_one

        def compute(batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
            signature: Signature = batch.signature
            group = self.param_groups[signature.group]
            states = [self._subspace(task.key, stack, signature) for task in tasks]
            returned = partial(_returned, self._reply(unit, batch), signature)
            if batch.partners:
                return returned(self._step_slices(unit, batch, tasks, stack, states))
            self.health.add("matrices_updated", len(tasks))
            matrices = stack.view(-1, signature.rows, signature.columns)
            matrices = matrices.mT if signature.right else matrices
            pasts = [self._past(unit, task.key, state) for task, state in zip(tasks, states, strict=True)]
            self._unstepped.difference_update(task.key for task in tasks)
            if one_by_one:
                # Also where they came as a stack: then a matrix is rounded alike wherever it lies.
                spans = [slice(index, index + 1) for index in range(len(tasks))]
                parts = [
                    self._step_subspaces(matrices[span], states[span], past, group)
                    for span, past in zip(spans, pasts, strict=True)
                ]
                return returned(torch.cat(parts))
            if len(set(pasts)) == 1:
                return returned(self._step_subspaces(matrices, states, pasts[0], group))
            result = stack.new_empty(len(tasks), self._factors_length(batch.signature))
            # Matrices whose gradients were missing at different steps are at different counts.
            for past in dict.fromkeys(pasts):
                chosen = [i for i, other in enumerate(pasts) if other == past]
                part = [states[i] for i in chosen]
                result[chosen] = self._step_subspaces(matrices[chosen], part, past, group)
            return returned(result)

        def delivered(batch: Batch) -> None:
            as_factors = self._reply(unit, batch).whole is not None
            fragments.step(batch.signature, as_factors, self.param_groups[batch.signature.group]["lr"])

        def plainly(task: MatrixTask, index: int, source: Tensor) -> None:
            signature: Signature = task.signature
            state = self._subspace(task.key, source, signature)
            matrix = updates.side_normalized(source.view(1, signature.rows, signature.columns))
            past = self._past(unit, task.key, state)
            factors = self._step_subspaces(matrix, [state], past, self.param_groups[signature.group])
            fragments.receive(task, index, factors[0])
            fragments.step(signature, True, self.param_groups[signature.group]["lr"])

        def obtained(task: MatrixTask, source: Tensor) -> MatrixState:
            self.health.add("matrices_updated", 1)
            state = self._subspace(task.key, source, task.signature)
            self._unstepped.discard(task.key)
            return state

        in_place = SubspacesInPlace(fragments, self.param_groups, obtained, plainly)
        replies, at_once = partial(self._reply, unit), in_place.take if unit.kernels is native else None
        unit.exchange.run(fragments.sources, compute, fragments.receive, replies, delivered, at_once)
        kept = in_place.step()
        if kept:
            self.health.add("subspace_rotation", len(kept) - sum(kept), len(kept))

    def _reply(self, unit: StepUnit, batch: Batch | MatrixTask) -> Reply:
        """The factors to every holder, or each one's elements of their products: whichever is less to send."""
        replies: dict[Any, Reply] = unit.scratch.setdefault("replies", {})
        signature = batch.signature
        if signature not in replies:
            assert unit.exchange is not None
            plan, holders = unit.exchange.plan, unit.exchange.layout.holders
            receivers = elements = 0
            for key in (task.key for other in plan.batches if other.signature == signature for task in other.tasks):
                others = [parts for holder, parts in holders[key].items() if holder != plan.owners[key]]
                receivers += len(others)
                elements += sum(part.numel for parts in others for part in parts)
            length, values = self._factors_length(signature), self._products(signature)
            fewer = receivers * length <= values * elements
            replies[signature] = Reply(whole=length) if fewer else Reply(values=values)
        return replies[signature]

    def _products(self, signature: Signature) -> int:
        """The direction, and with error feedback what the buffer loses."""
        return 2 if self.param_groups[signature.group]["error_feedback"] else 1

    def _factors_length(self, signature: Signature) -> int:
        """Elements of the basis and of each product's other factor."""
        return signature.rank * (signature.short + self._products(signature) * signature.long)

    def _subspace(self, key: str, like: Tensor, signature: Signature) -> MatrixState:
        known = key in self.matrix_states
        if not known:
            graphs.refuse_capture(like.device, "the first step of a matrix")
        state = self.matrix_states.obtain(key, lambda: self._fresh(like, signature))
        if self.declared.capturable and not known and int(state["step"]) == 0:
            self._unstepped.add(key)
        return state

    def _past(self, unit: StepUnit, key: str, state: MatrixState) -> _Past:
        if self.opening.counts_on_device(unit):
            return (0, 0.0) if key in self._unstepped else None
        return int(state["step"]), float(state["beta1"])

    def _step_slices(
        self, unit: StepUnit, batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor, states: list[MatrixState]
    ) -> Tensor:
        """Advance the slices that this rank owns, together with the owners of the others."""
        wholes = {task.whole for task in tasks}
        # One of the partners reports for all.
        reports = unit.layout.rank == batch.partners[0]
        if reports:
            self.health.add("matrices_updated", len(wholes))

        def report(rotation: Tensor) -> None:
            if reports:
                self._report_rotation(rotation)

        assert self.planner.source.tensor_parallel is not None
        holders = holders_of(self.planner.source.tensor_parallel.group, unit.traffic)
        group = self.param_groups[batch.signature.group]
        return step_slices(stack, states, len(wholes), batch.signature, group, holders, report)

    def _report_rotation(self, rotation: Tensor) -> None:
        """Shares of the old subspaces that the new ones have left: 0 stands still, 1 is orthogonal."""
        kept = rotation.square().sum((-2, -1)) / rotation.shape[-1]
        self.health.add("subspace_rotation", (1 - kept).sum(), kept.numel())

    def _step_subspaces(
        self, matrices: Tensor, states: list[MatrixState], past: _Past, group: Mapping[str, Any]
    ) -> Tensor:
        """Advance matrices that have one past."""
        # A single matrix as such: products of stacks are slower on CPUs.
        alone = len(states) == 1
        matrices = matrices[0] if alone else matrices
        basis, exp_avg, exp_avg_sq = (
            states[0][name] if alone else torch.stack([state[name] for state in states]) for name in _TENSORS
        )
        old = (basis, exp_avg, exp_avg_sq)
        new, factors = (
            self._step_on_device(matrices, old, states, group)
            if past is None
            else self._step_on_host(matrices, old, *past, group)
        )
        for name, value in zip(_TENSORS, new, strict=True):
            copy_([state[name] for state in states], [value] if alone else list(value.unbind()))
        for state in states if past is not None else ():
            state["step"] += 1
            state["beta1"].fill_(group["betas"][0])
        return torch.cat([part.reshape(len(states), -1) for part in (new[0], *factors)], dim=1)

    def _step_on_device(
        self, matrices: Tensor, old: Triple, states: list[MatrixState], group: Mapping[str, Any]
    ) -> tuple[Triple, list[Tensor]]:
        """New states and the factors beside the basis, of matrices whose counts the host does not know."""
        found = step_on_device(matrices, old, states, group)
        self.health.add("kept_bases", found.kept)
        self._report_rotation(found.rotation)
        return found.states, found.factors

    def _step_on_host(
        self,
        matrices: Tensor,
        old: Triple,
        count: int,
        written_beta1: float,
        group: Mapping[str, Any],
    ) -> tuple[Triple, list[Tensor]]:
        """The same of matrices that have taken ``count`` steps, the last one with ``written_beta1``."""
        step, beta1 = count + 1, group["betas"][0]
        basis, exp_avg, exp_avg_sq, direction = step_for(matrices.device, matrices.dtype)(
            matrices,
            *old,
            step,
            betas=group["betas"],
            rho=group["rho"],
            eps=group["eps"],
            error_feedback=group["error_feedback"],
            written_beta1=written_beta1,
        )
        if step > 1:
            self._report_rotation(basis.mT @ old[0])
        factors = [direction]
        if group["error_feedback"]:
            unchanged = step == 1 or beta1 == written_beta1
            factors.append(exp_avg if unchanged else updates.kept_factor(matrices, basis, exp_avg, beta1))
        return (basis, exp_avg, exp_avg_sq), factors

    def _fresh(self, like: Tensor, signature: Signature) -> MatrixState:
        """A subspace and its moments before the first step."""
        counts = self.declared.count_device(like)
        return {
            "basis": like.new_zeros(signature.short, signature.rank),
            "exp_avg": like.new_zeros(signature.rank, signature.long),
            "exp_avg_sq": like.new_zeros(signature.rank, signature.long),
            "step": torch.zeros((), dtype=torch.int64, device=counts),
            # Of the last step, with which the momentum in the error buffer is weighted. Where the count is.
            "beta1": torch.zeros((), dtype=torch.float64, device=counts),
        }


def _returned(reply: Reply, signature: Signature, factors: Tensor) -> Tensor:
    """What owners return: the factors, or (matrices, products * elements) their products."""
    if reply.whole is not None:
        return factors
    basis, others = split_factors(factors, signature)
    products = basis.unsqueeze(1) @ others
    return (products.mT if signature.right else products).flatten(1)


def _cut_states(task: MatrixTask) -> dict[str, int]:
    signature: Signature = task.signature
    return {"long": {"exp_avg": 1, "exp_avg_sq": 1}, "short": {"basis": 0}}.get(signature.cut or "", {})
