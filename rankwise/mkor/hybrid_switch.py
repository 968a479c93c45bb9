"""When MKOR-H hands over to the first-order optimizer.

The paper (arXiv:2306.01685) says only that MKOR-H watches the loss and drops second-order updates when its decrease
slows down; neither a formula nor code was published. The criterion here is ours, modelled on the knee-point
learning-rate scheduler of the paper's appendix, and so are its default values.
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
from rankwise.layout.layout import Layout
from rankwise.layout.layout_source import framework_advice
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
    r"""Tells when a loss curve has passed its knee.

    With :math:`m_t` the bias-corrected moving average of the loss, :math:`r_t` that of its decrease per step and
    :math:`R_t` the mean decrease since the start,

    .. math::
        r_t < \beta R_t, \qquad R_t = \frac{m_1 - m_t}{t - 1}

    must hold at ``patience`` consecutive steps from step ``min_steps`` on. The answer is final. It depends on the
    losses alone: feed every rank the same ones (averaged over data parallelism, sent from the last pipeline stage).
    Losses that are not finite are passed over.

    Args:
        beta: fraction of the mean decrease below which a step counts as slow, positive.
        patience: consecutive slow steps it takes, at least 1.
        min_steps: steps before the first check, at least 2.
        ema: decay of both averages, in [0, 1).

    Raises:
        ValueError: if an argument is out of range.
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
            loss: the same value on every rank.

        Returns:
            Whether the knee has been passed, now or before.
        """
        settings = {"beta": self.beta, "patience": self.patience, "min_steps": self.min_steps, "ema": self.ema}
        self._knee = watched_loss(self._knee, loss, **settings)  # type: ignore[arg-type]
        return self.switched

    def state_dict(self) -> _State:
        """Copy of the state: plain numbers only."""
        return self._knee._asdict()

    def load_state_dict(self, state: _State) -> None:
        """Take over a state from `state_dict`.

        Args:
            state: the numbers of another detector.

        Raises:
            ValueError: if its keys are not those of `state_dict`.
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
        value: The loss, 0-d.
        is_propagated: Whether its backward pass is known to have begun.
    """

    def __init__(self, value: Tensor | float, is_propagated: bool) -> None:
        known = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32, device="cpu")
        self.value = known.to(torch.float32).reshape(())
        self.is_propagated = is_propagated


class LossWindow:
    """Losses of the micro-batches since the last step."""

    def __init__(self) -> None:
        self._losses: list[_Loss] = []
        self._id: Hashable = None

    def add(self, loss: Tensor | float, window_id: Hashable, is_propagated: bool = False) -> _Loss:
        """Take a micro-batch's loss.

        Args:
            loss: A scalar.
            window_id: Names the accumulation window; losses of another one that nobody has used belong to a step that
                was skipped, after an overflow for instance, and are dropped.
            is_propagated: Whether its backward pass has begun.
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
        """Sum over micro-batches and ranks, the same on every rank; the window is empty afterwards.

        Args:
            layout: Names the ranks, which must call this together.
            device: Where to sum.
            traffic: Counts the collective.

        Returns:
            (2,), the sum, and the number of losses in it.
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
        # A copy belongs to no framework that could go on naming its windows.
        return {**self.__dict__, "_id": None}


class Switch:
    """Drops the factors when the ``hybrid`` options say so.

    Args:
        options: MKOR's.
        statistics: Not needed any more then.
        matrix_states: The factors.
        planner: The units, one of which counts the losses.

    Attributes:
        detector: Looks at the losses.
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
        """Have seen no loss yet; those of the present window count."""
        self._silent_steps = 0
        self.load_state_dict({"switched": False, **self._fresh().state_dict()})

    def record(self, loss: Tensor | float, is_propagated: bool = False) -> None:
        """Take a micro-batch's loss; see :meth:`rankwise.MKOR.record_loss`."""
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
        """Take a micro-batch's loss once a backward pass of it begins that adds to gradients.

        Args:
            loss: Scalar with its graph.
            unless: Asked then: whether somebody else reports it.
        """
        value = loss.detach().clone()

        def arrived(grad: Tensor) -> None:
            if not unless() and self._statistics.adds_to_gradients():
                self.begin_pass()
                self.record(value, is_propagated=True)

        if self._hears and loss.requires_grad:
            loss.register_hook(arrived)

    def begin_pass(self) -> None:
        """A backward pass begins: forget losses whose gradients were thrown away since."""
        if self._hears and not self._statistics.keeps_gradients():
            self.losses.drop_propagated()

    @property
    def _hears(self) -> bool:
        return self._options.hybrid and not self.is_over and not self._statistics.is_paused

    def consider(self, unit: StepUnit) -> None:
        """Feed the detector this step's loss, once per step, the same on every rank; on a device, the last step's."""
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
                # As loud as loggers are that nobody has turned up: from here on it is another optimizer.
                logger.warning("MKOR-H: the loss has passed its knee; continuing with %s alone.", self._options.backend)

    def _learn(self) -> None:
        """Show the detector the last losses; they have been sent to the host a step ago, unless they were there."""
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
        self._learn()
        return {"switched": self.is_over, **self.detector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; an empty one changes nothing."""
        self._news = None
        if state:
            self.is_over = bool(state["switched"])
            self.detector.load_state_dict(dict(state))
        if self.is_over:
            self.drop_factors()
        elif self._statistics.hooks is not None:
            # Back from after the switch: hooks and factors come into use again.
            self._statistics.put_back()
            if any(WATCHED not in unit.notes for unit in self._planner.units.values()):
                self._planner.forget()
