"""Optimizers whose rule is a function of elements: gradient and states of any run of a parameter in, direction out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from rankwise.options.validation import OptionError
from rankwise.plan.step_unit import Bucket, StepUnit, portions
from rankwise.routing.roles import ParameterInfo, Route, RoutingPolicy, Rule
from rankwise.states.element_states import StateTypes
from rankwise.states.optimizer_spec import OptimizerSpec
from rankwise.step.first_order import step_and_decay
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["ElementOptimizer", "ElementSpec"]


class ElementSpec(OptimizerSpec):
    """All parameters take the rule.

    Attributes:
        states: Names of the states, each with one value per element, which begin as zeros.
    """

    required = (*OptimizerSpec.required, "weight_decay")
    states: ClassVar[tuple[str, ...]] = ()

    @property
    def policy(self) -> RoutingPolicy:
        """See the base class."""
        return RoutingPolicy(embeddings=True, vectors=True)

    def adjust_route(self, info: ParameterInfo, group: Mapping[str, Any], chosen: Route) -> Route:
        """There is no other rule.

        Raises:
            OptionError: A group asks for one.
        """
        if chosen.rule == "fallback":
            raise OptionError(
                f"{self.name}: fallback=True is invalid for the group of {info.name!r}: the rule is element-wise, and "
                "there is no other one; give these parameters an optimizer of their own"
            )
        return chosen

    def element_states(self, info: ParameterInfo, rule: Rule, group: Mapping[str, Any]) -> StateTypes:
        """See the base class."""
        return self.kept_as(self.states, info)


class ElementOptimizer(ShardedOptimizer):
    """Base of optimizers that update elements by :meth:`update`.

    Its options must have those of :attr:`ElementSpec.required`; ``spec_class`` is an :class:`ElementSpec`.
    """

    spec: ElementSpec

    @abstractmethod
    def update(self, gradient: Tensor, states: dict[str, Tensor], step: Any, group: Mapping[str, Any]) -> Tensor:
        """The direction of some elements, whose weights become ``(1 - lr weight_decay) w - lr direction``.

        Args:
            gradient: Of any shape; read only.
            states: By name, alike, in the type of the computation; changed in place.
            step: Number of this step, from 1.
            group: Values of the param group.

        Returns:
            A new tensor like the gradient. No element of it may depend on another one's gradient or state.
        """

    def _update(self, unit: StepUnit, buckets: list[Bucket]) -> None:
        for portion in portions(buckets, lambda entry, grad: grad.numel()):
            for bucket in portion:
                states = {name: bucket.state(name) for name in self.spec.states}
                directions = [
                    self.update(grad, {name: own[at] for name, own in states.items()}, bucket.step, bucket.group)
                    for at, grad in enumerate(bucket.grads)
                ]
                step_and_decay(unit, bucket.weights, directions, bucket.group)
            unit.narrow.keep_apart()
