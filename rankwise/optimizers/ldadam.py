"""LDAdam: Adam in a low-dimensional subspace that follows the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.kernels.foreach import copy_, decay_
from rankwise.optimizers.base import ShardedOptimizer
from rankwise.optimizers.element_states import StateTypes
from rankwise.optimizers.first_order import adamw_step
from rankwise.optimizers.matrix_states import MatrixState
from rankwise.optimizers.options import LDAdamOptions, Options, patterns
from rankwise.optimizers.routing import ParameterInfo, Route, RoutingPolicy, Rule
from rankwise.optimizers.subspace_fragments import Fragments, split_factors
from rankwise.optimizers.unit import Bucket, StepUnit
from rankwise.optimizers.work import StepWork
from rankwise.sharding import Batch, MatrixTask, Reply
from rankwise.updates import ldadam as updates

__all__ = ["LDAdam"]


class LDAdam(ShardedOptimizer):
    r"""Adam in a rank-*r* subspace with generalised error feedback (arXiv 2410.16103).

    The owner of a matrix keeps its basis ``U`` and the two low-dimensional moments; every rank keeps the error of its
    own elements. With error feedback the error and the momentum share one buffer ``F``; a step gathers
    ``C = G + F``, and the owner returns rank-*r* factors, or, to many holders of small parts, their elements.
    Parameters that are not matrices, embeddings, heads, and matrices too small for a low rank to save anything take
    AdamW with the same lr and betas.

    Args:
        params: Parameters, ``(name, parameter)`` pairs or param groups.
        lr: Learning rate.
        rank: Rank of the subspace; at most the short side is used.
        rho: Share of the momentum in the matrix the basis follows.
        betas: Decay rates of the moments.
        eps: Added to the bias-corrected root.
        weight_decay: Decoupled decay, times lr, of the full matrix.
        error_feedback: Keep what the projection drops and add it to the next gradient.
        error_dtype: Type of the error buffer; None: that of the computation. It holds the momentum too: bfloat16
            halves its memory and rounds the momentum.
        comm_dtype: Type in which straddling matrices travel to their owners and back. None: their own, which rounds
            nothing; "bfloat16" halves the bytes.
        exclude: Name patterns sent to the fallback.
        skip_nonfinite: Leave every weight and state as it was where a gradient of the step is infinite or NaN on any
            rank, and count it in :attr:`health`. Costs a copy of weights and states while a step runs.

    Raises:
        OptionError: A value is outside its range, or no parameter takes the low-rank rule.
    """

    options_type: ClassVar[type[Options]] = LDAdamOptions
    options: LDAdamOptions
    health_means = ("subspace_rotation",)
    group_options = ("lr", "rank", "rho", "betas", "eps", "weight_decay", "error_feedback")
    matrix_state_names = ("basis", "exp_avg", "exp_avg_sq", "step", "beta1")
    counted_states = ("step", "beta1")
    one_by_one = True
    structural_options = ("fallback", "rank", "error_feedback")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        rank: int = 16,
        rho: float = 0.908,
        betas: tuple[float, float] = (0.908, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        error_feedback: bool = True,
        error_dtype: str | None = None,
        comm_dtype: str | None = None,
        exclude: Sequence[str] = (),
        skip_nonfinite: bool = False,
    ) -> None:
        options = LDAdamOptions(
            lr=lr,
            rank=rank,
            rho=rho,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            error_feedback=error_feedback,
            error_dtype=error_dtype,
            comm_dtype=comm_dtype,
            exclude=patterns(exclude),
            skip_nonfinite=skip_nonfinite,
        )
        super().__init__(params, options)

    @property
    def policy(self) -> RoutingPolicy:
        """Linear weights only, as in the published runs."""
        return RoutingPolicy(embeddings=False, exclude=self.options.exclude)

    def _adjust_route(self, info: ParameterInfo, group: Mapping[str, Any], chosen: Route) -> Route:
        if chosen.rule == "matrix" and len(info.shape) not in (2, 3):
            return Route("fallback", f"{len(info.shape)}-D tensor")
        if chosen.rule == "fallback" or group.get("fallback") is False:
            return chosen
        if updates.worth_projecting(group["rank"], *info.matrix_shape, error_feedback=group["error_feedback"]):
            return chosen
        return Route("fallback", f"rank {group['rank']} saves nothing")

    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """AdamW's moments on the fallback, the error buffer on matrices."""
        if rule == "fallback":
            return {"exp_avg": None, "exp_avg_sq": None}
        if not group["error_feedback"]:
            return {}
        dtype = self.options.error_dtype
        return {"error": None if dtype is None else getattr(torch, dtype)}

    def _plan(self, unit: StepUnit) -> None:
        tasks = []
        for key in unit.keys("matrix"):
            rows, columns = unit.infos[key].matrix_shape
            position = unit.group_position[key]
            rank = updates.effective_rank(unit.planned_groups[position]["rank"], rows, columns)
            cost = float(10 * rows * columns * rank + 6 * max(rows, columns) * rank**2)
            tasks.append(MatrixTask(key, (key,), (rows, columns, rank, position), cost))
        self._choose_owners(unit, tasks)

    def work(self, unit: StepUnit) -> StepWork:
        """See the base class: the returned factors."""

        def matrix_state(task: MatrixTask, device: torch.device) -> MatrixState:
            rows, columns, rank, _ = task.signature
            like = torch.empty(0, dtype=unit.dtype, device=device)
            return _fresh(like, min(rows, columns), max(rows, columns), rank)

        return StepWork(reply=partial(self._reply, unit), matrix_state=matrix_state)

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        fragments = Fragments(unit)
        for bucket in buckets:
            group = bucket.group
            if bucket.rule == "fallback":
                adamw_step(unit, bucket)
                continue
            decay_(bucket.weights, group["lr"], group["weight_decay"])
            errors = bucket.state("error") if group["error_feedback"] else None
            fragments.add(bucket.entries, bucket.weights, bucket.grads, errors)
        if unit.exchange is not None:
            self._follow_subspaces(unit, fragments)

    def _follow_subspaces(self, unit: StepUnit, fragments: Fragments) -> None:
        assert unit.exchange is not None
        one_by_one = unit.exchange.one_by_one

        def compute(batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
            rows, columns, rank, position = batch.signature
            group = self.param_groups[position]
            self.health.add("matrices_updated", len(tasks))
            matrices = updates.side_normalized(stack.view(-1, rows, columns))
            states = [self._subspace(task.key, matrices, rank) for task in tasks]
            pasts = [(int(state["step"]), float(state["beta1"])) for state in states]
            returned = partial(_returned, self._reply(unit, batch), batch)
            if one_by_one:
                # Also where they came as a stack: then a matrix is rounded alike wherever it lies.
                spans = [slice(index, index + 1) for index in range(len(tasks))]
                parts = [
                    self._step_subspaces(matrices[span], states[span], *past, group)
                    for span, past in zip(spans, pasts, strict=True)
                ]
                return returned(torch.cat(parts))
            if len(set(pasts)) == 1:
                return returned(self._step_subspaces(matrices, states, *pasts[0], group))
            result = stack.new_empty(len(tasks), self._factors_length(batch.signature))
            # Matrices whose gradients were missing at different steps are at different counts.
            for past in sorted(set(pasts)):
                chosen = [i for i, other in enumerate(pasts) if other == past]
                part = [states[i] for i in chosen]
                result[chosen] = self._step_subspaces(matrices[chosen], part, *past, group)
            return returned(result)

        def delivered(batch: Batch) -> None:
            as_factors = self._reply(unit, batch).whole is not None
            fragments.step(batch.signature, as_factors, self.param_groups[batch.signature[-1]]["lr"])

        unit.exchange.run(fragments.sources, compute, fragments.receive, partial(self._reply, unit), delivered)

    def _reply(self, unit: StepUnit, batch: Batch | MatrixTask) -> Reply:
        """The factors to every holder, or each one's elements of their products: whichever is less to send."""
        replies: dict[Any, Reply] = unit.scratch.setdefault("replies", {})
        signature = batch.signature
        if signature not in replies:
            assert unit.exchange is not None
            plan, holders = unit.exchange.plan, unit.layout.holders
            receivers = elements = 0
            for key in (task.key for other in plan.batches if other.signature == signature for task in other.tasks):
                others = [parts for holder, parts in holders[key].items() if holder != plan.owners[key]]
                receivers += len(others)
                elements += sum(part.numel for parts in others for part in parts)
            length, values = self._factors_length(signature), self._products(signature)
            fewer = receivers * length <= values * elements
            replies[signature] = Reply(whole=length) if fewer else Reply(values=values)
        return replies[signature]

    def _products(self, signature: tuple[int, ...]) -> int:
        """The direction, and with error feedback what the buffer loses."""
        return 2 if self.param_groups[signature[-1]]["error_feedback"] else 1

    def _factors_length(self, signature: tuple[int, ...]) -> int:
        """Elements of the basis and of each product's other factor."""
        rows, columns, rank, _ = signature
        return rank * (min(rows, columns) + self._products(signature) * max(rows, columns))

    def _subspace(self, key: str, matrices: Tensor, rank: int) -> MatrixState:
        short, long = matrices.shape[-2:]
        return self.matrix_states.obtain(key, lambda: _fresh(matrices, short, long, rank))

    def _step_subspaces(
        self, matrices: Tensor, states: list[MatrixState], count: int, written_beta1: float, group: Mapping[str, Any]
    ) -> Tensor:
        """Advance matrices that have taken ``count`` steps, the last one with ``written_beta1``."""
        step, beta1 = count + 1, group["betas"][0]
        # A single matrix as such: products of stacks are slower on CPUs.
        alone = len(states) == 1
        matrices = matrices[0] if alone else matrices
        previous, old_avg, old_avg_sq = (
            states[0][name] if alone else torch.stack([state[name] for state in states])
            for name in ("basis", "exp_avg", "exp_avg_sq")
        )
        basis, exp_avg, exp_avg_sq, direction = updates.ldadam_step(
            matrices,
            previous,
            old_avg,
            old_avg_sq,
            step,
            betas=group["betas"],
            rho=group["rho"],
            eps=group["eps"],
            error_feedback=group["error_feedback"],
            written_beta1=written_beta1,
        )
        if step > 1:
            # Share of the old subspace that the new one has left: 0 stands still, 1 is orthogonal.
            kept = (basis.mT @ previous).square().sum((-2, -1)) / basis.shape[-1]
            self.health.add("subspace_rotation", (1 - kept).sum(), len(states))
        for name, new in (("basis", basis), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            copy_([state[name] for state in states], [new] if alone else list(new.unbind()))
        for state in states:
            state["step"] += 1
            state["beta1"].fill_(beta1)
        factors = [direction]
        if group["error_feedback"]:
            unchanged = step == 1 or beta1 == written_beta1
            factors.append(exp_avg if unchanged else updates.kept_factor(matrices, basis, exp_avg, beta1))
        return torch.cat([part.reshape(len(states), -1) for part in (basis, *factors)], dim=1)


def _returned(reply: Reply, batch: Batch, factors: Tensor) -> Tensor:
    """What owners return: the factors, or (matrices, products * elements) their products."""
    if reply.whole is not None:
        return factors
    basis, others = split_factors(factors, batch.signature)
    products = basis.unsqueeze(1) @ others
    return (products.mT if updates.projects_right(*batch.signature[:2]) else products).flatten(1)


def _fresh(like: Tensor, short: int, long: int, rank: int) -> MatrixState:
    """A subspace and its moments before the first step."""
    return {
        "basis": like.new_zeros(short, rank),
        "exp_avg": like.new_zeros(rank, long),
        "exp_avg_sq": like.new_zeros(rank, long),
        "step": torch.tensor(0, dtype=torch.int64),
        # Of the last step, with which the momentum in the error buffer is weighted. On the CPU, like the count.
        "beta1": torch.tensor(0.0, dtype=torch.float64),
    }
