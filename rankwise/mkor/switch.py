"""MKOR-H: from the preconditioned optimizer to its first-order backend for good, once the loss has passed its knee."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rankwise.mkor.hybrid import KneeDetector, LossWindow
from rankwise.mkor.options import MKOROptions
from rankwise.statistics.collector import Collector
from rankwise.step.matrix_states import MatrixStates
from rankwise.step.planner import Planner
from rankwise.step.unit import StepUnit

__all__ = ["Switch"]

logger = logging.getLogger(__name__)


class Switch:
    """Drops the factors when the ``hybrid`` options say so.

    Args:
        options: MKOR's.
        statistics: Not needed any more then.
        matrix_states: The factors.
        planner: The units, one of which counts the losses.

    Attributes:
        detector: Looks at the losses.
        losses: Of the present window.
        is_over: Whether the first-order optimizer has taken over.
    """

    def __init__(
        self, options: MKOROptions, statistics: Collector, matrix_states: MatrixStates, planner: Planner
    ) -> None:
        self._options, self._statistics = options, statistics
        self._matrix_states, self._planner = matrix_states, planner
        self.detector = KneeDetector(
            options.hybrid_beta, options.hybrid_patience, options.hybrid_min_steps, options.hybrid_ema
        )
        self.losses = LossWindow()
        self.is_over = False

    def record(self, loss: Tensor | float) -> None:
        """Take a micro-batch's loss."""
        if self._options.hybrid and not self.is_over:
            self.losses.add(loss, self._statistics.window_id())

    def consider(self, unit: StepUnit) -> None:
        """Feed the detector this step's loss, once per step, the same on every rank."""
        if not self.watches(unit):
            return
        mean = self.losses.take_mean(unit.layout, unit.device, unit.traffic)
        if mean is not None and self.detector.update(mean):
            self.is_over = True
            self.drop_factors()
            logger.info("MKOR-H: the loss has passed its knee; continuing with %s alone.", self._options.backend)

    def watches(self, unit: StepUnit) -> bool:
        """Whether the steps of a unit take the losses."""
        first = next((other for other in self._planner.units.values() if not other.apart), unit)
        return self._options.hybrid and not self.is_over and not unit.apart and unit is first

    def drop_factors(self) -> None:
        """Have no statistics and no factors any more, if the first-order optimizer has taken over."""
        if self.is_over:
            self._statistics.release()
            self._matrix_states.forget()

    def state_dict(self) -> dict[str, Any]:
        """In plain data."""
        return {"switched": self.is_over, **self.detector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; an empty one changes nothing."""
        if state:
            self.is_over = bool(state["switched"])
            self.detector.load_state_dict(dict(state))
        if self.is_over:
            self.drop_factors()
        elif self._statistics.hooks is not None:
            # Back from after the switch: hooks and factors come into use again.
            self._statistics.put_back()
            if any("statistics" not in unit.scratch for unit in self._planner.units.values()):
                self._planner.forget()
