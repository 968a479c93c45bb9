"""What stands above the core and is found when it is needed: the reader of ``DTensor``, and advice on adapters.

Nothing here needs torch, so that ``rankwise`` may be imported without it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["advise", "framework_advice", "loaded_advice", "read_sharded_by", "sharded_readers"]

_ADVICE: dict[str, str] = {}
"""What to call, by the module that a program imports to use a framework."""
_importers: list[Callable[[], tuple[Any, Any]]] = []


def advise(module: str, advice: str) -> None:
    """Register what to call so that a framework tells an optimizer what it must know.

    Args:
        module: Module that a program imports to use the framework.
        advice: Clause that continues a message after a semicolon.
    """
    _ADVICE[module] = advice


def framework_advice() -> str:
    """What to call so that a framework tells an optimizer what it must know.

    An optimizer that was told nothing cannot know whose tensors it gets, so the frameworks that this process has loaded
    are named; all of them if it has loaded none.
    """
    return loaded_advice() or " or ".join(_ADVICE.values())


def loaded_advice() -> str:
    """What to call for the frameworks that this process has loaded; empty if it has loaded none."""
    return " or ".join(advice for module, advice in _ADVICE.items() if module in sys.modules)


def read_sharded_by(importer: Callable[[], tuple[Any, Any]]) -> None:
    """Register what imports the two functions of :func:`sharded_readers`."""
    _importers[:] = [importer]


@functools.cache
def sharded_readers() -> tuple[Any, ...]:
    """Return two functions for parameters that are ``DTensor``, or nothing if nobody registered any.

    Returns:
        The first makes a layout that can take a ``DTensor`` from one of the parameters that are known already. The
        second raises if parameters are not the model's any more, given the optimizer's name and parameters by name.
    """
    return _importers[0]() if _importers else ()
