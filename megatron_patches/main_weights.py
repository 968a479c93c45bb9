"""Between two steps main weights may be 16 bits of each on the device, or fp32 tensors on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from rankwise.updates.remainders import join, split

__all__ = ["HostWeights", "KeptWeights", "Remainders"]


class _Pair(NamedTuple):
    """A tensor of the optimizer, and the model's tensor with the same elements; in fp32 they share memory."""

    main: Tensor
    model: Tensor


def _pairs(wrapper: DistributedOptimizer) -> Iterator[_Pair]:
    """Yield this rank's pieces of half-precision parameters, then those of fp32 parameters."""
    models, mains = wrapper.shard_float16_groups, wrapper.shard_fp32_from_float16_groups
    for model_group, main_group in zip(models, mains, strict=True):
        yield from map(_Pair, main_group, model_group)
    for group in wrapper.shard_fp32_groups:
        yield from (_Pair(shard, shard.detach()) for shard in group)


class KeptWeights(ABC):
    """Keeps a distributed optimizer's main weights between steps.

    The optimizer's tensors stay the same objects, of the same shapes, on the model's device, so that Megatron reduces,
    scales, measures and clips their gradients as before. Tensors without values between steps read as NaN and cannot be
    written to.

    Args:
        wrapper: The built distributed optimizer, with all main weights.
    """

    def __init__(self, wrapper: DistributedOptimizer) -> None:
        self._wrapper = wrapper
        self.pairs = list(_pairs(wrapper))
        self._here = True

    @contextmanager
    def here(self) -> Iterator[None]:
        """Give the optimizer's tensors their values inside the context; changes are kept, and the model follows."""
        outside = not self._here
        if outside:
            self.bring()
        try:
            yield
        finally:
            if outside and self._here:
                self.put_away()

    def bring(self) -> None:
        """Give the optimizer's tensors their values, and move gradients beside them."""
        self._bring()
        self._here = True

    def put_away(self) -> None:
        """Copy the weights to the model, and keep them until they are brought again."""
        self._put_away()
        self._here = False

    @abstractmethod
    def _bring(self) -> None: ...

    @abstractmethod
    def _put_away(self) -> None: ...


class Remainders(KeptWeights):
    """Keeps the 16 bits that a bf16 weight lacks of its fp32 main weight, from :mod:`rankwise.updates.remainders`."""

    def __init__(self, wrapper: DistributedOptimizer) -> None:
        super().__init__(wrapper)
        self.pairs = [pair for pair in self.pairs if pair.model.dtype is torch.bfloat16]
        self._low = [torch.empty_like(pair.model, dtype=torch.int16) for pair in self.pairs]
        _forget_main_params(wrapper)
        self.put_away()

    def _bring(self) -> None:
        for (main, model), low in zip(self.pairs, self._low, strict=True):
            main.data = join(model, low)

    def _put_away(self) -> None:
        for (main, model), low in zip(self.pairs, self._low, strict=True):
            split(main.data, model, low)
            main.data = _nowhere(main)


class HostWeights(KeptWeights):
    """Keeps fp32 main weights in the host's memory, where the optimizer steps, with its states.

    If the model is in fp32, its own weights count, as without the setting: what is loaded or written into them stays.
    If it has fewer bits, the main weights count.

    Args:
        wrapper: The built distributed optimizer, with all main weights.
        pin_weights: Whether the memory of weights is pinned.
        pin_gradients: Whether the memory of gradients is pinned.
    """

    def __init__(self, wrapper: DistributedOptimizer, pin_weights: bool, pin_gradients: bool) -> None:
        super().__init__(wrapper)
        self._host = [_on_host(main, main.dtype, pin_weights) for main, _ in self.pairs]
        self._grads = [_on_host(main, main.dtype, pin_gradients) for main, _ in self.pairs]
        # Weights are rounded on the host, so that half as many bytes travel.
        self._rounded = [
            weight if model.dtype is weight.dtype else _on_host(model, model.dtype, pin_weights)
            for (_, model), weight in zip(self.pairs, self._host, strict=True)
        ]
        for (main, _), weight in zip(self.pairs, self._host, strict=True):
            weight.copy_(main.detach())
        _forget_main_params(wrapper)
        self.put_away()

    def _bring(self) -> None:
        present: list[Tensor | None] = []
        for (main, _), grad in zip(self.pairs, self._grads, strict=True):
            given = main.grad
            present.append(None if given is None else grad.copy_(given, non_blocking=True))
        for (main, model), weight in zip(self.pairs, self._host, strict=True):
            if model.dtype is main.dtype:
                weight.copy_(model, non_blocking=True)
        # This also waits for weights that the last step has sent to the device.
        torch.cuda.current_stream().synchronize()
        for (main, _), weight, gradient in zip(self.pairs, self._host, present, strict=True):
            main.grad = None
            main.data = weight
            main.grad = gradient

    def _put_away(self) -> None:
        for (main, model), weight, rounded in zip(self.pairs, self._host, self._rounded, strict=True):
            if rounded is not weight:
                rounded.copy_(weight)
            model.copy_(rounded, non_blocking=True)
            main.grad = None
            main.data = model if model.dtype is main.dtype else _nowhere(main, model.device)


def _on_host(like: Tensor, dtype: torch.dtype, pin: bool) -> Tensor:
    return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=pin)


def _nowhere(like: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a tensor of the shape without memory for its elements."""
    return torch.full((), torch.nan, dtype=like.dtype, device=device or like.device).expand(like.shape)


def _forget_main_params(wrapper: DistributedOptimizer) -> None:
    """Mark weights as Megatron does those of its optimizer's, so that ``--log-params-norm`` leaves them out."""
    for group in wrapper.model_float16_groups:
        for parameter in group:
            parameter.main_param = None
