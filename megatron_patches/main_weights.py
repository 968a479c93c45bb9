"""Main weights that are no fp32 tensors on the device between two steps: 16 bits of each, or on the host."""

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
    """A tensor of the optimizer's, and the same elements of the model: fp32 ones share the model's memory."""

    main: Tensor
    model: Tensor


def _pairs(wrapper: DistributedOptimizer) -> Iterator[_Pair]:
    """The half-precision parameters' pieces on this rank, then those in fp32."""
    models, mains = wrapper.shard_float16_groups, wrapper.shard_fp32_from_float16_groups
    for model_group, main_group in zip(models, mains, strict=True):
        yield from map(_Pair, main_group, model_group)
    for group in wrapper.shard_fp32_groups:
        yield from (_Pair(shard, shard.detach()) for shard in group)


class KeptWeights(ABC):
    """Where a distributed optimizer's main weights are between steps.

    The optimizer's tensors stay the same objects, of the same shapes, on the model's device, so that Megatron reduces,
    scales, measures and clips their gradients as ever. Those that have no values there between steps read as NaN and
    cannot be written to.

    Args:
        wrapper: The distributed optimizer, built, with all main weights.
    """

    def __init__(self, wrapper: DistributedOptimizer) -> None:
        self._wrapper = wrapper
        self.pairs = list(_pairs(wrapper))
        self._here = True

    @contextmanager
    def here(self) -> Iterator[None]:
        """The optimizer's tensors have their values inside; what is changed there is kept, and the model follows."""
        outside = not self._here
        if outside:
            self.bring()
        try:
            yield
        finally:
            if outside and self._here:
                self.put_away()

    def bring(self) -> None:
        """Give the optimizer's tensors their values, and gradients beside them."""
        self._bring()
        self._here = True

    def put_away(self) -> None:
        """Let the model have the weights, and keep them until they are brought again."""
        self._put_away()
        self._here = False

    @abstractmethod
    def _bring(self) -> None: ...

    @abstractmethod
    def _put_away(self) -> None: ...


class Remainders(KeptWeights):
    """The 16 bits of the fp32 main weight that a bf16 weight lacks; see :mod:`rankwise.updates.remainders`."""

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
    """fp32 main weights in the host's memory, where the optimizer steps; its states follow its tensors.

    Of a model in fp32 the weights are its own, as without the setting: what is loaded or written into it counts. Those
    of a model in fewer bits are the main weights.

    Args:
        wrapper: See the base class.
        pin_weights: Whether their memory is pinned.
        pin_gradients: Alike.
    """

    def __init__(self, wrapper: DistributedOptimizer, pin_weights: bool, pin_gradients: bool) -> None:
        super().__init__(wrapper)
        self._host = [_on_host(main, main.dtype, pin_weights) for main, _ in self.pairs]
        self._grads = [_on_host(main, main.dtype, pin_gradients) for main, _ in self.pairs]
        # Rounded here, half as much has to travel.
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
        # Also for the weights that the last step has sent to the device.
        torch.cuda.current_stream().synchronize()
        for (main, _), weight, found in zip(self.pairs, self._host, present, strict=True):
            main.grad = None
            main.data = weight
            main.grad = found

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
    """A tensor of that shape without memory."""
    return torch.full((), torch.nan, dtype=like.dtype, device=device or like.device).expand(like.shape)


def _forget_main_params(wrapper: DistributedOptimizer) -> None:
    """As Megatron says of weights that are its optimizer's: ``--log-params-norm`` passes them over."""
    for group in wrapper.model_float16_groups:
        for parameter in group:
            parameter.main_param = None
