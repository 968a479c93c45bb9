"""These functions connect a DeepSpeed engine with one of our optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from deepspeed_plugin import auto_tp
from deepspeed_plugin.affine_maps import logical_shape
from deepspeed_plugin.experts import name_experts
from deepspeed_plugin.layouts import layout_of
from deepspeed_plugin.losses import BackwardLosses
from deepspeed_plugin.monitor import report_health
from deepspeed_plugin.pipeline import StageLosses, is_pipeline, refuse_if_idle_everywhere, settle_shared_weights
from deepspeed_plugin.state_access import StateAccess
from deepspeed_plugin.support import refuse_built_before, refuse_masters, refuse_settings, refuse_wrapper
from rankwise.routing.patterns import refuse_unmatched, refuse_unmatched_everywhere
from rankwise.routing.roles import annotate
from rankwise.step.optimizer import ShardedOptimizer
from rankwise.step.reports import print_on_first_rank

__all__ = ["attach", "backward", "detach", "prepare"]

_HOOKS = "_rankwise_hooks"
"""Attribute of an engine with the hooks to remove when it is destroyed."""


def prepare(engine: DeepSpeedEngine, client_optimizer: Any) -> None:
    """Attach names, roles and logical shapes to the model's parameters before the optimizer is built.

    Args:
        engine: The engine, whose model is wrapped already.
        client_optimizer: What the user passed to ``deepspeed.initialize``; an instance of ours, which was built when
            parameters had nothing but shapes, learns their names and roles now.
    """
    if auto_tp.is_cut(engine):
        auto_tp.recall(engine.module)
    else:
        annotate(engine.module, logical_shape)
    if engine.has_moe_layers:
        name_experts(engine.module)
    if is_pipeline(engine):
        settle_shared_weights(engine.module)
    if isinstance(client_optimizer, ShardedOptimizer):
        refuse_built_before(engine, client_optimizer)
        client_optimizer.reroute()


def attach(engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
    """Tell the optimizer how this engine stores its parameters, and MKOR what to capture.

    Args:
        engine: The engine, whose wrapper is built.
        optimizer: The engine's ``basic_optimizer``.

    Raises:
        LayoutError: The engine uses a wrapper that this version does not know.
        OptionError: The optimizer has nothing to update.
    """
    refuse_settings(engine, optimizer.spec.name)
    refuse_wrapper(engine, optimizer.spec.name)
    refuse_masters(engine, optimizer)
    optimizer.table.leave_out_empty_groups()
    layout = layout_of(engine, optimizer)
    optimizer.attach(layout)
    report_health(engine, optimizer)
    # DeepSpeed's log_dist would show nothing, as its logger begins at warnings.
    optimizer.reports.announce = print_on_first_rank
    hooks: list[Any] = [StateAccess(engine, optimizer, layout)]
    if optimizer.needs_capture:
        # A pipeline's stages run several micro-batches at once, so that none can be called the last.
        last = None if is_pipeline(engine) else engine.is_gradient_accumulation_boundary
        optimizer.capture(
            engine.module,
            window=lambda: engine.global_steps,
            last_micro_batch=last,
            describe=layout.linear_views,
        )
        hooks.append(_Captured(optimizer))
    if optimizer.needs_loss:
        hooks.append((StageLosses if is_pipeline(engine) else BackwardLosses)(engine, optimizer))
    setattr(engine, _HOOKS, hooks)
    if is_pipeline(engine):
        refuse_if_idle_everywhere(engine, optimizer)
    _refuse_unmatched(engine, optimizer)


def _refuse_unmatched(engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
    """Refuse patterns of options without effect; frozen parameters count, which the optimizer was not given."""
    names = [*optimizer.table.parameters, *(name for name, _ in engine.module.named_parameters())]
    elsewhere = is_pipeline(engine) or engine.has_moe_layers
    refuse = refuse_unmatched_everywhere if elsewhere else refuse_unmatched
    for key, patterns in optimizer.options.patterns.items():
        refuse(optimizer.spec.name, patterns, list(dict.fromkeys(names)), key)


def backward(original: Callable[..., Any], engine: DeepSpeedEngine, loss: Tensor, *args: Any, **options: Any) -> Any:
    """Run DeepSpeed's ``backward``, and report the loss to MKOR-H.

    Args:
        original: DeepSpeed's method.
        engine: The engine.
        loss: Loss that DeepSpeed gets.
        args: ``retain_graph`` and ``scale_wrt_gas``.
        options: Further arguments of DeepSpeed's method, by name.
    """
    losses = next((hook for hook in getattr(engine, _HOOKS, ()) if isinstance(hook, BackwardLosses)), None)
    if losses is None:
        return original(engine, loss, *args, **options)
    with losses.given(loss, args[1] if len(args) > 1 else options.get("scale_wrt_gas", True)):
        return original(engine, loss, *args, **options)


def detach(engine: DeepSpeedEngine) -> None:
    """Take everything off the model that :func:`attach` put there, because others may train it on."""
    for hook in engine.__dict__.pop(_HOOKS, ()):
        hook.remove()


class _Captured:
    """An optimizer's hooks on the model, which can be removed."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def remove(self) -> None:
        self._optimizer.release()
