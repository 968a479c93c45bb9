"""Stages of a pipeline learn here from each other what their optimizers need to do what one process would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

from rankwise.routing.roles import Role, assign_role
from rankwise.statistics.module_hooks import ModuleHook
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["StageLosses", "is_pipeline", "refuse_if_idle_everywhere", "settle_shared_weights"]


def is_pipeline(engine: DeepSpeedEngine) -> bool:
    """Whether the engine's model is cut into stages."""
    return isinstance(getattr(engine, "module", None), PipelineModule)


def settle_shared_weights(module: PipelineModule) -> None:
    """Give weights that several stages hold the role of an embedding, on each of these stages.

    Each stage updates its own copy from the same summed gradient. MKOR's statistics are not summed, and matrix rules
    round differently in different batches, so that the copies would drift apart; an embedding takes an element-wise
    rule in every optimizer.

    Args:
        module: The model, whose stage is built.
    """
    for tie in module.tied_comms.values():
        if len(tie["ranks"]) > 1:
            assign_role(tie["module"].parameters(), Role.EMBEDDING)


def refuse_if_idle_everywhere(engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
    """Refuse a pipeline of which no stage has matrices; a collective of the stages.

    Args:
        engine: A pipeline engine.
        optimizer: The engine's basic optimizer, which was built without this check.

    Raises:
        OptionError: No stage has a parameter for the optimizer's own rule.
    """
    busy = torch.tensor(0.0 if optimizer.table.is_idle else 1.0, dtype=torch.float32, device=engine.device)
    dist.all_reduce(busy, dist.ReduceOp.MAX, group=engine.mpu.get_pipe_parallel_group())
    if not busy.item():
        optimizer.table.refuse_if_idle()


class StageLosses:
    """Carries MKOR-H's losses from the last stage, the only one that has them, to all stages.

    Args:
        engine: A pipeline engine; its module's loss function is wrapped.
        optimizer: The engine's basic optimizer.
    """

    def __init__(self, engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._losses: list[Tensor] = []
        self._window = self._sent = -1
        self._undo: list[Callable[[], None]] = []
        if engine.mpu.get_pipe_parallel_rank() == engine.mpu.get_pipe_parallel_world_size() - 1:
            self._listen(engine.module)
        self._undo.append(optimizer.register_step_pre_hook(self._send).remove)

    def remove(self) -> None:
        """Leave the model as it was."""
        while self._undo:
            self._undo.pop()()

    def _listen(self, module: PipelineModule) -> None:
        loss_fn = module.loss_fn
        if loss_fn is None:  # the last layer computes the loss
            self._hook(module)
        elif isinstance(loss_fn, nn.Module):
            self._hook(loss_fn)
        else:

            def recording(*args: Any, **kwargs: Any) -> Any:
                result = loss_fn(*args, **kwargs)
                self._record(result)
                return result

            module.loss_fn = recording
            self._undo.append(lambda: setattr(module, "loss_fn", loss_fn))

    def _hook(self, module: nn.Module) -> None:
        self._undo.append(module.register_forward_hook(ModuleHook(module, self._record)).remove)

    def _record(self, output: Any) -> None:
        loss = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            return
        if self._window != self._engine.global_steps:  # older losses belong to a step that was skipped
            self._window = self._engine.global_steps
            self._losses.clear()
        self._losses.append(loss.detach().float().reshape(()))

    def _send(self, *_: Any) -> None:
        if self._optimizer.switched or self._sent == self._engine.global_steps:
            return
        self._sent = self._engine.global_steps
        total = torch.zeros(2, dtype=torch.float64, device=self._engine.device)
        if self._losses and self._window == self._engine.global_steps:
            total[0] = torch.stack(self._losses).sum()
            total[1] = len(self._losses)
        self._losses.clear()
        dist.all_reduce(total, group=self._engine.mpu.get_pipe_parallel_group())
        # Without any loss this is NaN, which the detector ignores.
        self._optimizer.record_loss(total[0] / total[1])
