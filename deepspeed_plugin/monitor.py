"""DeepSpeed's monitor shows the optimizer's health in TensorBoard, CSV files, Weights & Biases or Comet."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["report_health"]


def report_health(engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
    """Write ``optim/<type>/<metric>`` every ``steps_per_print`` steps, where a monitor is configured.

    Args:
        engine: The engine.
        optimizer: The engine's basic optimizer.
    """
    if engine.monitor is None or not _configured(engine):
        return
    label = (engine.optimizer_name() or type(optimizer).__name__).lower()
    written = {"step": 0}

    def after_step(*_: Any) -> None:
        # The engine counts a step when all its groups are done, so that this reads the health of earlier steps.
        step = engine.global_steps
        if step == written["step"] or step % engine.steps_per_print():
            return
        written["step"] = step
        metrics = optimizer.read_health()
        if engine.monitor.enabled:
            events = [(f"optim/{label}/{name}", value, engine.global_samples) for name, value in metrics.items()]
            engine.monitor.write_events(events)

    optimizer.register_step_post_hook(after_step)


def _configured(engine: DeepSpeedEngine) -> bool:
    """Whether a monitor is configured, on which ranks agree: reading is collective, but only rank 0's is enabled."""
    return bool(engine._config.monitor_config.enabled)
