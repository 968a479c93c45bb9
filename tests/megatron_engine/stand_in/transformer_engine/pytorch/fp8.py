"""STAND-IN: whether the present forward pass is in 8 bits, and by which recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformer_engine.common.recipe import DelayedScaling, Recipe

_recipes: list[Recipe | None] = []


class FP8GlobalStateManager:
    """What modules ask during their forward pass."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Whether an enabling scope is open, and the innermost."""
        return bool(_recipes) and _recipes[-1] is not None

    @staticmethod
    def get_fp8_recipe() -> Recipe | None:
        """Of the innermost scope."""
        return _recipes[-1] if _recipes else None

    @staticmethod
    def is_first_fp8_module() -> bool:
        """Never asked for here."""
        return False

    @staticmethod
    def reset() -> None:
        """Forget all scopes."""
        _recipes.clear()


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """A scope in which modules keep what the recipe asks for."""
    _recipes.append((fp8_recipe or DelayedScaling()) if enabled else None)
    try:
        yield
    finally:
        _recipes.pop()


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """A scope whose modules would store 8-bit weights: refused, as they are kernels' own."""
    assert not enabled, "the stand-in has no 8-bit weights"
    yield
