"""This module decides when MKOR-H hands over to the first-order optimizer.

The paper (arXiv:2306.01685) says only that MKOR-H watches the loss and drops second-order updates when its decrease
slows down; neither a formula nor code was published. The criterion is ours, modelled on the knee-point learning-rate
scheduler of the paper's appendix, and so are its default values.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.comm.message_format import Traffic
from rankwise.kernels.host_copies import HostCopy
from rankwise.layout.front_ends import framework_advice
from rankwise.layout.layout import Layout
from rankwise.mkor.factor_steps import WATCHED
from rankwise.mkor.options import MKOROptions
from rankwise.mkor.rule import Knee, watched_loss
from rankwise.plan.planner import Planner
from rankwise.plan.step_unit import StepUnit
from rankwise.states.matrix_states import MatrixStates
from rankwise.statistics.collector import Collector

__all__ = ["KneeDetector", "LossWindow", "Switch"]

logger = logging.getLogger(__name__)

_State = dict[str, int | float | bool]


class KneeDetector:
    r"""Says when a loss curve has passed its knee.

    With :math:`m_t` the bias-corrected moving average of the loss, :math:`r_t` that of its decrease per step and
    :math:`R_t` the mean decrease since the start,

    .. math::
        r_t < \beta R_t, \qquad R_t = \frac{m_1 - m_t}{t - 1}

    must hold at ``patience`` consecutive steps from step ``min_steps`` on. The answer is final. It depends on the
    losses alone: feed every rank the same losses (averaged over data parallelism, sent from the last pipeline stage).
    Losses that are not finite do not count.

    Args:
        beta: Fraction of the mean decrease below which a step counts as slow, positive.
        patience: Number of consecutive slow steps that make a knee, at least 1.
        min_steps: Step from which on steps are checked, at least 2.
        ema: Decay of both averages, in [0, 1).

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, beta: float = 0.1, patience: int = 20, min_steps: int = 100, ema: float = 0.95) -> None:
        if not (math.isfinite(beta) and beta > 0.0):
            raise ValueError(f"beta={beta} must be positive and finite; use 0.1, or a smaller value to switch later")
        if patience < 1:
            raise ValueError(f"patience={patience} must be at least 1; use 20")
        if min_steps < 2:
            raise ValueError(f"min_steps={min_steps} must be at least 2, for a decrease needs two losses; use 100")
        if not 0.0 <= ema < 1.0:
            raise ValueError(f"ema={ema} must lie in [0, 1); use 0.95")
        self.beta, self.patience, self.min_steps, self.ema = beta, patience, min_steps, ema
        self._knee = Knee()

    @property
    def switched(self) -> bool:
        """Whether the knee has been passed."""
        return self._knee.switched

    def update(self, loss: float) -> bool:
        """Take the loss of one step.

        Args:
            loss: Loss, which must be equal on all ranks.

        Returns:
            Whether the knee has been passed, now or before.
        """
        settings = {"beta": self.beta, "patience": self.patience, "min_steps": self.min_steps, "ema": self.ema}
        self._knee = watched_loss(self._knee, loss, **settings)  # type: ignore[arg-type]
        return self.switched

    def state_dict(self) -> _State:
        """Return a copy of the state, in plain numbers."""
        return self._knee._asdict()

    def load_state_dict(self, state: _State) -> None:
        """Take over a state from `state_dict`.

        Args:
            state: Numbers of another detector.

        Raises:
            ValueError: The keys are not those of `state_dict`.
        """
        if state.keys() != set(Knee._fields):
            raise ValueError(
                f"state has the keys {sorted(state)}, not {sorted(Knee._fields)}; "
                "pass what KneeDetector.state_dict returned"
            )
        self._knee = Knee(**state)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return (
            f"KneeDetector(beta={self.beta}, patience={self.patience}, min_steps={self.min_steps}, ema={self.ema}, "
            f"switched={self.switched})"
        )


class _Loss:
    """A micro-batch's loss.

    Attributes:
        value: Loss, 0-d.
        is_propagated: Whether its backward pass is known to have begun.
    """

    def __init__(self, value: Tensor | float, is_propagated: bool) -> None:
        scalar = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32, device="cpu")
        self.value = scalar.to(torch.float32).reshape(())
        self.is_propagated = is_propagated


class LossWindow:
    """Losses of the micro-batches since the last step."""

    def __init__(self) -> None:
        self._losses: list[_Loss] = []
        self._id: Hashable = None

    def add(self, loss: Tensor | float, window_id: Hashable, is_propagated: bool = False) -> _Loss:
        """Take a micro-batch's loss.

        Args:
            loss: Scalar.
            window_id: Identifier of the accumulation window. Unused losses of another window belong to a step that was
                skipped, after an overflow for instance, and are dropped.
            is_propagated: Whether the loss's backward pass has begun.
        """
        if window_id != self._id:
            self.clear()
            self._id = window_id
        self._losses.append(_Loss(loss, is_propagated))
        return self._losses[-1]

    def clear(self) -> None:
        """Forget the losses."""
        self._losses.clear()

    def drop_propagated(self) -> None:
        """Forget losses whose gradients were thrown away."""
        self._losses = [loss for loss in self._losses if not loss.is_propagated]

    def take_sum(self, layout: Layout, device: torch.device, traffic: Traffic) -> HostCopy:
        """Return the sum over micro-batches and ranks, and empty the window; a collective.

        Args:
            layout: Layout with the ranks.
            device: Device on which to sum.
            traffic: Counts the collective.

        Returns:
            (2,), the sum and the number of losses in it.
        """
        total = torch.zeros(2, dtype=torch.float64, device=device)
        if self._losses:
            total[0] = torch.stack([loss.value.to(device) for loss in self._losses]).sum()
            total[1] = len(self._losses)
        self.clear()
        if layout.world_size > 1:
            traffic.count(total)
            dist.all_reduce(total, group=layout.group)
        return HostCopy(total)

    def __getstate__(self) -> dict[str, Any]:
        # No framework names the windows of a copy.
        return {**self.__dict__, "_id": None}


class Switch:
    """Drops the factors when the ``hybrid`` options say so.

    Args:
        options: Options of MKOR.
        statistics: Collector, whose hooks are released with the factors.
        matrix_states: Factors of this rank.
        planner: The planner of the units, one of which counts the losses.

    Attributes:
        detector: Finds the knee of the losses.
        losses: Losses of the present window.
        is_over: Whether the first-order optimizer has taken over.
    """

    def __init__(
        self, options: MKOROptions, statistics: Collector, matrix_states: MatrixStates, planner: Planner
    ) -> None:
        self._options, self._statistics = options, statistics
        self._matrix_states, self._planner = matrix_states, planner
        self.detector = self._fresh()
        self.losses = LossWindow()
        self.is_over = False
        self._news: HostCopy | None = None
        self._silent_steps = 0

    def __getstate__(self) -> dict[str, Any]:
        self._learn()
        return self.__dict__

    def _fresh(self) -> KneeDetector:
        options = self._options
        return KneeDetector(options.hybrid_beta, options.hybrid_patience, options.hybrid_min_steps, options.hybrid_ema)

    def begin_anew(self) -> None:
        """Forget all losses but those of the present window."""
        self._silent_steps = 0
        self.load_state_dict({"switched": False, **self._fresh().state_dict()})

    def record(self, loss: Tensor | float, is_propagated: bool = False) -> None:
        """Take a micro-batch's loss, as :meth:`rankwise.MKOR.record_loss` says."""
        if not self._hears:
            return
        taken = self.losses.add(loss, self._statistics.window_id(), is_propagated)
        if isinstance(loss, Tensor) and loss.requires_grad and not is_propagated:

            def begin(grad: Tensor) -> None:
                if self._statistics.adds_to_gradients():
                    self.begin_pass()
                    taken.is_propagated = True

            loss.register_hook(begin)

    def expect(self, loss: Tensor, unless: Callable[[], bool] = lambda: False) -> None:
        """Take a micro-batch's loss once its backward pass begins, if that adds to gradients.

        Args:
            loss: Scalar with its graph.
            unless: Whether somebody else reports the loss; asked when the backward pass begins.
        """
        value = loss.detach().clone()

        def arrived(grad: Tensor) -> None:
            if not unless() and self._statistics.adds_to_gradients():
                self.begin_pass()
                self.record(value, is_propagated=True)

        if self._hears and loss.requires_grad:
            loss.register_hook(arrived)

    def begin_pass(self) -> None:
        """Forget losses whose gradients were thrown away, as a backward pass begins."""
        if self._hears and not self._statistics.keeps_gradients():
            self.losses.drop_propagated()

    @property
    def _hears(self) -> bool:
        return self._options.hybrid and not self.is_over and not self._statistics.is_paused

    def consider(self, unit: StepUnit) -> None:
        """Feed the detector this step's loss, or on a device that of the step before; a collective, once per step."""
        if not self.watches(unit):
            return
        self._learn()
        self._news = self.losses.take_sum(unit.layout, unit.device, unit.traffic)
        if self._news.is_here:
            self._learn()
        if unit.layout.rank == 0:
            self._warn_of_silence()
        if self.detector.switched:
            self.is_over = True
            self.drop_factors()
            if unit.layout.rank == 0:
                # A warning, which loggers show by default: from here on this is another optimizer.
                logger.warning("MKOR-H: the loss has passed its knee; continuing with %s alone.", self._options.backend)

    def _learn(self) -> None:
        """Show the detector the last losses, which left for the host a step ago unless they were there."""
        if self._news is not None:
            total, count = self._news.read()
            self._news = None
            if count:
                self.detector.update(total / count)
            self._silent_steps = 0 if count else self._silent_steps + 1

    def _warn_of_silence(self) -> None:
        if self._silent_steps == self._options.hybrid_min_steps:
            logger.warning(
                "MKOR-H: no loss was reported in %d steps, and without it MKOR-H never switches: call "
                "optimizer.record_loss(loss) after each forward pass, or %s, which does it.",
                self._silent_steps,
                framework_advice(),
            )

    def watches(self, unit: StepUnit) -> bool:
        """Whether the steps of a unit take the losses, as those of one unit do."""
        first = next((other for other in self._planner.units.values() if not other.apart), unit)
        return self._options.hybrid and not self.is_over and not unit.apart and unit is first

    def drop_factors(self) -> None:
        """Drop hooks and factors if the first-order optimizer has taken over."""
        if self.is_over:
            self._statistics.release()
            self._matrix_states.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain data."""
        self._learn()
        return {"switched": self.is_over, **self.detector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; an empty one leaves the switch and its detector as they are."""
        self._news = None
        if state:
            self.is_over = bool(state["switched"])
            self.detector.load_state_dict(dict(state))
        if self.is_over:
            self.drop_factors()
        elif self._statistics.hooks is not None:
            # A checkpoint of before the switch brings hooks and factors into use again.
            self._statistics.put_back()
            if any(WATCHED not in unit.notes for unit in self._planner.units.values()):
                self._planner.forget()
