"""Command line of the experiments."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["app"]

app = typer.Typer()

FOLDER = Path("docs/data/convergence")
PAGE = Path("docs/evidence.md")


@app.command()
def convergence(
    only: Annotated[str, typer.Option(help="Experiments, separated by commas; all by default.")] = "",
    contender: Annotated[list[str] | None, typer.Option(help="Only these; may be given several times.")] = None,
    cores: Annotated[int, typer.Option(min=1, help="Threads; the priority is the lowest there is.")] = 1,
    results: Annotated[Path, typer.Option(help="Folder of the results, read and added to.")] = FOLDER,
    minutes: Annotated[float, typer.Option(help="Begin no run after so many.")] = float("inf"),
    again: Annotated[bool, typer.Option(help="Repeat what is recorded, and print both; writes nothing.")] = False,
    missing: Annotated[bool, typer.Option(help="Run nothing: say what is yet to be run.")] = False,
) -> None:
    """Try what the papers claim, on real data against tuned baselines; goes on where it was stopped."""
    import torch

    from benchmarks.convergence.experiments import chosen
    from benchmarks.convergence.results import Results
    from benchmarks.convergence.session import compare, missing_runs, work

    try:
        wanted = [(experiment, tuple(map(experiment.contender, contender or ()))) for experiment in chosen(only)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    os.nice(19)
    torch.set_num_threads(cores)
    found = Results(results)
    end = time.monotonic() + 60.0 * minutes
    for experiment, contenders in wanted:
        if missing:
            least, unknown = missing_runs(experiment, found)
            print(
                f"{experiment.name}: {least} runs" + (f", and those of {unknown} contenders' seeds" if unknown else "")
            )
            continue
        lines = compare(experiment, contenders, found) if again else work(experiment, contenders, found, end)
        try:
            for line in lines:
                print(line, flush=True)
        except ModuleNotFoundError as error:  # the digits' package
            print(f"{experiment.name}: {error}")
            raise typer.Exit(1) from error


@app.command()
def states(
    results: Annotated[Path, typer.Option(help="Folder of the results, read and added to.")] = FOLDER,
    minutes: Annotated[float, typer.Option(help="Begin no run after so many.")] = float("inf"),
) -> None:
    """Try what narrow states cost in loss (E10); goes on where it was stopped."""
    import torch

    from benchmarks.convergence.results import Results
    from benchmarks.convergence.state_types import work_on_states

    os.nice(19)
    torch.set_num_threads(1)
    for line in work_on_states(Results(results), time.monotonic() + 60.0 * minutes):
        print(line, flush=True)


@app.command()
def directions(
    output: Annotated[Path, typer.Option(help="JSON file to write.")] = FOLDER / "directions.json",
) -> None:
    """Compare MKOR's direction with that of K-FAC with dense factors, along a run of E2's autoencoder."""
    import torch

    from benchmarks.convergence.directions import measure_directions

    os.nice(19)
    torch.set_num_threads(1)
    _write(output, measure_directions())


@app.command()
def costs(
    folder: Annotated[Path, typer.Option(help="Folder of the JSON files to write.")] = FOLDER,
) -> None:
    """Measure what the optimizers keep, on two ranks, and what share of a step they take (E6 and E7)."""
    import torch

    from benchmarks.convergence.costs import measure_costs, measure_memory

    torch.set_num_threads(1)
    _write(folder / "memory.json", measure_memory())
    _write(folder / "costs.json", measure_costs())


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


@app.command()
def rates(
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = FOLDER,
    page: Annotated[Path, typer.Option(help="Markdown page to write.")] = Path("docs/rates.md"),
) -> None:
    """Write which learning rate of ours stands for one of AdamW's."""
    from benchmarks.convergence.rates_page import rates_page
    from benchmarks.convergence.results import Results

    page.write_text(rates_page(Results(results)), encoding="utf-8")


@app.command()
def evidence(
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = FOLDER,
    page: Annotated[Path, typer.Option(help="Markdown page to write, with plots beside it.")] = Path(
        "docs/evidence.md"
    ),
) -> None:
    """Turn the results of the experiments into a page of the documentation."""
    from benchmarks.convergence.whole_page import write_page

    write_page(results, page)


@app.command()
def sizes(
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = FOLDER,
    page: Annotated[Path, typer.Option(help="Markdown page to write, with plots beside it.")] = Path("docs/sizes.md"),
) -> None:
    """Write what remains of the differences as models grow (E9)."""
    from benchmarks.convergence.results import Results
    from benchmarks.convergence.sizes_page import draw_sizes, sizes_page

    found = Results(results)
    page.write_text(sizes_page(found), encoding="utf-8")
    draw_sizes(found, page.parent / "images")
