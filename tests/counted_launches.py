"""Operations of a step that would start something on an accelerator, counted."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rankwise.step.optimizer import ShardedOptimizer

# They only say how memory is to be read, and start nothing on a device.
VIEWS = {"view", "_unsafe_view", "slice", "select", "as_strided", "detach", "t", "transpose", "unsqueeze", "squeeze"}
VIEWS |= {
    "unbind",
    "alias",
    "split",
    "split_with_sizes",
    "expand",
    "permute",
    "_reshape_alias",
    "unflatten",
    "diagonal",
}


class Launches(TorchDispatchMode):
    """Counts operations that would start something on an accelerator.

    Args:
        on_host: Memory of tensors that live on the CPU by design: the step counts.
    """

    def __init__(self, on_host: list[torch.Tensor]) -> None:
        super().__init__()
        self._exempt = {tensor.data_ptr() for tensor in on_host}
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        of_host = bool(args) and isinstance(args[0], torch.Tensor) and args[0].data_ptr() in self._exempt
        if name not in VIEWS and not name.startswith("empty") and not of_host:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def counts_of(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    """The counts of an optimizer's steps, which are on the host by design."""
    on_host = [state[name] for state in optimizer.state.values() for name in state if name == "step"]
    counted = [state.name for state in optimizer.spec.matrix_states if state.counted]
    return on_host + [state[name] for state in optimizer.matrix_states.values() for name in counted]
