"""What happens when a DeepSpeed engine takes one of our optimizers."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import log_dist
from torch import nn

from deepspeed_plugin.experts import name_experts
from deepspeed_plugin.layouts import layout_of, logical_shape
from deepspeed_plugin.monitor import report_health
from deepspeed_plugin.pipeline import StageLosses, is_pipeline, refuse_if_idle_everywhere, settle_shared_weights
from deepspeed_plugin.support import refuse_settings, refuse_wrapper
from rankwise import MKOR
from rankwise.optimizers.base import ShardedOptimizer
from rankwise.optimizers.patterns import refuse_unmatched, refuse_unmatched_everywhere
from rankwise.optimizers.routing import annotate

__all__ = ["attach", "prepare"]


def prepare(engine: DeepSpeedEngine, client_optimizer: Any) -> None:
    """Attach names, roles and logical shapes to the model's parameters before the optimizer is built.

    Args:
        engine: The engine, its model wrapped.
        client_optimizer: What the user passed to ``deepspeed.initialize``; an instance of ours, built before anything
            was known of the parameters but their shapes, learns it now.
    """
    annotate(engine.module, logical_shape)
    if engine.has_moe_layers:
        name_experts(engine.module)
    if is_pipeline(engine):
        settle_shared_weights(engine.module)
    if isinstance(client_optimizer, ShardedOptimizer):
        client_optimizer.reroute()


def attach(engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
    """Tell the optimizer how this engine stores its parameters, and MKOR what to capture.

    Args:
        engine: The engine, its wrapper built.
        optimizer: ``engine.basic_optimizer``.

    Raises:
        LayoutError: The engine uses a wrapper this version does not know.
        OptionError: The optimizer has nothing to update.
    """
    refuse_settings(engine, type(optimizer).__name__)
    refuse_wrapper(engine, type(optimizer).__name__)
    optimizer.leave_out_empty_groups()
    optimizer.attach(layout_of(engine, optimizer))
    report_health(engine, optimizer)
    optimizer.announce = lambda text: log_dist(text, ranks=[0])
    if isinstance(optimizer, MKOR):
        # A pipeline's stages run several micro-batches at once: none is the last.
        last = None if is_pipeline(engine) else engine.is_gradient_accumulation_boundary
        optimizer.capture(engine.module, window=lambda: engine.global_steps, last_micro_batch=last)
        if optimizer.options.hybrid and is_pipeline(engine):
            StageLosses(engine, optimizer)
        elif optimizer.options.hybrid:
            engine.module.register_forward_hook(_LossRecorder(optimizer))
    if is_pipeline(engine):
        refuse_if_idle_everywhere(engine, optimizer)
    _refuse_unmatched(engine, optimizer)


def _refuse_unmatched(engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
    """Refuse patterns of ``exclude`` without effect; frozen parameters count, which the optimizer was not given."""
    names = [*optimizer.parameters_by_name, *(name for name, _ in engine.module.named_parameters())]
    elsewhere = is_pipeline(engine) or engine.has_moe_layers
    refuse = refuse_unmatched_everywhere if elsewhere else refuse_unmatched
    refuse(type(optimizer).__name__, getattr(optimizer.options, "exclude", ()), list(dict.fromkeys(names)))


class _LossRecorder:
    """Forward hook that reports the model's loss: a scalar output, its ``.loss``, or the first of a tuple."""

    def __init__(self, optimizer: MKOR) -> None:
        self._optimizer = optimizer

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        first = output[0] if isinstance(output, tuple | list) and output else output
        loss = getattr(output, "loss", first)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
            self._optimizer.record_loss(loss)
