"""This module makes tables and curves from the files that the reference script leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from rankwise.launch.drawing import pyplot_if_installed

__all__ = ["plot_curves", "read_metrics", "read_summary", "results_table"]

_MEBIBYTE = 1 << 20


class _Column(NamedTuple):
    """A column of the table: what of a summary it shows, and how."""

    heading: str
    key: str
    written: Callable[[float], str]


_COLUMNS = (
    _Column("validation loss", "validation_loss", "{:.4f}".format),
    _Column("tokens/s", "tokens_per_second", "{:,.0f}".format),
    _Column("step share of time", "step_share", "{:.1%}".format),
    _Column("optimizer state per rank, MiB", "state_bytes_per_rank", lambda size: f"{size / _MEBIBYTE:.2f}"),
    _Column("peak memory, GiB", "peak_memory_bytes", lambda size: f"{size / 2**30:.2f}"),
    _Column("share of the peak", "share_of_peak", "{:.0%}".format),
)
"""The last two are known on GPUs alone."""


def read_summary(run: Path) -> dict[str, Any]:
    """Return the summary of a finished run's folder."""
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return summary


def read_metrics(run: Path, key: str) -> tuple[list[int], list[float]]:
    """Return steps and values of one recorded quantity, e.g. ``"loss"`` or ``"validation_loss"``."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if key in record]
    return [record["step"] for record in records], [record[key] for record in records]


def results_table(summaries: list[dict[str, Any]]) -> Table:
    """Return a table with a row per run, and the loss of a model that has only token frequencies as a yardstick.

    Args:
        summaries: Contents of ``summary.json`` of one or more runs on one text.
    """
    first = summaries[0]
    table = Table(
        title=f"{first['parameters'] / 1e6:.2f} M parameters, {first['world_size']} rank(s), "
        f"{first['layout']}, {first['steps']} steps, {first['tokens'] / 1e6:.2f} M tokens"
    )
    table.add_column("optimizer")
    shown = [column for column in _COLUMNS if any(column.key in summary for summary in summaries)]
    for column in shown:
        table.add_column(column.heading, justify="right")
    for summary in summaries:
        cells = (column.written(summary[column.key]) if column.key in summary else "" for column in shown)
        table.add_row(summary["label"], *cells)
    table.add_section()
    table.add_row("unigram entropy of the text", f"{first['unigram_entropy']:.4f}", style="dim")
    return table


def plot_curves(runs: list[Path], path: Path) -> bool:
    """Draw training loss (thin) and validation loss (marked) of several runs into a PNG.

    Args:
        runs: Folders of finished runs.
        path: PNG to write.

    Returns:
        Whether matplotlib is installed, and the PNG was written.
    """
    pyplot = pyplot_if_installed()
    if pyplot is None:
        return False
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for run in runs:
        summary = read_summary(run)
        (line,) = axes.plot(*read_metrics(run, "loss"), linewidth=1, alpha=0.5)
        label = f"{summary['label']} ({summary['validation_loss']:.3f})"
        axes.plot(*read_metrics(run, "validation_loss"), marker="o", markersize=4, color=line.get_color(), label=label)
    entropy = read_summary(runs[0])["unigram_entropy"]
    axes.axhline(entropy, color="grey", linestyle=":", label=f"unigram entropy ({entropy:.3f})")
    axes.set(xlabel="step", ylabel="loss, nats per token", title="thin: training, marked: validation")
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
