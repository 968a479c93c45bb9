"""SONew's spec says which parameters it takes, and which states they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from rankwise.kernels.low_precision_runs import ROOT
from rankwise.routing.roles import ParameterInfo, RoutingPolicy, Rule
from rankwise.sonew.options import SONewOptions
from rankwise.states.element_states import StateTypes
from rankwise.states.optimizer_spec import OptimizerSpec

__all__ = ["SONewSpec"]


class SONewSpec(OptimizerSpec):
    """Routes and states of SONew."""

    options: SONewOptions
    health_means = ("graft_ratio",)
    compared_options = ("chain",)  # it says whose neighbour the last weight of a row is
    slow_states = ("exp_avg_sq", "covariance", "graft_sq")
    # Directions are divided by differences of these states, which coarse rounding would spoil.
    codes: ClassVar[Mapping[str, torch.dtype]] = {"exp_avg_sq": torch.bfloat16, "graft_sq": ROOT}

    @property
    def policy(self) -> RoutingPolicy:
        """Routes that give the rule every matrix, embeddings included, as published."""
        return RoutingPolicy(embeddings=True, exclude=self.options.exclude)

    @property
    def covariance_names(self) -> list[str]:
        """Names of the covariances, one element state for every distance on the band."""
        return [f"covariance_{distance}" for distance in range(1, self.options.band + 1)]

    @property
    def statistics(self) -> tuple[str, ...]:
        """The element states that neighbours read of each other."""
        return ("exp_avg", "exp_avg_sq", *self.covariance_names)

    @property
    def narrow_statistics(self) -> list[str]:
        """Statistics in low precision, which a step opens."""
        return [name for name in self.statistics if self.asked_type(name)]

    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """Return momentum, diagonal, one tensor per band distance, and the second moment of the RMSprop graft."""
        names = ["exp_avg", "exp_avg_sq"]
        if rule == "matrix":
            names += self.covariance_names
            names += ["graft_sq"] if self.options.graft == "rmsprop" else []
        return self.kept_as(names, info)
