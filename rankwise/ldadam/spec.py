"""Which parameters LDAdam takes, and what states they keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.ldadam import formulas
from rankwise.ldadam.options import LDAdamOptions
from rankwise.routing.roles import ParameterInfo, Route, RoutingPolicy, Rule
from rankwise.states.element_states import StateTypes
from rankwise.states.optimizer_spec import OptimizerSpec

__all__ = ["SUBSPACE", "LDAdamSpec"]

SUBSPACE = ("basis", "exp_avg", "exp_avg_sq")
"""States of a matrix that are tensors."""


class LDAdamSpec(OptimizerSpec):
    """See the base class."""

    options: LDAdamOptions
    health_means = ("subspace_rotation",)
    health_totals = ("kept_bases",)
    matrix_state_names = (*SUBSPACE, "step", "beta1")
    counted_states = ("step", "beta1")
    owns_blocks = True
    always_coded = ("error",)
    idle_advice: ClassVar[Mapping[str, str]] = {"saves nothing": "lower 'rank'"}

    @property
    def policy(self) -> RoutingPolicy:
        """Linear weights only, as in the published runs."""
        return RoutingPolicy(embeddings=False, exclude=self.options.exclude)

    def adjust_route(self, info: ParameterInfo, group: Mapping[str, Any], chosen: Route) -> Route:
        """Matrices too small for a low rank to save anything take the fallback."""
        if chosen.rule == "matrix" and len(info.shape) not in (2, 3):
            return Route("fallback", f"{len(info.shape)}-D tensor")
        if chosen.rule == "fallback" or group.get("fallback") is False:
            return chosen
        if formulas.worth_projecting(group["rank"], *info.matrix_shape, error_feedback=group["error_feedback"]):
            return chosen
        return Route("fallback", f"rank {group['rank']} saves nothing")

    def splits(self, info: ParameterInfo) -> bool:
        """Each has a subspace of its own."""
        return True

    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """AdamW's moments on the fallback, the error buffer on matrices."""
        if rule == "fallback":
            return self.kept_as(("exp_avg", "exp_avg_sq"), info)
        if not group["error_feedback"]:
            return {}
        return self.kept_as(("error",), info, error=self.options.error_dtype)

    @property
    def subspace_types(self) -> StateTypes:
        """The types in which owners keep bases and moments: bfloat16 where narrow ones are asked for.

        They are rounded as a whole at every step, which codes of a byte would do too coarsely.
        """
        return {name: torch.bfloat16 if self.asked_type(name) else None for name in SUBSPACE}

    def squares(self, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
        """Squared norm of the second moment within the subspace; an orthonormal basis leaves norms as they are."""
        total: Tensor = state["exp_avg_sq"].double().sum()
        beta2 = group["betas"][1]
        return total / (1.0 - beta2 ** state["step"].to(total)).clamp_min(1.0 - beta2)

    def matrix_state_shapes(
        self, info: ParameterInfo, group: Mapping[str, Any]
    ) -> Mapping[str, Collection[tuple[int, ...]]]:
        """Basis (short side, rank) and moments (rank, long side)."""
        rows, columns = info.matrix_shape
        rank = formulas.effective_rank(group["rank"], rows, columns)
        moments = [(rank, max(rows, columns))]
        return {"basis": [(min(rows, columns), rank)], "exp_avg": moments, "exp_avg_sq": moments}
