"""What is known of an engine that is to load a checkpoint."""

from __future__ import annotations

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from deepspeed_plugin.auto_tp import tensor_ranks
from deepspeed_plugin.checkpoints.files import cut_of
from deepspeed_plugin.checkpoints.load_plan import Order, Present
from deepspeed_plugin.layouts import DeepSpeedLayout
from deepspeed_plugin.pipeline import is_pipeline
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["present_of"]


def present_of(engine: DeepSpeedEngine) -> Present:
    """What :func:`deepspeed_plugin.checkpoints.load_plan.decide` has to know of the engine."""
    optimizer = engine.basic_optimizer
    identity = optimizer.identity if isinstance(optimizer, ShardedOptimizer) else None
    partitions = engine.optimizer is not optimizer and engine.zero_optimization()
    ranks: int = dist.get_world_size(engine.seq_data_parallel_group)
    frozen = (name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad)
    return Present(
        identity=identity,
        optimizer=identity or type(optimizer).__name__,
        stage=int(engine.zero_optimization_stage()) if partitions else 0,
        ranks=ranks if partitions else None,
        stages=int(engine.mp_world_size),
        tensor=tensor_ranks(engine),
        pipeline=is_pipeline(engine),
        experts=bool(engine.has_moe_layers),
        partitioned=bool(engine.zero_optimization_partition_weights()),
        cut=cut_of(engine.config),
        groups=len(optimizer.param_groups) if identity is not None else 0,
        frozen=next(frozen, None),
        alone=ranks == dist.get_world_size(),
        copies=isinstance(engine.optimizer, FP16_UnfusedOptimizer),
        order=_order_of(engine),
    )


def _order_of(engine: DeepSpeedEngine) -> Order | None:
    layout = getattr(engine.basic_optimizer, "layout_source", None)
    groups = layout.order() if isinstance(layout, DeepSpeedLayout) else None
    return None if groups is None else (tuple(engine.module.state_dict()), tuple(map(len, groups)))
