"""MKOR-H: from the preconditioned optimizer to its first-order backend for good, once the loss has passed its knee."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rankwise.mkor.capturing import CapturingOptimizer
from rankwise.mkor.hybrid import KneeDetector, LossWindow
from rankwise.mkor.options import MKOROptions
from rankwise.step.unit import StepUnit

__all__ = ["SwitchingOptimizer"]

logger = logging.getLogger(__name__)


class SwitchingOptimizer(CapturingOptimizer):
    """An optimizer that drops its matrix rule when the ``hybrid`` options say so.

    Args:
        params: Parameters, ``(name, parameter)`` pairs or param groups.
        options: Its options.
    """

    copied_attributes = (*CapturingOptimizer.copied_attributes, "_detector", "_switched", "_losses")

    def __init__(self, params: Any, options: MKOROptions) -> None:
        self._detector = KneeDetector(
            options.hybrid_beta, options.hybrid_patience, options.hybrid_min_steps, options.hybrid_ema
        )
        self._switched = False
        self._losses = LossWindow()
        super().__init__(params, options)

    def record_loss(self, loss: Tensor | float) -> None:
        """MKOR-H: report a micro-batch's loss; a step uses the mean over micro-batches and ranks.

        Args:
            loss: Scalar, not multiplied by a loss scale.
        """
        if self.options.hybrid and not self._switched:
            self._losses.add(loss, None if self._capture is None else self._capture.window_id())

    def _discard_window(self) -> None:
        super()._discard_window()
        self._losses.clear()

    def _captured(self) -> None:
        if self._switched:
            self._drop_factors()

    def _maybe_switch(self, unit: StepUnit) -> None:
        """Feed the detector this step's loss, once per step, the same on every rank."""
        if not self._watches_loss(unit):
            return
        mean = self._losses.take_mean(unit.layout, unit.device, unit.traffic)
        if mean is not None and self._detector.update(mean):
            self._switched = True
            self._drop_factors()
            logger.info("MKOR-H: the loss has passed its knee; continuing with %s alone.", self.options.backend)

    def _watches_loss(self, unit: StepUnit) -> bool:
        first = next((other for other in self._units.values() if not other.apart), unit)
        return self.options.hybrid and not self._switched and not unit.apart and unit is first

    def _drop_factors(self) -> None:
        if self._capture is not None:
            self._capture.remove()
        self.matrix_states.forget()

    @property
    def needs_loss(self) -> bool:
        """MKOR-H alone."""
        return self.options.hybrid

    @property
    def switched(self) -> bool:
        """MKOR-H: whether the first-order optimizer has taken over."""
        return self._switched

    # --- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in the base class, plus the state of the hybrid switch."""
        return {**super().state_dict(), **self.extra_state()}

    def extra_state(self) -> dict[str, Any]:
        """The hybrid switch, and what the base class has."""
        return {**super().extra_state(), "hybrid": {"switched": self._switched, **self._detector.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in the base class; statistics gathered since the last step are dropped."""
        super().load_state_dict(state_dict)
        self.load_extra_state(state_dict)

    def load_extra_state(self, state_dict: Mapping[str, Any]) -> None:
        """The hybrid switch, and what the base class has."""
        super().load_extra_state(state_dict)
        hybrid = dict(state_dict.get("hybrid", {}))
        if hybrid:
            self._switched = bool(hybrid["switched"])
            self._detector.load_state_dict(hybrid)
        if self._switched:
            self._drop_factors()
        elif self._capture is not None:
            # Back from after the switch: hooks and factors come into use again.
            self._capture.attach()
            if any("statistics" not in unit.scratch for unit in self._units.values()):
                self._forget_plans()
