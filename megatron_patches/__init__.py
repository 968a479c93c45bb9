"""Under Megatron, :func:`apply` makes rankwise's optimizers valid ``--optimizer`` names.

Importing this package changes nothing and imports nothing of Megatron. A user's own training loop may do without
:func:`apply` and call this package's ``get_megatron_optimizer`` in place of Megatron's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from megatron_patches.apex import detect_apex
from megatron_patches.patches import PatchError, apply, check, revert

if TYPE_CHECKING:
    from megatron_patches.registry import NAMES, RankwiseConfig, get_megatron_optimizer, replace_adam

__all__ = [
    "NAMES",
    "PatchError",
    "RankwiseConfig",
    "apply",
    "check",
    "detect_apex",
    "get_megatron_optimizer",
    "replace_adam",
    "revert",
]


def __getattr__(name: str) -> Any:
    if name in ("NAMES", "RankwiseConfig", "get_megatron_optimizer", "replace_adam"):
        return getattr(importlib.import_module("megatron_patches.registry"), name)
    raise AttributeError(f"module 'megatron_patches' has no attribute '{name}'")
