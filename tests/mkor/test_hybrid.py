"""MKOR-H's switch."""

from __future__ import annotations

import math

import pytest
import torch
from saved_files import through_a_file

from rankwise.mkor.hybrid_switch import KneeDetector


def kneed_loss(step: int, knee: int = 300) -> float:
    """Falls by 0.01 a step, then stays."""
    return 10.0 - 0.01 * min(step, knee)


def reference_switch(losses: list[float], beta: float, patience: int, min_steps: int, ema: float) -> int | None:
    """First step (from 1) at which the criterion has held ``patience`` times running, from whole histories."""

    def average(values: list[float]) -> float:
        weights = [ema**k for k in reversed(range(len(values)))]
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)

    smooth = [average(losses[:t]) for t in range(1, len(losses) + 1)]
    drops = [a - b for a, b in zip(smooth, smooth[1:], strict=False)]
    run = 0
    for t in range(2, len(losses) + 1):
        slow = average(drops[: t - 1]) < beta * (smooth[0] - smooth[t - 1]) / (t - 1)
        run = run + 1 if t >= min_steps and slow else 0
        if run == patience:
            return t
    return None


def switch_step(detector: KneeDetector, losses: list[float]) -> int | None:
    return next((t for t, loss in enumerate(losses, 1) if detector.update(loss)), None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("beta", "patience", "min_steps", "ema"),
    [(0.1, 5, 20, 0.8), (0.5, 1, 2, 0.0), (0.3, 10, 60, 0.9), (0.9, 3, 5, 0.97)],
)
def test_follows_its_definition(seed: int, beta: float, patience: int, min_steps: int, ema: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise = 0.02 * torch.randn(200, generator=generator, dtype=torch.float64)
    losses = [math.exp(-t / 25) + float(e) for t, e in enumerate(noise)]
    step = switch_step(KneeDetector(beta, patience, min_steps, ema), losses)
    assert step == reference_switch(losses, beta, patience, min_steps, ema)
    assert step is not None


def test_switches_after_the_knee_and_stays() -> None:
    detector = KneeDetector()
    step = switch_step(detector, [kneed_loss(t) for t in range(800)])
    assert step is not None
    assert 320 < step < 450
    assert detector.switched
    assert detector.update(-1000.0)


def test_steady_decrease_never_switches() -> None:
    detector = KneeDetector()
    assert switch_step(detector, [kneed_loss(t, knee=10**9) for t in range(2000)]) is None
    assert not detector.switched


@pytest.mark.parametrize(("patience", "min_steps"), [(1, 2), (7, 2), (3, 50)])
def test_waits_for_min_steps_and_patience(patience: int, min_steps: int) -> None:
    losses = [1.0, *([0.0] * 200)]
    step = switch_step(KneeDetector(beta=0.1, patience=patience, min_steps=min_steps, ema=0.0), losses)
    # From the third loss on nothing falls any more.
    assert step == max(3, min_steps) + patience - 1


def test_a_fast_step_restarts_the_count() -> None:
    losses = [1.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert switch_step(KneeDetector(beta=0.1, patience=3, min_steps=2, ema=0.0), losses) == 8


def test_non_finite_losses_are_passed_over() -> None:
    clean, noisy = KneeDetector(ema=0.9, min_steps=10), KneeDetector(ema=0.9, min_steps=10)
    for step in range(30):
        clean.update(kneed_loss(step, 5))
        for bad in (math.nan, math.inf, -math.inf):
            assert noisy.update(bad) == noisy.switched
        noisy.update(kneed_loss(step, 5))
    assert clean.state_dict() == noisy.state_dict()


def test_state_resumes_exactly() -> None:
    losses = [kneed_loss(t, 120) for t in range(400)]
    whole = KneeDetector()
    expected = [whole.update(loss) for loss in losses]
    for cut in (1, 99, 150, 399):
        first = KneeDetector()
        answers = [first.update(loss) for loss in losses[:cut]]
        second = KneeDetector()
        second.load_state_dict(through_a_file(first.state_dict()))
        answers += [second.update(loss) for loss in losses[cut:]]
        assert answers == expected
        assert second.state_dict() == whole.state_dict()
    assert expected[-1]


def test_state_is_a_copy_and_is_checked() -> None:
    detector = KneeDetector()
    state = detector.state_dict()
    detector.update(1.0)
    assert state["step"] == 0
    fresh = KneeDetector()
    fresh.load_state_dict(state)
    fresh.update(1.0)
    assert state["step"] == 0
    del state["first"]
    with pytest.raises(ValueError, match="state has the keys .* pass what KneeDetector.state_dict returned"):
        detector.load_state_dict(state)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"beta": 0.0}, "beta=0.0 must be positive"),
        ({"beta": math.nan}, "beta=nan must be positive"),
        ({"patience": 0}, "patience=0 must be at least 1"),
        ({"min_steps": 1}, "min_steps=1 must be at least 2"),
        ({"ema": 1.0}, r"ema=1.0 must lie in \[0, 1\)"),
        ({"ema": -0.1}, r"ema=-0.1 must lie in \[0, 1\)"),
    ],
)
def test_arguments(option: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KneeDetector(**option)  # type: ignore[arg-type]


def test_repr_tells_the_settings() -> None:
    assert repr(KneeDetector()) == "KneeDetector(beta=0.1, patience=20, min_steps=100, ema=0.95, switched=False)"
