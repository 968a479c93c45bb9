"""MKOR-H's losses travel from the last pipeline stage's backward passes to every rank's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from megatron_patches.scaling import GradientScale
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["StepLosses"]


class StepLosses:
    """Reports the mean loss of a step to every optimizer, equal on all ranks of all stages.

    Megatron's schedules pass each micro-batch's loss through ``config.grad_scale_func``, the optimizer's
    ``scale_loss``, before its backward pass: the loss is recorded there, as the user's loss function made it. The mean
    is over micro-batches and data-parallel ranks, or over tokens with ``calculate_per_token_loss``.

    Args:
        built: The optimizer of the whole model; its ``scale_loss``, ``zero_grad`` and ``step`` are wrapped.
        optimizers: Our optimizers inside ``built``.
        chunks: The model chunks; a config without ``grad_scale_func`` is given the optimizer's ``scale_loss``.
        scale: Scale of the gradients.
        announce: Shows a message if no loss is reported.
    """

    def __init__(
        self,
        built: MegatronOptimizer,
        optimizers: Sequence[ShardedOptimizer],
        chunks: Sequence[nn.Module],
        scale: GradientScale,
        announce: Callable[[str], None],
    ) -> None:
        self._optimizers, self._scale, self._announce = optimizers, scale, announce
        self._losses: list[Tensor] = []
        self._is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self._warned = False
        self._device = next((p.device for chunk in chunks for p in chunk.parameters()), torch.device("cpu"))
        self._wrap(built)
        for chunk in chunks:
            config = get_model_config(chunk)
            if config.grad_scale_func is None:
                config.grad_scale_func = built.scale_loss

    def _wrap(self, built: Any) -> None:
        scale_loss, zero_grad, step = built.scale_loss, built.zero_grad, built.step

        def recording(loss: Tensor) -> Any:
            # Megatron also asks for the scale of a constant one.
            if loss.requires_grad and loss.numel() == 1:
                self._losses.append(loss.detach().float().reshape(()))
            return scale_loss(loss)

        def forgetting(*args: Any, **kwargs: Any) -> Any:
            self._losses.clear()
            return zero_grad(*args, **kwargs)

        def stepping(*args: Any, **kwargs: Any) -> Any:
            self._share()
            return step(*args, **kwargs)

        built.scale_loss, built.zero_grad, built.step = recording, forgetting, stepping

    def _share(self) -> None:
        """Average the loss over all ranks that have one, and report it on all. A collective until the switch."""
        if all(optimizer.switched for optimizer in self._optimizers):
            return
        if self._is_last and not self._losses and not self._warned:
            self._warned = True
            self._announce(
                "MKOR-H saw no loss in this step and will not switch without one: the training loop sets "
                "config.grad_scale_func to something other than optimizer.scale_loss, or uses no Megatron schedule."
            )
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        if self._losses:
            # The schedule has divided by the number of micro-batches.
            total[0], total[1] = torch.stack(self._losses).sum(), 1.0
        self._losses.clear()
        # All ranks take part: tensor-parallel ranks of the last stage have equal losses, and other stages none.
        dist.all_reduce(total)
        # Without any loss this is NaN, which the detector ignores.
        mean = total[0] / total[1] * (self._scale.factor * self._scale.ranks)
        for optimizer in self._optimizers:
            optimizer.record_loss(mean)
