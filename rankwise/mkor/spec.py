"""MKOR's spec says which parameters it takes, and which states they have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.mkor.backends import FirstOrder
from rankwise.mkor.factors import KroneckerFactors
from rankwise.mkor.options import MKOROptions
from rankwise.mkor.windows import Window, names_of, resized
from rankwise.routing.roles import ParameterInfo, Role, Route, RoutingPolicy, Rule
from rankwise.states.element_states import StateTypes
from rankwise.states.optimizer_spec import OptimizerSpec

__all__ = ["MKORSpec"]


class MKORSpec(OptimizerSpec):
    """Routes and states of MKOR.

    Attributes:
        first_order: The backend.
        factors: Creates factors and says in which type they are multiplied.
    """

    options: MKOROptions
    health_totals = ("factors_updated", "factors_skipped")
    product_option = "product_dtype"
    matrix_state_names = ("left", "right", "failures")
    block_states = ("left", *names_of("left"))
    compared_options = ("rule",)  # it says what factors are the inverses of
    idle_advice: ClassVar[Mapping[str, str]] = {"both sides above": "raise 'max_factor_dim'"}
    sums_cover_fallback = True  # LAMB has a trust ratio per parameter, whatever the parameter's rule

    def __init__(self, kind: str, options: MKOROptions) -> None:
        super().__init__(kind, options)
        self.first_order = FirstOrder(options.backend, options.nesterov)
        self.factors = KroneckerFactors(options)
        kept = (*names_of("left"), *names_of("right")) if options.window else ("left", "right")
        self.matrix_state_names = (*kept, "failures")  # type: ignore[misc]

    @property
    def family(self) -> str:
        """Class and backend, as another backend has other element states."""
        return f"MKOR-{self.options.backend}"

    @property
    def policy(self) -> RoutingPolicy:
        """Routes that give the rule linear weights; embeddings and heads take the backend."""
        return RoutingPolicy(embeddings=False, exclude=self.options.exclude)

    def adjust_route(self, info: ParameterInfo, group: Mapping[str, Any], chosen: Route) -> Route:
        """Route parameters that cannot be captured, and matrices without a side for a factor, to the backend."""
        if chosen.rule == "matrix" and info.role is Role.EXPERT and not self.options.sketches:
            # Inputs of experts are padded to a capacity that depends on the number of ranks, and so would their mean.
            return Route("fallback", "expert")
        if chosen.rule == "matrix" and len(info.shape) != 2:
            return Route("fallback", "only 2-D weights have factors")
        if chosen.rule == "matrix" and min(info.shape) > self.options.max_factor_dim:
            return Route("fallback", f"both sides above {self.options.max_factor_dim}")
        return chosen

    def splits(self, info: ParameterInfo) -> bool:
        """Whether the parts of a fused weight divide its outputs, and so share the inputs and their factor."""
        return len(info.shape) == 2 and (info.fused is None or (info.fused.dim == -1) == info.transposed)

    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """Return the states of the first-order backend."""
        return self.kept_as(self.first_order.states, info)

    def matrix_state_shapes(
        self, info: ParameterInfo, group: Mapping[str, Any]
    ) -> Mapping[str, Collection[tuple[int, ...]]]:
        """Return the shapes of the factors; the right one has a side longer by 1 where the bias rides along."""
        outputs, inputs = info.logical_matrix_shape
        lengths = {"left": [outputs], "right": [inputs] if self.options.sketches else [inputs, inputs + 1]}
        window = self.options.window
        if window:
            return {names_of(side)[0]: [(window, length) for length in found] for side, found in lengths.items()}
        return {side: [(length, length) for length in found] for side, found in lengths.items()}

    def converted(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Windows of another ``factor_decay`` or ``factor_dtype`` keep what weighs most."""
        kept, length = dict(state), self.options.window
        for name in state if length else ():
            pair = name, name.replace("_vectors", "_weights")
            found = [state.get(each) for each in pair]
            if pair[0] != pair[1] and all(type(each) is Tensor and len(each) != length for each in found):
                window = Window(*found)  # type: ignore[arg-type]
                if window.vectors.dim() == 2 and len(window.vectors) == len(window.weights):
                    kept |= zip(pair, resized(window, length), strict=True)
        return kept

    def product_type(self, device: torch.device, dtype: torch.dtype) -> torch.dtype:
        """Return the type of products with gradients of a type on a device."""
        return self.factors.product_type(device, dtype)
