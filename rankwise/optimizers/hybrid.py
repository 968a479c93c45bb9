"""When MKOR-H hands over to the first-order optimizer.

The paper (arXiv:2306.01685) says only that MKOR-H watches the loss and drops second-order updates when its decrease
slows down; neither a formula nor code was published. The criterion here is ours, modelled on the knee-point
learning-rate scheduler of the paper's appendix, and so are its default values.
"""

from __future__ import annotations

import math

__all__ = ["KneeDetector"]

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
        self._state: _State = {
            "step": 0,
            "loss_average": 0.0,
            "decrease_average": 0.0,
            "first": 0.0,
            "previous": 0.0,
            "slow_steps": 0,
            "switched": False,
        }

    @property
    def switched(self) -> bool:
        """Whether the knee has been passed."""
        return bool(self._state["switched"])

    def update(self, loss: float) -> bool:
        """Take the loss of one step.

        Args:
            loss: the same value on every rank.

        Returns:
            Whether the knee has been passed, now or before.
        """
        if self.switched or not math.isfinite(loss):
            return self.switched
        state = self._state
        state["step"] += 1
        step = state["step"]
        state["loss_average"] = self.ema * state["loss_average"] + (1.0 - self.ema) * loss
        smooth = state["loss_average"] / (1.0 - self.ema**step)
        if step == 1:
            state["first"] = smooth
        else:
            decrease = state["previous"] - smooth
            state["decrease_average"] = self.ema * state["decrease_average"] + (1.0 - self.ema) * decrease
        state["previous"] = smooth
        if step >= self.min_steps:
            recent = state["decrease_average"] / (1.0 - self.ema ** (step - 1))
            overall = (state["first"] - smooth) / (step - 1)
            state["slow_steps"] = state["slow_steps"] + 1 if recent < self.beta * overall else 0
            state["switched"] = state["slow_steps"] >= self.patience
        return self.switched

    def state_dict(self) -> _State:
        """Copy of the state: plain numbers only."""
        return dict(self._state)

    def load_state_dict(self, state: _State) -> None:
        """Take over a state from `state_dict`.

        Args:
            state: the numbers of another detector.

        Raises:
            ValueError: if its keys are not those of `state_dict`.
        """
        if state.keys() != self._state.keys():
            raise ValueError(
                f"state has the keys {sorted(state)}, not {sorted(self._state)}; "
                "pass what KneeDetector.state_dict returned"
            )
        self._state = dict(state)

    def __repr__(self) -> str:
        return (
            f"KneeDetector(beta={self.beta}, patience={self.patience}, min_steps={self.min_steps}, ema={self.ema}, "
            f"switched={self.switched})"
        )
