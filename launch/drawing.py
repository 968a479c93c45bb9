"""Pictures need matplotlib, which may not be installed."""

from __future__ import annotations

from types import ModuleType

__all__ = ["HOW_TO_DRAW", "pyplot_if_installed"]

HOW_TO_DRAW = 'pictures need matplotlib: pip install "rankwise[plots]"'


def pyplot_if_installed() -> ModuleType | None:
    """Return matplotlib's pyplot, set up to need no display; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
