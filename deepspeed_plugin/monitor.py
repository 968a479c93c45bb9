"""The optimizer's health on DeepSpeed's monitor: TensorBoard, CSV, Weights & Biases, Comet."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["report_health"]


def report_health(engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
    """Write ``optim/<type>/<metric>`` every ``steps_per_print`` steps, where a monitor is configured.

    Args:
        engine: The engine.
        optimizer: Its basic optimizer.
    """
    if engine.monitor is None or not _configured(engine):
        return
    label = (engine.optimizer_name() or type(optimizer).__name__).lower()
    written = {"step": 0}

    def after_step(*_: Any) -> None:
        # The engine counts a step when all groups are done: what is read belongs to the steps before.
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
    """Whether any rank has a monitor: reading is collective, but only rank 0's monitor is enabled."""
    return bool(engine._config.monitor_config.enabled)
