"""Which parameters LDAdam takes, and what states they keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.ldadam import formulas
from rankwise.ldadam.options import LDAdamOptions
from rankwise.routing.roles import ParameterInfo, Route, RoutingPolicy, Rule
from rankwise.states.declared_states import State, scalar
from rankwise.states.element_states import StateTypes
from rankwise.states.optimizer_spec import OptimizerSpec

__all__ = ["SUBSPACE", "LDAdamSpec"]

SUBSPACE = ("basis", "exp_avg", "exp_avg_sq")
"""The states of a matrix that a step computes with."""


def _basis(rows: int, columns: int, group: Mapping[str, Any]) -> tuple[int, int]:
    return min(rows, columns), formulas.effective_rank(group["rank"], rows, columns)


def _moments(rows: int, columns: int, group: Mapping[str, Any]) -> tuple[int, int]:
    return formulas.effective_rank(group["rank"], rows, columns), max(rows, columns)


def _along_short(rows: int, columns: int) -> tuple[int, None]:
    return int(formulas.projects_right(rows, columns)), None


def _along_long(rows: int, columns: int) -> tuple[None, int]:
    return None, int(not formulas.projects_right(rows, columns))


class LDAdamSpec(OptimizerSpec):
    """See the base class."""

    options: LDAdamOptions
    health_means = ("subspace_rotation",)
    health_totals = ("kept_bases",)
    matrix_states = (
        State("basis", _basis, axes=_along_short),
        State("exp_avg", _moments, axes=_along_long),
        State("exp_avg_sq", _moments, axes=_along_long),
        State("step", scalar, dtype=torch.int64, counted=True),
        # That of the last step, with which the momentum in the error buffer is weighted.
        State("beta1", scalar, dtype=torch.float64, counted=True),
    )
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

    def type_of_matrix_state(self, state: State, numel: int) -> torch.dtype | None:
        """Bases and moments are kept in bfloat16 where narrow ones are asked for.

        They are rounded as a whole at every step, which codes of a byte would do too coarsely.
        """
        return torch.bfloat16 if state.name in SUBSPACE and self.asked_type(state.name) else state.dtype

    @property
    def has_narrow_subspaces(self) -> bool:
        """Whether a step must open a basis or a moment."""
        return any(map(self.asked_type, SUBSPACE))

    def squares(self, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
        """Squared norm of the second moment within the subspace; an orthonormal basis leaves norms as they are."""
        total: Tensor = state["exp_avg_sq"].double().sum()
        beta2 = group["betas"][1]
        return total / (1.0 - beta2 ** state["step"].to(total)).clamp_min(1.0 - beta2)
