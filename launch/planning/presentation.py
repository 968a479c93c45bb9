"""This module shows a plan in tables, as JSON and in a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from rankwise.launch.drawing import HOW_TO_DRAW, pyplot_if_installed
from rankwise.launch.planning.advice import why_unbalanced
from rankwise.launch.planning.cluster import Cluster
from rankwise.launch.planning.costs import Cost
from rankwise.launch.planning.devices import Links
from rankwise.launch.planning.offload import offload_cost
from rankwise.launch.planning.rank_figures import Figures

__all__ = ["as_json", "draw", "show", "show_assumptions"]

_GIB = 1 << 30


def _memory(found: Figures) -> dict[str, list[int]]:
    return {
        "optimizer states": found.states(),
        "AdamW's states": found.adamw,
        "master weights": found.master,
        "gradients": found.gradients,
        "model weights": found.weights,
    }


def show(console: Console, name: str, found: Figures, cluster: Cluster, costs: list[Cost], links: Links) -> None:
    """Print what ranks hold and send, and how long a step takes.

    Args:
        console: Console to print to.
        name: Name of the optimizer.
        found: Figures of the plan.
        cluster: Ranks of the plan.
        costs: Costs on each kind of device.
        links: Links that the costs were computed with.
    """
    console.print(f"{name}: {cluster.words}", markup=False)
    met = f", {found.active / 1e9:.3f} B for each token" if round(found.active) < found.parameters else ""
    memory = Table(title=f"{found.parameters / 1e9:.3f} B parameters{met}")
    memory.add_column("a rank holds, GiB")
    for heading in ("fullest", "mean"):
        memory.add_column(heading, justify="right")
    for what, sizes in _memory(found).items():
        memory.add_row(what, f"{max(sizes) / _GIB:,.3f}", f"{fmean(sizes) / _GIB:,.3f}")
    console.print(memory)
    reason = why_unbalanced(found)
    counts = _owned(found)
    console.print(
        f"{len(found.owners)} matrices (or slices of them) have owners, {min(counts)} to {max(counts)} on a rank. "
        + (f"Emptier ranks keep {found.lent} of their states. " if found.lent else "")
        + (reason or f"The fullest rank holds {found.fullest:.2f} times the mean.")
    )
    sent = max(found.ranks, key=lambda rank: rank.bytes_sent)
    inside, across = links.shares(sent.bytes_sent, found.exchanging)
    console.print(
        f"A step sends {sent.bytes_sent / 2**20:,.1f} MiB from a rank at most, in {sent.collectives} collectives among "
        f"{found.exchanging} ranks: {inside / 2**20:,.1f} inside a node of {links.per_node} ranks, "
        f"{across / 2**20:,.1f} across"
        + (f"; every {sent.period} steps {sent.periodic_bytes / 2**20:,.1f} MiB more." if sent.periodic_bytes else ".")
    )
    offloaded = offload_cost(found)
    if offloaded is not None:
        console.print(offloaded.words)
    console.print(_times(costs))


_TIMES = ("compute", "memory", "messages", "hidden", "exposed", "total", "training")
_CALLED = ("matrix rule", "elements", "messages", "of these hidden", "exposed", "step", "forward, backward")


def _times(costs: list[Cost]) -> Table:
    """Return a column of milliseconds for each device: the longest figures fit in 80 columns, side by side."""
    table = Table(title="Milliseconds of a step on the slowest rank")
    table.add_column("", no_wrap=True)
    for one in costs:
        table.add_column(one.device.name, justify="right", no_wrap=True)
    for what, called in zip(_TIMES, _CALLED, strict=True):
        table.add_row(called, *(_three_digits(getattr(one, what)) for one in costs))
    table.add_row("share of training", *(f"{one.share:.1%}" for one in costs))
    return table


def _three_digits(milliseconds: float) -> str:
    if milliseconds >= 10_000:
        return f"{milliseconds / 1e3:,.{1 if milliseconds < 1e6 else 0}f} s"
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.2f}"


def show_assumptions(console: Console, found: Figures, links: Links, asked_tokens: int, efficiency: float) -> None:
    """Print what the times rest on, with the options that change it.

    Args:
        console: Console to print to.
        found: Figures of the plan.
        links: Links that the costs were computed with.
        asked_tokens: Tokens of a global batch.
        efficiency: Share of the peak that products reach.
    """
    flops = max(rank.flops for rank in found.ranks)
    console.print(
        f"Assumed: {asked_tokens:,} tokens a step (--batch-tokens), {efficiency:.0%} of the peak of data sheets "
        f"(--efficiency), {links.inside:g} GB/s in a node of {links.per_node} and {links.across:g} between nodes. "
        f"{flops / 1e12:.3f} TFLOP on the rank that computes most. Nothing here was measured. Exposed: waiting for "
        "messages, or for other ranks to be done with a batch."
    )


def _owned(found: Figures) -> list[int]:
    counts = [0] * len(found.ranks)
    for owner in found.owners.values():
        counts[owner] += 1
    return counts


def as_json(name: str, found: Figures, cluster: Cluster, costs: list[Cost], links: Links) -> dict[str, Any]:
    """Return the plan for programs, with every rank and matrix.

    Args:
        name: Name of the optimizer.
        found: Figures of the plan.
        cluster: Ranks of the plan.
        costs: Costs on each kind of device.
        links: Links that the costs were computed with.
    """
    sent = max(found.ranks, key=lambda rank: rank.bytes_sent)
    inside, across = links.shares(sent.bytes_sent, found.exchanging)
    offloaded = offload_cost(found)
    ranks = zip(found.ranks, found.master, found.gradients, found.weights, found.adamw, strict=True)
    return {
        "optimizer": name,
        "parameters": found.parameters,
        "active_parameters": round(found.active),
        "ranks": cluster.ranks,
        "layout": cluster.words,
        "bytes": {what: {"max": max(sizes), "mean": fmean(sizes)} for what, sizes in _memory(found).items()},
        "fullest_over_mean": found.fullest,
        "why": why_unbalanced(found),
        "sent": {"max": sent.bytes_sent, "inside": inside, "across": across, "collectives": sent.collectives},
        "offload": None if offloaded is None else asdict(offloaded),
        "flops": max(rank.flops for rank in found.ranks),
        "costs": [
            {
                "device": one.device.name,
                "matrix_ms": one.compute,
                "element_ms": one.memory,
                "messages_ms": one.messages,
                "hidden_ms": one.hidden,
                "exposed_ms": one.exposed,
                "serial_ms": one.serial,
                "total_ms": one.total,
                "training_ms": one.training,
                "share": one.share,
            }
            for one in costs
        ],
        "owners": found.owners,
        "lent": found.lent,
        "per_rank": [
            {
                "state_bytes": rank.state_bytes,
                "matrix_state_bytes": rank.matrix_state_bytes,
                "scratch_bytes": rank.scratch_bytes,
                "master_bytes": master,
                "gradient_bytes": gradients,
                "weight_bytes": weights,
                "adamw_bytes": adamw,
                "bytes_sent": rank.bytes_sent,
                "collectives": rank.collectives,
                "periodic_bytes": rank.periodic_bytes,
                "period": rank.period,
                "flops": rank.flops,
            }
            for rank, master, gradients, weights, adamw in ranks
        ],
    }


def draw(name: str, found: Figures, cluster: Cluster, path: Path) -> None:
    """Draw state and work of every rank.

    Args:
        name: Name of the optimizer.
        found: Figures of the plan.
        cluster: Ranks of the plan.
        path: PNG to write.

    Raises:
        ModuleNotFoundError: There is no matplotlib.
    """
    pyplot = pyplot_if_installed()
    if pyplot is None:
        raise ModuleNotFoundError(HOW_TO_DRAW)
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True, layout="constrained")
    above.plot([size / _GIB for size in found.states()], drawstyle="steps-mid", label=name)
    above.plot([size / _GIB for size in found.adamw], drawstyle="steps-mid", label="AdamW", color="grey")
    above.axhline(fmean(found.states()) / _GIB, linestyle=":", color="C0", label="mean")
    above.set(ylabel="optimizer states, GiB", title=f"{name}, {cluster.words}", ylim=(0, None))
    above.legend()
    below.plot([rank.flops / 1e12 for rank in found.ranks], drawstyle="steps-mid")
    below.set(xlabel="rank", ylabel="work of a step, TFLOP", ylim=(0, None))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
