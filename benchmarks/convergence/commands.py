"""Command line of the experiments."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from benchmarks.convergence.experiment import Contender, Experiment

__all__ = ["app"]

app = typer.Typer()

FOLDER = Path("docs/data/convergence")
PAGE = Path("docs/evidence.md")
UNFINISHED = Path("build/convergence")


@app.command()
def convergence(
    only: Annotated[str, typer.Option(help="Experiments, separated by commas; all by default.")] = "",
    contender: Annotated[list[str] | None, typer.Option(help="Only these; may be given several times.")] = None,
    cores: Annotated[int, typer.Option(min=1, help="Threads; the priority is the lowest there is.")] = 1,
    results: Annotated[Path, typer.Option(help="Folder of the results, read and added to.")] = FOLDER,
    minutes: Annotated[float, typer.Option(help="Begin no run after so many.")] = float("inf"),
    again: Annotated[bool, typer.Option(help="Repeat what is recorded, print and keep both.")] = False,
    missing: Annotated[bool, typer.Option(help="Run nothing: say what is yet to be run.")] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda, where E13 and E9 are the default.")] = "cpu",
    beside: Annotated[int, typer.Option(min=1, help="Runs at a time, a process each; they go by worth.")] = 1,
    unfinished: Annotated[Path, typer.Option(help="Folder of the runs that the end of the minutes cut.")] = UNFINISHED,
    times: Annotated[
        bool, typer.Option(help="Measure E13's missing step times, with the device to themselves.")
    ] = False,
) -> None:
    """Try what the papers claim, on real data against tuned baselines; goes on where it was stopped."""
    import torch

    from benchmarks.convergence.experiments import chosen
    from benchmarks.convergence.queue import missing_rows, work_beside
    from benchmarks.convergence.results import Results
    from benchmarks.convergence.runner import Place
    from benchmarks.convergence.session import compare, missing_runs, work
    from benchmarks.convergence.step_times import measure_times

    found = Results(results)
    end = time.monotonic() + 60.0 * minutes
    try:
        place = Place(torch.device(device), end, unfinished)
        names = only or ("E13,E9" if place.device.type != "cpu" else "")
        wanted = [(one, _picked(one, contender or [])) for one in chosen(names, found)]
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from error
    if place.device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device is {device}: it must be cpu or cuda")
    if place.device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device is cuda, and torch finds no such device here; it must be cpu")
    ladder = any("corpus" in one.task for one, _ in wanted)
    at_once = ladder or place.device.type != "cpu" or beside > 1
    if again and at_once:
        raise typer.BadParameter("--again repeats runs of a CPU one after the other: leave E13, --device, --beside out")
    os.nice(19)
    torch.set_num_threads(cores)
    if (ladder and not missing) or times:
        _check_text()
    if times or (at_once and not missing):
        some = set(contender or ())
        lines = work_beside(
            [experiment for experiment, _ in wanted],
            found,
            place,
            beside,
            threads=cores,
            wanted=lambda entry: not some or entry.contender in some,
        )
        nothing = True
        for line in measure_times(results, place) if times else lines:
            print(line, flush=True)
            nothing = False
        if nothing:
            print("nothing was missing that can be run now: --missing says what waits for what")
        return
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
    if missing and (ladder or not only):
        for line in missing_rows(found, place.name):
            print(line)


def _picked(experiment: Experiment, names: list[str]) -> tuple[Contender, ...]:
    """Contenders by their names; those whose rate is carried up may not be there yet."""
    if experiment.trials == 1:
        return tuple(one for one in experiment.contenders if one.name in names)
    return tuple(map(experiment.contender, names))


def _check_text() -> None:
    """Refuse to start runs whose text is not there, before each of them does."""
    from benchmarks.convergence.data import packaged_text
    from benchmarks.convergence.ladder import NAME

    try:
        packaged_text(NAME, "bytes")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def corpus(
    output: Annotated[Path, typer.Option(help="Folder to write to; RANKWISE_CORPUS names another than this.")] = Path(
        "build/corpus"
    ),
) -> None:
    """Build the text of E13 from packages: natural language and code, held out by checksum; the same bytes everywhere.

    The packages come from the registries that apt-get and pip know here.
    """
    from benchmarks.convergence.corpus import build, licences

    try:
        facts = build(output)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    print(licences(facts))
    for part in ("train", "held-out"):
        print(f"{part}: {facts[part]['bytes']:,} bytes, sha256 {facts[part]['sha256']}")


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
