"""This module shows runs side by side, in a table, as JSON, and in a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from rankwise.launch.comparing.logged_run import AXES, LoggedRun
from rankwise.launch.drawing import pyplot_if_installed

__all__ = ["as_rows", "compared", "draw"]

_MEBIBYTE = 1 << 20
_WORDS = {"steps": ("step", 1.0), "tokens": ("tokens, M", 1e6), "seconds": ("wall-clock, s", 1.0)}
"""Name of an axis in pictures, and its unit."""


def as_rows(runs: Sequence[LoggedRun]) -> list[dict[str, Any]]:
    """Return the numbers of the table; None for what a log does not have.

    ``of_steps``, ``of_tokens`` and ``of_seconds`` are what a run needed to be as low as the first one at its end, over
    what that one needed: of the validation losses where both have some.
    """
    return [_row(run, runs[0]) for run in runs]


def _row(run: LoggedRun, first: LoggedRun) -> dict[str, Any]:
    seconds, tokens = run.total("seconds"), run.total("tokens")
    return {
        "run": run.label,
        "source": str(run.source),
        "loss": run.loss.values[-1],
        "validation_loss": run.validation.values[-1] if run.validation.steps else None,
        "steps": run.steps,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if tokens and seconds else None,
        "step_share": run.step_share,
        "state_bytes": run.state_bytes,
        "peak_bytes": run.peak_bytes,
        **{f"of_{axis}": _needed(run, first, axis) for axis in AXES},
    }


def _needed(run: LoggedRun, first: LoggedRun, axis: str) -> float | None:
    both = run.validation.steps and first.validation.steps
    curve, goal = (run.validation, first.validation) if both else (run.loss, first.loss)
    mine, theirs = run.axis(axis), first.axis(axis)
    step = curve.reaches(goal.values[-1])
    if mine is None or theirs is None or step is None or not (whole := theirs(goal.steps[-1])):
        return None
    return mine(step) / whole


_LINES: tuple[tuple[str, str, str, float], ...] = (
    ("loss", "loss", "{:.4f}", 1),
    ("validation_loss", "validation loss", "{:.4f}", 1),
    ("steps", "steps", "{:,.0f}", 1),
    ("tokens", "tokens, M", "{:,.2f}", 1e6),
    ("seconds", "seconds", "{:,.1f}", 1),
    ("tokens_per_second", "tokens/s", "{:,.0f}", 1),
    ("step_share", "step share of time", "{:.1%}", 1),
    ("state_bytes", "state per rank, MiB", "{:,.2f}", _MEBIBYTE),
    ("peak_bytes", "peak memory, MiB", "{:,.0f}", _MEBIBYTE),
    ("of_steps", "steps to the first's loss", "{:.0%}", 1),
    ("of_tokens", "tokens to it", "{:.0%}", 1),
    ("of_seconds", "time to it", "{:.0%}", 1),
)
"""Key, heading, format and unit of each line of the table."""


def compared(runs: Sequence[LoggedRun]) -> Table:
    """Return the table, with a column for each run, and a line for each quantity that some run has."""
    rows = as_rows(runs)
    table = Table(caption=Text(f"losses at the end; the last lines: of what {runs[0].label} took"))
    table.add_column("")
    for run in runs:
        table.add_column(Text(run.label), justify="right", overflow="fold")
    for key, heading, form, unit in _LINES:
        if any(row[key] is not None for row in rows):
            table.add_row(heading, *("-" if row[key] is None else form.format(row[key] / unit) for row in rows))
    return table


def draw(runs: Sequence[LoggedRun], path: Path) -> None:
    """Draw losses against steps, tokens and wall-clock, as far as these are known, and shares of time and memory.

    Args:
        runs: Runs in the order of their colours.
        path: PNG to write.
    """
    pyplot = pyplot_if_installed()
    if pyplot is None:
        return
    axes = [axis for axis in AXES if any(run.axis(axis) for run in runs)]
    bars = [key for key in ("step_share", "state_bytes", "peak_bytes") if any(getattr(run, key) for run in runs)]
    figure, all_panels = pyplot.subplots(
        1, len(axes) + len(bars), figsize=(4 * len(axes) + 2.6 * len(bars), 4.4), layout="constrained", squeeze=False
    )
    panels = list(all_panels[0])
    colours = [f"C{index % 10}" for index in range(len(runs))]
    for axis, panel in zip(axes, panels, strict=False):
        for run, colour in zip(runs, colours, strict=True):
            _draw_losses(panel, run, axis, colour)
        panel.set(xlabel=_WORDS[axis][0], ylabel="loss" if axis == axes[0] else "")
    panels[0].legend()
    for key, panel in zip(bars, panels[len(axes) :], strict=True):
        share = key == "step_share"
        heights = [(getattr(run, key) or 0.0) * 100 / (1 if share else 100 * _MEBIBYTE) for run in runs]
        panel.bar([run.label for run in runs], heights, color=colours)
        title = {"step_share": "step share of time, %", "state_bytes": "state per rank, MiB"}.get(key, "peak, MiB")
        panel.set(title=title)
        panel.tick_params("x", rotation=60)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_losses(panel: Any, run: LoggedRun, axis: str, colour: str) -> None:
    along = run.axis(axis)
    if along is None:
        return
    held, unit = bool(run.validation.steps), _WORDS[axis][1]
    panel.plot(
        [along(step) / unit for step in run.loss.steps],
        run.loss.values,
        color=colour,
        linewidth=1,
        alpha=0.4 if held else 1.0,
        label=None if held else run.label,
    )
    if held:
        xs = [along(step) / unit for step in run.validation.steps]
        panel.plot(xs, run.validation.values, color=colour, marker="o", markersize=3, label=run.label)
