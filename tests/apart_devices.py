"""A stand-in for a device beside the host: both are the host's memory, and an operation on tensors of both is refused.

Which of the two a tensor belongs to follows from what it was made of. Those of neither (made from numbers, say) may go
with both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST, DEVICE = "host", "device"
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::_foreach_copy_")


class MixedDevicesError(RuntimeError):
    """An operation got tensors of the host and of the device."""


class _Places:
    def __init__(self) -> None:
        # The weak reference keeps another storage from getting the same identity.
        self._known: dict[int, tuple[StorageWeakRef, str]] = {}
        self.crossed = {HOST: 0, DEVICE: 0}
        """Copies that came to either."""

    def put(self, tensor: Tensor, place: str) -> Tensor:
        storage = tensor.untyped_storage()
        self._known[storage._cdata] = (StorageWeakRef(storage), place)
        return tensor

    def forget(self, tensor: Tensor) -> None:
        self._known.pop(tensor.untyped_storage()._cdata, None)

    def of(self, tensor: Tensor) -> str | None:
        found = self._known.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]


class _Dispatch(TorchDispatchMode):
    """Refuses mixtures, and lets results be where the operands are."""

    def __init__(self, places: _Places, copies_stay: bool) -> None:
        super().__init__()
        self.places, self.copies_stay = places, copies_stay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func._schema.name
        found = {self.places.of(operand): operand for operand in operands}
        if name in _COPIES:
            if name == "aten::copy_" and {HOST, DEVICE} <= found.keys():
                self.places.crossed[str(self.places.of(operands[0]))] += 1
            if name == "aten::_foreach_copy_" and self.copies_stay:
                for target, source in zip(args[0], args[1], strict=True):
                    place = self.places.of(source)
                    if place is not None and self.places.of(target) is None:
                        self.places.put(target, place)
            copy = func(*args, **(kwargs or {}))
            place = self.places.of(operands[0])
            if (
                name == "aten::_to_copy"
                and self.copies_stay
                and place is not None
                and (kwargs or {}).get("device") is None
            ):
                self.places.put(copy, place)
            return copy
        # As on a real device, which takes numbers of the host.
        alike = {place for place, operand in found.items() if place == DEVICE or (place and operand.dim())}
        if len(alike) > 1:
            raise MixedDevicesError(f"{name} got tensors of the host and of the device")
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and alike and self.places.of(result) is None:
                self.places.put(result, *alike)
        return results


class _Function(TorchFunctionMode):
    """Requests for a device, which on one machine alone would do nothing."""

    def __init__(self, places: _Places) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = [str(value) for value in (kwargs.get("device"), *args[1:]) if isinstance(value, str | torch.device)]
        result = func(*args, **kwargs)
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            models = [value for value in args[1:] if isinstance(value, Tensor)]
            if func is not Tensor.to or asked or models:
                place = HOST if func is Tensor.cpu else DEVICE if func is Tensor.cuda or "cuda" in str(asked) else None
                place = self.places.of(models[0]) if models else place
                result = result.detach().clone()
                # A copy is of neither until it is used, unless it is known whose it is.
                self.places.put(result, place) if place else self.places.forget(result)
        elif isinstance(result, Tensor) and any(value.startswith("cuda") for value in asked):
            self.places.put(result, DEVICE)
        return result


@contextmanager
def apart(copies_stay: bool = False) -> Iterator[_Places]:
    """Operations of this thread are watched; what it yields knows where tensors are, and is told where some lie.

    Args:
        copies_stay: Whether lists of copies, and copies in another type, are where their originals are.
    """
    places = _Places()
    with _Dispatch(places, copies_stay), _Function(places):
        yield places
