"""Modules that live in this process, by their classes.

``gc.get_objects`` would tell of them, too, and of everything else: of a tuple that another thread is about to fill it
makes one more reference, and the thread fails ("bad argument to internal function"). What refers to a class are its
instances, and hardly anything else.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["living_modules"]


def living_modules(classes: Iterable[type[Any]]) -> list[nn.Module]:
    """All living modules of some classes and of classes made from these, as ``fully_shard`` makes them."""
    wanted = set(classes)
    waiting = list(wanted)
    while waiting:
        made = set(type.__subclasses__(waiting.pop())) - wanted
        wanted |= made
        waiting.extend(made)
    # A module that another thread is about to build has no parameters yet.
    return [each for each in gc.get_referrers(*wanted) if type(each) in wanted and "_parameters" in vars(each)]
