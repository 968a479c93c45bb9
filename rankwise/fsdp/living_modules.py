"""Finds the living modules of some classes.

``gc.get_objects`` would find them, too, but it adds a reference to every object: another thread that is about to fill a
tuple fails then ("bad argument to internal function"). Instances refer to their class, and hardly anything else does.
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
    # A module that another thread is building has no parameters yet, and is left out.
    return [module for module in gc.get_referrers(*wanted) if type(module) in wanted and "_parameters" in vars(module)]
