"""Pictures, where matplotlib is installed."""

from __future__ import annotations

from types import ModuleType

__all__ = ["HOW_TO_DRAW", "pyplot_if_installed"]

HOW_TO_DRAW = 'pictures need matplotlib: pip install "rankwise[plots]"'


def pyplot_if_installed() -> ModuleType | None:
    """Matplotlib's pyplot, which needs no display then; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
