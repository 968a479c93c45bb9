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
    page: Annotated[Path | None, typer.Option(help="Markdown page to write.")] = None,
) -> None:
    """Bytes each rank sends per parameter inside engine.step(), beside DeepSpeed's own Muon, in bf16."""
    from benchmarks.traffic import measure, traffic_page

    figures = []
    for stage in map(int, stages.split(",")):
        rows = measure(ranks, stage)
        figures += rows
        table = Table(title=f"stage {stage}: bytes per parameter and rank and step, {ranks} ranks, bf16, GPT-2 4 x 192")
        for heading in ("type", "collectives", "step", "beyond AdamW", "of Muon's", "backward"):
            table.add_column(heading, justify="right")
        for row in rows:
            share = "-" if row["of_muon"] is None else f"{row['of_muon']:.2f}"
            values = (f"{row[key]:.3f}" for key in ("step", "extra"))
            table.add_row(row["type"], f"{row['collectives']:.0f}", *values, share, f"{row['backward']:.3f}")
        console.print(table)
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n")
    if page is not None:
        page.write_text(traffic_page(figures, ranks))


@app.command()
def parity(
    figures: Annotated[Path, typer.Argument(help="JSON lines written by the parity tests.", exists=True)],
    page: Annotated[Path, typer.Argument(help="Markdown page to write.")] = Path("docs/parity.md"),
) -> None:
    """Turn the parity tests' figures into a page of the documentation."""
    from benchmarks.parity import parity_page, read_figures

    page.write_text(parity_page(read_figures(figures)))


@app.command()
def megatron_parity(
    figures: Annotated[Path, typer.Argument(help="JSON written by the Megatron parity tests.", exists=True)],
    page: Annotated[Path, typer.Argument(help="Markdown page to write.")] = Path("docs/megatron-parity.md"),
) -> None:
    """Turn the Megatron parity tests' figures into a page of the documentation."""
    from benchmarks.megatron_parity import megatron_page

    page.write_text(megatron_page(json.loads(figures.read_text())))


if __name__ == "__main__":
    app()
