"""Command line of the measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="Measurements of rankwise.", no_args_is_help=True, add_completion=False)
console = Console()


@app.callback()
def _root() -> None:
    """Keeps the measurements subcommands whatever their number."""


@app.command()
def traffic(
    ranks: Annotated[int, typer.Option(min=2, help="gloo processes.")] = 4,
    stages: Annotated[str, typer.Option(help="ZeRO stages, separated by commas.")] = "1,2,3",
    output: Annotated[Path | None, typer.Option(help="JSON file of the figures.")] = None,
) -> None:
    """Bytes each rank sends per parameter inside engine.step(), beside DeepSpeed's own Muon, in bf16."""
    from benchmarks.traffic import measure

    figures = [row for stage in stages.split(",") for row in measure(ranks, int(stage))]
    table = Table(title=f"bytes sent per parameter and rank in engine.step(), {ranks} ranks, bf16, GPT-2 4 x 192")
    for heading in ("stage", "type", "collectives", "all", "beyond the weights' all-gather", "of Muon's"):
        table.add_column(heading, justify="right")
    for row in figures:
        table.add_row(
            str(row["stage"]),
            row["type"],
            f"{row['collectives']:.0f}",
            f"{row['total']:.3f}",
            f"{row['extra']:.3f}",
            "-" if row["of_muon"] is None else f"{row['of_muon']:.2f}",
        )
    console.print(table)
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n")


@app.command()
def parity(
    figures: Annotated[Path, typer.Argument(help="JSON written by the parity tests.", exists=True)],
    page: Annotated[Path, typer.Argument(help="Markdown page to write.")],
) -> None:
    """Turn the parity tests' figures into a page of the documentation."""
    from benchmarks.parity import parity_page

    page.write_text(parity_page(json.loads(figures.read_text())))


if __name__ == "__main__":
    app()
