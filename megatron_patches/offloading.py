"""Weights and states of an optimizer wait in the host's memory while the device serves a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

from rankwise.layout.dtensors import local_view
from rankwise.step.optimizer import ShardedOptimizer

__all__ = ["Offloading", "is_on_device", "let_others_move", "memory_of"]


def memory_of(tensor: Tensor) -> int:
    """Return the address of the memory in which this rank's part of a tensor lies."""
    return local_view(tensor).untyped_storage().data_ptr()


def is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor takes an accelerator's memory."""
    return tensor.device.type != "cpu"


class Offloading:
    """Moves an optimizer's tensors to the host and back to where they were.

    Tensors that were on the host before, as step counts are, stay there: on the device every step would wait for them.

    Args:
        inner: The optimizer.
    """

    def __init__(self, inner: ShardedOptimizer) -> None:
        self._inner = inner
        self._weights: dict[Tensor, torch.device] = {}
        # Keys are the identity of a state's dictionary, which outlives the move, and the state's name.
        self._states: dict[tuple[int, str], torch.device] = {}

    def offload(self, model_memory: Collection[int]) -> None:
        """Move main weights, element states and matrix states to the host.

        Args:
            model_memory: Addresses of the memory of the model's own weights, which stay where they are.
        """
        for weight in self._main_weights():
            is_own = memory_of(weight) not in model_memory and not _is_elsewhere(weight)
            if is_on_device(weight) and is_own:
                self._weights[weight] = weight.device
                weight.data = weight.data.to("cpu", copy=True)
        for state in self._dictionaries():
            for name, value in state.items():
                if isinstance(value, Tensor) and is_on_device(value):
                    self._states[id(state), name] = value.device
                    state[name] = value.to("cpu", copy=True)

    def restore(self) -> None:
        """Move back the tensors that :meth:`offload` has moved."""
        for weight, device in self._weights.items():
            weight.data = weight.data.to(device, copy=True)
        for state in self._dictionaries():
            for name, value in state.items():
                home = self._states.get((id(state), name))
                if home is not None:
                    state[name] = value.to(home, copy=True)
        self._weights.clear()
        self._states.clear()

    def _main_weights(self) -> Iterator[Tensor]:
        for group in self._inner.param_groups:
            yield from group["params"]

    def _dictionaries(self) -> Iterator[MutableMapping[str, Any]]:
        yield from self._inner.state.values()
        yield from self._inner.matrix_states.values()
        yield from self._inner.matrix_states.loaded.values()


def _is_elsewhere(weight: Tensor) -> bool:
    """Whether a weight is kept in other tensors between steps, and has no memory for all of its elements."""
    return local_view(weight).untyped_storage().nbytes() < local_view(weight).numel() * weight.element_size()


class _AllStates:
    """Stands for a part of Megatron's hybrid optimizer, and moves all states when a framework asks for its own."""

    def __init__(self, offload: Callable[[], None]) -> None:
        self._offload = offload

    @property
    def state(self) -> dict[Any, Any]:
        self._offload()
        return {}


def let_others_move(inner: Any, offload: Callable[[], None], restore: Callable[[], None]) -> None:
    """Answer frameworks that take an optimizer to the host and back by themselves, as verl and ms-swift do.

    They know Adam's two states by name, and Megatron's hybrid optimizer by three attributes, whose parts they go
    through one after the other and whose ``_move_new_state_to_right_device`` they call in the end.

    Args:
        inner: The optimizer, which gets these attributes.
        offload: Moves all states of the optimizer.
        restore: Moves the states back.
    """
    inner.sub_optimizers = (_AllStates(offload),)
    inner.inner_param_to_orig_param = {}
    inner._move_new_state_to_right_device = restore
