"""MKOR's spec says which parameters it takes, and which states they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankwise.comm.owner_plan import MatrixTask
from rankwise.mkor.backends import FirstOrder
from rankwise.mkor.factors import KroneckerFactors
from rankwise.mkor.layer_signature import LayerSignature
from rankwise.mkor.options import MKOROptions
from rankwise.mkor.vector_windows import Window, names_of, resized
from rankwise.routing.roles import ParameterInfo, Role, Route, RoutingPolicy, Rule
from rankwise.states.declared_states import MatrixForm, State, scalar
from rankwise.states.element_states import StateTypes
from rankwise.states.optimizer_spec import OptimizerSpec

__all__ = ["MKORSpec"]


# What a state is declared with is pickled with the optimizer, so these functions are the module's.


def _side(axis: int, outputs: int, inputs: int, group: Mapping[str, Any]) -> int | None:
    """The side of the factor of the outputs (0) or inputs (1); None where there are too many."""
    side = (outputs, inputs)[axis]
    return side if side <= group["max_factor_dim"] else None


def _square(axis: int, *matrix: Any) -> tuple[int, int] | None:
    side = _side(axis, *matrix)
    return None if side is None else (side, side)


def _vectors(axis: int, length: int, *matrix: Any) -> tuple[int, int] | None:
    side = _side(axis, *matrix)
    return None if side is None else (length, side)


def _weights(axis: int, length: int, *matrix: Any) -> tuple[int] | None:
    return None if _side(axis, *matrix) is None else (length,)


def _cut(axis: int, outputs: int, inputs: int) -> tuple[int, int]:
    return 1 - axis, axis


def _identity(zeros: Tensor) -> None:
    zeros.fill_diagonal_(1.0)


_FAILURES = State("failures", scalar, dtype=torch.int32)
"""Factor steps that failed in a row."""


def _window_of(axis: int, length: int) -> tuple[State, State]:
    """The states that are the inverse of the factor of the outputs (0) or inputs (1).

    Slices along the axis have parts of the vectors; slices along the other one have some of the vectors.
    """
    of_vectors, of_weights = names_of(("left", "right")[axis])
    by_block = axis == 0
    return (
        State(
            of_vectors,
            partial(_vectors, axis, length),
            axes=partial(_cut, axis),
            by_block=by_block,
            with_bias=(1,) * axis,
            lendable=True,
        ),
        State(of_weights, partial(_weights, axis, length), by_block=by_block, lendable=True),
    )


class MKORSpec(OptimizerSpec):
    """Routes and states of MKOR.

    Attributes:
        first_order: The backend.
        factors: Moves factors and says in which type they are multiplied.
    """

    options: MKOROptions
    health_totals = ("factors_updated", "factors_skipped")
    product_option = "product_dtype"
    matrix_states: tuple[State, ...] = (
        State("left", partial(_square, 0), _identity, by_block=True, lendable=True),
        State("right", partial(_square, 1), _identity, with_bias=(0, 1), lendable=True),
        _FAILURES,
    )
    compared_options = ("rule",)  # it says what factors are the inverses of
    idle_advice: ClassVar[Mapping[str, str]] = {"both sides above": "raise 'max_factor_dim'"}
    sums_cover_fallback = True  # LAMB has a trust ratio per parameter, whatever the parameter's rule

    def __init__(self, kind: str, options: MKOROptions) -> None:
        super().__init__(kind, options)
        self.first_order = FirstOrder(options.backend, options.nesterov)
        self.factors = KroneckerFactors(options)
        if options.window:
            self.matrix_states = (*_window_of(0, options.window), *_window_of(1, options.window), _FAILURES)

    @property
    def family(self) -> str:
        """Class and backend, as another backend has other element states."""
        return f"MKOR-{self.options.backend}"

    @property
    def policy(self) -> RoutingPolicy:
        """Routes that give the rule linear weights; embeddings and heads take the backend."""
        return RoutingPolicy(embeddings=False, exclude=self.options.exclude)

    @property
    def learns_from_modules(self) -> bool:
        """Whether ``capture`` is still to show the modules."""
        return not self.options.sketches

    def adjust_route(self, info: ParameterInfo, group: Mapping[str, Any], chosen: Route) -> Route:
        """Route parameters that cannot be captured, and matrices without a side for a factor, to the backend."""
        if chosen.rule == "matrix" and info.role is Role.EXPERT and not self.options.sketches:
            # Inputs of experts are padded to a capacity that depends on the number of ranks, and so would their mean.
            return Route("fallback", "expert")
        if chosen.rule == "matrix" and not self._has_factors(info):
            return Route("fallback", "only 2-D weights have factors")
        if chosen.rule == "matrix" and min(info.matrix_shape) > self.options.max_factor_dim:
            return Route("fallback", f"both sides above {self.options.max_factor_dim}")
        return chosen

    def _has_factors(self, info: ParameterInfo) -> bool:
        """Whether a weight is a matrix or, by sketches, a stack: no module shows the inputs of one matrix of it."""
        return len(info.shape) == 2 or (len(info.shape) == 3 and self.options.sketches)

    def splits(self, info: ParameterInfo) -> bool:
        """Whether the parts of a fused weight divide its outputs, and so share the inputs and their factor."""
        return self._has_factors(info) and (info.fused is None or (info.fused.dim == -1) == info.transposed)

    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """Return the states of the first-order backend."""
        return self.kept_as(self.first_order.states, info)

    def form_of(self, task: MatrixTask, info: ParameterInfo) -> MatrixForm:
        """Return the outputs and inputs of a layer, with its bias and the blocks of its outputs."""
        layer: LayerSignature = task.signature
        blocks = {block.name: block.size for block in layer.blocks}
        return MatrixForm(*layer.whole_shape, layer.has_bias, blocks)

    def possible_forms(self, info: ParameterInfo) -> Sequence[MatrixForm]:
        """Return the layer with and without a bias, which a sketch never has."""
        biases = (False,) if self.options.sketches else (False, True)
        return [MatrixForm(*info.logical_matrix_shape, bias) for bias in biases]

    def type_of_matrix_state(self, state: State, numel: int) -> torch.dtype | None:
        """Return the type of factors, which an option names; weights of vectors are float32 at least."""
        named: torch.dtype = getattr(torch, self.options.factor_dtype)
        return state.dtype or (torch.promote_types(named, torch.float32) if "_weights" in state.name else named)

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
