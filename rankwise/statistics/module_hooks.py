"""A forward hook stays with its module: copies of the module have one that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from rankwise.kernels.surroundings import is_imagined

__all__ = ["ModuleHook"]


class ModuleHook:
    """Calls a function with what one module returns, unless that has no values.

    Modules are copied and pickled with their hooks: exponential averages of weights must neither report what they
    compute nor take along what the function belongs to.

    Args:
        module: Module whose outputs count; None: no module's.
        call: Function that gets the output.
    """

    def __init__(self, module: nn.Module | None = None, call: Callable[[Any], Any] | None = None) -> None:
        self._module, self._call = module, call

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Call the function with the output, as a hook of :meth:`torch.nn.Module.register_forward_hook`."""
        if self._call is not None and module is self._module and not is_imagined():
            self._call(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()
