"""MKOR-H gets the losses that backward passes are run on, wherever they were computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from rankwise.mkor.optimizer import MKOR
from rankwise.statistics.module_hooks import ModuleHook
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["BackwardLosses"]


class BackwardLosses:
    """Reports the loss of every micro-batch that is trained on; forwards without a backward do not count.

    The argument of ``engine.backward`` is the loss. If a loop calls ``loss.backward()`` itself, and the loss is the
    model's output, it is reported when its gradient arrives. Losses of batches that are thrown away are forgotten.

    Args:
        engine: An engine without pipeline stages.
        optimizer: The engine's basic optimizer.
    """

    def __init__(self, engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
        self._engine, self._switch = engine, cast(MKOR, optimizer).switch
        self._given = False
        self._hook = engine.module.register_forward_hook(ModuleHook(engine.module, self._listen))

    def remove(self) -> None:
        """Stop listening."""
        self._hook.remove()

    @contextmanager
    def given(self, loss: Tensor, scale_wrt_gas: bool = True) -> Iterator[None]:
        """Report a loss after ``engine.backward(loss, scale_wrt_gas=...)`` has run; if that fails, nothing."""
        self._switch.begin_pass()
        self._given = True
        try:
            yield
        finally:
            self._given = False
        # If DeepSpeed does not scale them, the caller's losses add up to the mean.
        share = 1 if scale_wrt_gas else self._engine.gradient_accumulation_steps()
        self._switch.record(loss.detach() * share, is_propagated=True)

    def _listen(self, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        loss = getattr(output, "loss", first)
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
            self._switch.expect(loss, unless=lambda: self._given)
