"""MKOR-H's losses: those a backward pass is run on, wherever they were computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn

from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["BackwardLosses"]


class BackwardLosses:
    """Reports the loss of every micro-batch that is trained on; forwards without a backward do not count.

    What ``engine.backward`` is given is the loss. Where a loop calls ``loss.backward()`` itself, the loss is heard when
    its gradient arrives, if it is the model's output.

    Args:
        engine: An engine without pipeline stages.
        optimizer: Its basic optimizer.
    """

    def __init__(self, engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._given = False
        self._hook = engine.module.register_forward_hook(self._listen)

    def remove(self) -> None:
        """Stop listening."""
        self._hook.remove()

    @contextmanager
    def given(self, loss: Tensor, scale_wrt_gas: bool = True) -> Iterator[None]:
        """While ``engine.backward(loss, scale_wrt_gas=...)`` runs; if that fails there was no micro-batch."""
        self._given = True
        try:
            yield
        finally:
            self._given = False
        # Unscaled, the caller's losses add up to the mean.
        share = 1 if scale_wrt_gas else self._engine.gradient_accumulation_steps()
        self._optimizer.record_loss(loss.detach() * share)

    def _listen(self, module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        loss = getattr(output, "loss", first)
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            loss.register_hook(partial(self._arrived, loss.detach().clone()))

    def _arrived(self, loss: Tensor, grad: Tensor) -> None:
        if not self._given:
            self._optimizer.record_loss(loss)
