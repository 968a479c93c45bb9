"""A plot for each experiment: the learning rates tried, and the loss over fresh seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

from benchmarks.convergence.experiment import Experiment
from benchmarks.convergence.results import Results
from benchmarks.convergence.search import known_figures, tried

matplotlib.use("Agg")
import matplotlib.pyplot as plt

__all__ = ["COLORS", "bars", "draw", "draw_differences", "draw_gains"]

COLORS = [*plt.get_cmap("tab20").colors[::2], *plt.get_cmap("tab20").colors[1::2], *plt.get_cmap("tab20b").colors[::2]]
"""Thirty, the strong ones first."""


def draw(experiment: Experiment, results: Results, path: Path) -> bool:
    """Draw an experiment, if anything of it has been run.

    Args:
        experiment: Which.
        results: What has been run.
        path: PNG file to write.

    Returns:
        Whether there was something.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), width_ratios=(3, 2))
    left.set_prop_cycle(color=COLORS)
    names: list[str] = []
    losses: list[float] = []
    for contender in experiment.contenders:
        best: dict[int, float] = {}
        for setting in contender.settings:
            for exponent, value in tried(experiment, contender, setting, results).items():
                best[exponent] = min(value, best.get(exponent, math.inf))
        points = sorted((contender.rate(exponent), value) for exponent, value in best.items())
        points = [(rate, value) for rate, value in points if math.isfinite(value)]
        if not points:
            continue
        (line,) = left.plot(*zip(*points, strict=True), marker="o", markersize=4)
        losses += [value for _, value in points]
        values = known_figures(experiment, contender, results)
        right.plot(values, [len(names)] * len(values), "o", color=line.get_color(), alpha=0.7)
        names.append(contender.name)
    left.set_xscale("log", base=2)
    left.xaxis.set_major_formatter(lambda rate, _: f"{rate:.2g}")
    left.tick_params(axis="x", labelsize=8)
    left.set_xlabel("learning rate (best setting at each)")
    left.set_ylabel(experiment.metric.replace("_", " "))
    left.set_title("trials")
    right.set_yticks(range(len(names)), names, fontsize=8)
    for label, line in zip(right.get_yticklabels(), left.get_lines(), strict=True):
        label.set_color(line.get_color())
    right.invert_yaxis()
    right.set_title("best trial, fresh seeds")
    figure.suptitle(f"{experiment.name}: {experiment.title}")
    if names:
        # What diverges nearly would leave the rest one line.
        left.set_ylim(top=min(left.get_ylim()[1], 2.0 * statistics.median(losses)))
        figure.set_figheight(max(5.0, 1.0 + 0.25 * len(names)))
        figure.tight_layout()
        figure.savefig(path, dpi=100)
    plt.close(figure)
    return bool(names)


def bars(figures: Mapping[str, float], label: str, title: str, path: Path) -> None:
    """Draw one figure for each type.

    Args:
        figures: By name, from the top.
        label: Label of the axis, with the unit.
        title: Title of the plot.
        path: PNG file to write.
    """
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.32 * len(figures)))
    axes.bar_label(axes.barh([*figures], [*figures.values()]), fmt="%.2f", padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(label)
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_differences(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]], labels: Sequence[str], path: Path
) -> None:
    """Draw differences in loss with their intervals over sizes and over lengths.

    Args:
        panels: By title, and by contender: value on the axis, mean, half the interval.
        labels: Labels of the axes, one for each panel.
        path: PNG file to write.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 5), sharey=True)
    for axis, label, (title, lines) in zip(axes, labels, panels.items(), strict=True):
        axis.axhline(0.0, color="black", linewidth=0.8)
        ticks = sorted({value for points in lines.values() for value, _, _ in points})
        for index, (name, points) in enumerate(lines.items()):
            if points:
                # A little apart, so that intervals can be told from each other.
                values = [value * 1.012 ** (index - len(lines) / 2) for value, _, _ in points]
                means, halves = [point[1] for point in points], [point[2] for point in points]
                axis.errorbar(
                    values, means, halves, marker="o", markersize=4, capsize=2, label=name, color=COLORS[index]
                )
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axis.minorticks_off()
        axis.set_xlabel(label)
        axis.set_title(title)
    axes[0].set_ylabel("held-out loss less AdamW's, nats per byte")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_gains(gains: Mapping[str, Mapping[str, tuple[float, float]]], path: Path) -> None:
    """Draw the difference from AdamW of each type with its interval, a line of dots for each size.

    Args:
        gains: By type, from the top, and by size: mean, half the interval.
        path: PNG file to write.
    """
    figure, axis = plt.subplots(figsize=(8, 0.8 + 0.42 * len(gains)))
    sizes = list(dict.fromkeys(size for values in gains.values() for size in values))
    for place, size in enumerate(sizes):
        apart = 0.14 * (place - (len(sizes) - 1) / 2)
        rows = [(row + apart, *values[size]) for row, values in enumerate(gains.values()) if size in values]
        heights, means, halves = zip(*rows, strict=True)
        label = f"{size} parameters"
        axis.errorbar(means, heights, xerr=halves, fmt="o", markersize=5, capsize=3, label=label, color=COLORS[place])
    axis.axvline(0.0, color="black", linewidth=0.8)
    axis.text(-0.002, -0.6, "AdamW", fontsize=9, horizontalalignment="right")
    axis.set_yticks(range(len(gains)), [*gains])
    axis.set_ylim(len(gains) - 0.5, -0.9)
    axis.set_xlabel("held-out loss less AdamW's, nats per byte (lower is better); rates of all searched")
    axis.legend(loc="lower left", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
