"""STAND-IN: its optimizers and its operations on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.AdamW):
    """AdamW that counts steps by group, as Transformer Engine's."""

    def __init__(
        self, params: Any, lr: float = 1e-3, adam_w_mode: bool = True, bias_correction: bool = True, **options: Any
    ) -> None:
        for unknown in set(options) - {"betas", "eps", "weight_decay"}:
            options.pop(unknown)
        super().__init__(params, lr=lr, **options)
        self.adam_w_mode = adam_w_mode

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        return super().step(closure)


class FusedSGD(torch.optim.SGD):
    """Plain SGD."""


def multi_tensor_applier(op: Callable[..., Any], overflow: Tensor, lists: Sequence[Any], *args: Any) -> Any:
    """Call an operation on lists of tensors."""
    return op(2048 * 32, overflow, lists, *args)


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: Any) -> None:
    """Write multiples of the first list's tensors to the second's."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_l2norm(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool) -> Any:
    """The norm over all tensors."""
    norms = torch.stack([tensor.norm().float() for tensor in lists[0]])
    return norms.norm().view(1), norms if per_tensor else None
