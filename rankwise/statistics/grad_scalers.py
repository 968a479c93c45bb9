"""``torch.amp.GradScaler`` reports what it divides gradients by, which the gradients themselves do not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.amp import GradScaler

__all__ = ["HearsOfScalers", "watch_gradient_scalers"]

_MARK = "_tells_rankwise"


@runtime_checkable
class HearsOfScalers(Protocol):
    """An optimizer that must know what its gradients have been divided by."""

    def gradients_unscaled(self, scale: Tensor, is_over: Callable[[], bool]) -> None:
        """Hear that a scaler has divided this step's gradients.

        Args:
            scale: What it has divided by; the scaler changes this tensor after the step.
            is_over: Whether the scaler has been updated since, and so has stepped, or has skipped the step.
        """


def watch_gradient_scalers() -> None:
    """Make all gradient scalers, of torch's class and those derived so far, report what they divide by.

    ``scaler.step()`` calls ``unscale_()``, as users do who clip, and a subclass may have its own. Only this method
    changes, and it does for any optimizer what it did before.
    """
    for kind in _with_subclasses(GradScaler):
        unscale = kind.__dict__.get("unscale_")
        if unscale is not None and not hasattr(unscale, _MARK):
            kind.unscale_ = _telling(unscale)  # type: ignore[method-assign]


def _telling(unscale: Any) -> Any:
    @wraps(unscale)
    def unscale_(scaler: GradScaler, optimizer: Any, *args: Any, **more: Any) -> Any:
        result = unscale(scaler, optimizer, *args, **more)
        scale = scaler._scale if scaler.is_enabled() else None  # get_scale() waits for the device
        if scale is not None and isinstance(optimizer, HearsOfScalers):
            optimizer.gradients_unscaled(scale, lambda: id(optimizer) not in scaler._per_optimizer_states)
        return result

    setattr(unscale_, _MARK, True)
    return unscale_


def _with_subclasses(kind: type[GradScaler]) -> Iterator[type[GradScaler]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _with_subclasses(derived)
