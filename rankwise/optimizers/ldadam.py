"""LDAdam: Adam in a low-dimensional subspace that follows the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.kernels import foreach
from rankwise.optimizers.base import ShardedOptimizer
from rankwise.optimizers.element_states import StateTypes
from rankwise.optimizers.first_order import adamw_step
from rankwise.optimizers.matrix_states import MatrixState
from rankwise.optimizers.options import LDAdamOptions, Options, patterns
from rankwise.optimizers.routing import ParameterInfo, Route, RoutingPolicy, Rule
from rankwise.optimizers.unit import Bucket, StepUnit
from rankwise.sharding import Batch, MatrixTask
from rankwise.updates import ldadam as updates

__all__ = ["LDAdam"]


class LDAdam(ShardedOptimizer):
    r"""Adam in a rank-*r* subspace with generalised error feedback (arXiv 2410.16103).

    The owner of a matrix keeps its basis ``U`` and the two low-dimensional moments; every rank keeps the error of its
    own elements. With error feedback the error and the momentum share one buffer ``F``; a step gathers
    ``C = G + F``, and the owner returns rank-*r* factors, never a full matrix. Parameters that are not matrices,
    embeddings, heads, and matrices too small for a low rank to save anything take AdamW with the same lr and betas.

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
        exclude: Name patterns sent to the fallback.

    Raises:
        OptionError: A value is outside its range, or no parameter takes the low-rank rule.
    """

    options_type: ClassVar[type[Options]] = LDAdamOptions
    options: LDAdamOptions
    health_means = ("subspace_rotation",)
    group_options = ("lr", "rank", "rho", "betas", "eps", "weight_decay", "error_feedback")
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
        exclude: Sequence[str] = (),
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
            exclude=patterns(exclude),
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

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        sources: list[Tensor | None] = [None] * len(unit.entries)
        targets: dict[int, tuple[Tensor, Tensor | None, Mapping[str, Any]]] = {}
        for bucket in buckets:
            group = bucket.group
            if bucket.rule == "fallback":
                adamw_step(bucket)
                continue
            errors = bucket.state("error") if group["error_feedback"] else [None] * len(bucket.entries)
            foreach.decay_(bucket.weights, group["lr"], group["weight_decay"])
            for entry, weight, grad, error in zip(bucket.entries, bucket.weights, bucket.grads, errors, strict=True):
                sources[entry.index] = grad if error is None else grad + error
                targets[entry.index] = (weight, error, group)
        if unit.exchange is not None:
            self._follow_subspaces(unit, sources, targets)

    def _follow_subspaces(
        self,
        unit: StepUnit,
        sources: list[Tensor | None],
        targets: Mapping[int, tuple[Tensor, Tensor | None, Mapping[str, Any]]],
    ) -> None:
        assert unit.exchange is not None

        def compute(batch: Batch, tasks: Sequence[MatrixTask], stack: Tensor) -> Tensor:
            rows, columns, rank, position = batch.signature
            group = self.param_groups[position]
            self.health.add("matrices_updated", len(tasks))
            matrices = updates.side_normalized(stack.view(-1, rows, columns))
            states = [self._subspace(task.key, matrices, rank) for task in tasks]
            counts = sorted({int(state["step"]) for state in states})
            if len(counts) == 1:
                return self._step_subspaces(matrices, states, counts[0] + 1, group)
            result = stack.new_empty(len(tasks), self._payload(batch))
            # Matrices whose gradients were missing at different steps are at different counts.
            for step in counts:
                chosen = [i for i, state in enumerate(states) if int(state["step"]) == step]
                part = [states[i] for i in chosen]
                result[chosen] = self._step_subspaces(matrices[chosen], part, step + 1, group)
            return result

        def deliver(task: MatrixTask, index: int, payload: Tensor) -> None:
            weight, error, group = targets[index]
            entry = unit.entries[index]
            rows, columns, rank, _ = task.signature
            short, long = min(rows, columns), max(rows, columns)
            basis = payload[: short * rank].view(short, rank)
            factors = payload[short * rank :].view(-1, rank, long)
            products = updates.low_rank_rows(
                basis,
                factors,
                entry.fragment.start,
                entry.fragment.end,
                rows,
                columns,
                updates.projects_right(rows, columns),
            )
            weight.sub_(products[0] * group["lr"])
            source = sources[index]
            if error is not None and source is not None:
                error.copy_(source - products[1])

        unit.exchange.run(sources, compute, deliver, self._payload)

    def _payload(self, batch: Batch) -> int:
        """Elements of the returned factors: the basis, the direction, and with error feedback the momentum."""
        rows, columns, rank, position = batch.signature
        factors = 2 if self.param_groups[position]["error_feedback"] else 1
        return rank * (min(rows, columns) + factors * max(rows, columns))

    def _subspace(self, key: str, matrices: Tensor, rank: int) -> MatrixState:
        def fresh() -> MatrixState:
            m, n = matrices.shape[-2:]
            return {
                "basis": matrices.new_zeros(m, rank),
                "exp_avg": matrices.new_zeros(rank, n),
                "exp_avg_sq": matrices.new_zeros(rank, n),
                "step": torch.tensor(0, dtype=torch.int64),
            }

        return self.matrix_states.obtain(key, fresh)

    def _step_subspaces(
        self, matrices: Tensor, states: list[MatrixState], step: int, group: Mapping[str, Any]
    ) -> Tensor:
        previous = torch.stack([state["basis"] for state in states])
        basis, exp_avg, exp_avg_sq, direction = updates.ldadam_step(
            matrices,
            previous,
            torch.stack([state["exp_avg"] for state in states]),
            torch.stack([state["exp_avg_sq"] for state in states]),
            step,
            betas=group["betas"],
            rho=group["rho"],
            eps=group["eps"],
            error_feedback=group["error_feedback"],
        )
        if step > 1:
            # Share of the old subspace that the new one has left: 0 stands still, 1 is orthogonal.
            kept = (basis.mT @ previous).square().sum((-2, -1)) / basis.shape[-1]
            self.health.add("subspace_rotation", (1 - kept).sum(), len(states))
        for index, state in enumerate(states):
            state["basis"].copy_(basis[index])
            state["exp_avg"].copy_(exp_avg[index])
            state["exp_avg_sq"].copy_(exp_avg_sq[index])
            state["step"] += 1
        factors = [direction, exp_avg] if group["error_feedback"] else [direction]
        return torch.cat([part.reshape(len(states), -1) for part in (basis, *factors)], dim=1)
