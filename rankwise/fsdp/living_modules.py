"""Finds the living modules of some classes.

``gc.get_objects`` would find them, too, but it adds a reference to every object: another thread that is about to fill a
tuple fails then ("bad argument to internal function"). Instances refer to their class, and hardly anything else does.
Either is a walk through all that the process has, so none is made where no class can have an instance.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["living_modules"]


def living_modules(classes: Iterable[type[Any]]) -> list[nn.Module]:
    """All living modules of some classes and of classes derived from these, as ``fully_shard`` derives them."""
    wanted = set(classes)
    waiting = list(wanted)
    while waiting:
        made = set(type.__subclasses__(waiting.pop())) - wanted
        wanted |= made
        waiting.extend(made)
    # ``FSDPModule`` is none of a module's classes by itself: instances have classes that are derived from it, too.
    of_modules = {each for each in wanted if issubclass(each, nn.Module)}
    referrers = gc.get_referrers(*of_modules) if of_modules else []
    # A module that another thread is building has no parameters yet, and is left out.
    return [module for module in referrers if type(module) in of_modules and "_parameters" in vars(module)]
