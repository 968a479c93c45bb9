"""Command line of the measurements."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.convergence.commands import app as convergence_app

app = typer.Typer(help="Measurements of rankwise.", no_args_is_help=True, add_completion=False)
app.add_typer(convergence_app)
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
def step(
    model: Annotated[str, typer.Option(help="gpt2-small, llama-1b, llama-7b-layers or tiny.")] = "gpt2-small",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int, typer.Option(min=3, help="Timed steps of each optimizer.")] = 10,
    threads: Annotated[int, typer.Option(min=1, help="Of a CPU run.")] = 2,
    types: Annotated[list[str] | None, typer.Option("--type", help="Only these; may be given several times.")] = None,
    rivals: Annotated[
        Path | None, typer.Option(help="Folder with checkouts MARS, SONew, LDAdam and mkor, to run beside ours.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON file of the figures; replaces rows of the same types.")
    ] = None,
) -> None:
    """Time of the optimizer step alone, over fused AdamW's and over the published implementations' in the same run."""
    import torch

    from benchmarks.step import environment, measure, merged

    torch.set_num_threads(threads)
    where = torch.device(device)
    for row in measure(model, where, steps, types or (), rivals):
        row |= {"model": model, **environment(where)}
        console.print(_step_line(row))
        if output is not None:
            output.write_text(json.dumps(merged(output, row), indent=1) + "\n")


@app.command()
def products(
    model: Annotated[str, typer.Option(help="gpt2-layers, gpt2-small, llama-1b or tiny.")] = "gpt2-layers",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int, typer.Option(min=3, help="Timed steps of each optimizer.")] = 10,
    threads: Annotated[int, typer.Option(min=1, help="Of a CPU run.")] = 2,
    types: Annotated[list[str] | None, typer.Option("--type", help="Only these; may be given several times.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file of the figures.")] = None,
) -> None:
    """Time of the default step of MARS-Shampoo, MARS-M and MKOR over that of its own matrix products in float32."""
    import torch

    from benchmarks.products import measure_products
    from benchmarks.step import environment, merged

    torch.set_num_threads(threads)
    where = torch.device(device)
    for row in measure_products(model, where, steps, types or ()):
        row |= {"model": f"{model} products", **environment(where)}
        console.print(
            f"{row['name']}: {row['seconds'] * 1e3:.1f} ms with products in {row['products']}, "
            f"{row['product_ratio']:.2f} x its products in float32"
        )
        if output is not None:
            output.write_text(json.dumps(merged(output, row), indent=1) + "\n")


@app.command()
def newton_schulz(
    rounds: Annotated[int, typer.Option(min=3, help="Timed pairs of each set, form and shape.")] = 15,
    output: Annotated[Path | None, typer.Option(help="JSON file of the figures.")] = None,
    page: Annotated[Path | None, typer.Option(help="Markdown page to write.")] = None,
) -> None:
    """How orthogonal each set of Newton-Schulz polynomials makes matrices, and its time over the published one's."""
    import torch

    from benchmarks.orthogonality import measure_errors, measure_times, newton_schulz_page

    torch.set_num_threads(1)
    errors, times = measure_errors(), measure_times(rounds)
    for row in (*errors, *times):
        print(row)
    if output is not None:
        output.write_text(json.dumps({"errors": errors, "times": times}, indent=1) + "\n")
    if page is not None:
        page.write_text(newton_schulz_page(errors, times))


@app.command()
def memory(page: Annotated[Path | None, typer.Option(help="Markdown page to write.")] = None) -> None:
    """Memory of a step on a device beside weights, gradients and states: counted without one, and predicted."""
    from benchmarks.memory import memory_page

    text = memory_page()
    if page is not None:
        page.write_text(text)
    console.print(text, markup=False)


@app.command()
def state_table() -> None:
    """The table of docs/state-types.md: bytes of states, and those a step moves, by the type of the states."""
    from benchmarks.state_costs import state_table as table

    console.print(table(), markup=False, soft_wrap=True)


@app.command()
def recordings(
    page: Annotated[Path, typer.Option(help="Markdown page to write.")] = Path("docs/commands.md"),
) -> None:
    """Run every command of rankwise as a user does, and keep what it prints."""
    from tempfile import TemporaryDirectory

    from benchmarks.recordings import record, recordings_page

    with TemporaryDirectory() as folder:
        found = []
        for recording, output in record(Path(folder)):
            console.print(f"rankwise {recording.words}", markup=False)
            found.append((recording, output))
    page.write_text(recordings_page(found))


@app.command()
def switch(
    results: Annotated[Path, typer.Option(help="Finished rows, one a line; goes on where they end.")],
    types: Annotated[list[str] | None, typer.Option("--type", help="Only these; may be given several times.")] = None,
    page: Annotated[Path | None, typer.Option(help="Markdown page to write, its plot in images/ beside it.")] = None,
) -> None:
    """Validation loss where AdamW is replaced by one of ours in the middle of a run, and the other way round."""
    import torch

    from benchmarks.switching import TYPES, draw_switches, measure_switches, read_rows, switching_page

    torch.set_num_threads(1)
    done = [(row["way"], row["type"]) for row in read_rows(results)]
    for row in measure_switches(done, types or TYPES):
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        console.print(row)
    if page is not None:
        rows = read_rows(results)
        draw_switches(rows, page.parent / "images" / "switching.png")
        page.write_text(switching_page(rows, "images/switching.png"))


@app.command()
def gpu(
    budget: Annotated[str, typer.Option(help="Time for this call: 540, 540s or 9m.")] = "9m",
    sections: Annotated[
        list[str] | None, typer.Option("--section", help="Only these; may be given several times.")
    ] = None,
    items: Annotated[
        list[str] | None,
        typer.Option("--item", help="Only items with this in their names; may be given several times."),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda; cpu tries all but the launches.")] = "cuda",
    model: Annotated[str | None, typer.Option(help="In place of Llama's layers; tiny makes everything small.")] = None,
    again: Annotated[bool, typer.Option(help="Measure these sections anew.")] = False,
    shown: Annotated[
        bool,
        typer.Option("--list", help="List items, their states and what is expected; measure nothing."),
    ] = False,
    everything: Annotated[
        bool, typer.Option(help="Also the cells of gpu-frameworks, all in the order of worth.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="JSON file, which a further call goes on with; another device's gets its name."),
    ] = None,
) -> None:
    """Everything that only a GPU can tell, in pieces: what does not fit into the budget is left for the next call."""
    from benchmarks.gpu import command

    try:
        # What is tried on a CPU is no figure of the documentation's.
        output = output or Path("docs/data/gpu.json" if device != "cpu" else "gpu-tried.json")
        if everything:
            status = command.everything(budget, device, model, output)
        else:
            status = command.run(budget, sections or [], items or [], device, model, again, shown, output)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(status)


@app.command()
def gpu_frameworks(
    seconds: Annotated[float, typer.Option(min=1, help="Time for this call.")] = 540,
    fronts: Annotated[
        list[str] | None,
        typer.Option("--front", help="deepspeed, fsdp, megatron or torchtitan; may be given several times."),
    ] = None,
    cells: Annotated[
        list[str] | None,
        typer.Option("--cell", help="Only items with this in their names; may be given several times."),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda: all ranks share the first card; cpu: over gloo.")] = "cuda",
    jobs: Annotated[int, typer.Option(min=1, help="Cells at once.")] = 4,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that a cell may take.")] = 60,
    megatron: Annotated[
        Path | None, typer.Option(help="Folder that holds another version's `megatron`: only its cells run.")
    ] = None,
    again: Annotated[bool, typer.Option(help="Run cells with results of today's code, too.")] = False,
    shown: Annotated[bool, typer.Option("--list", help="List the items and their states; run nothing.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="JSON file, which a further call goes on with; another device's gets its name."),
    ] = None,
) -> None:
    """Real DeepSpeed, FSDP2, Megatron and torchtitan on two to four ranks of one card, each beside one process."""
    from benchmarks.frameworks.command import run

    try:
        file = output or Path(f"docs/data/{'gpu' if device != 'cpu' else 'cpu'}-frameworks.json")
        status = run(seconds, fronts or [], cells or [], device, jobs, limit, megatron, again, shown, file)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(status)


@app.command()
def kernels(
    output: Annotated[Path | None, typer.Option(help="JSON file of the figures.")] = None,
    page: Annotated[Path | None, typer.Option(help="Markdown page to write.")] = None,
) -> None:
    """Registers, spills and accesses of every Triton kernel, compiled for A100, H100 and MI300 without any of them."""
    import triton

    from benchmarks.compiled_kernels import CALLS, MORE, kernels_page, measured

    rows = []
    for row in measured([*CALLS, *MORE]):
        rows.append(row)
        console.print(row)
    if output is not None:
        output.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1) + "\n")
    if page is not None:
        page.write_text(kernels_page(rows, triton.__version__))


@app.command()
def host(
    tensors: Annotated[int, typer.Option(min=10, help="Matrices, or shards of one tensor.")] = 300,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each that are timed.")] = 40,
    output: Annotated[
        Path | None, typer.Option(help="JSON file of the figures; replaces rows of the same types.")
    ] = None,
) -> None:
    """Time of the host in a step of many small tensors, beside AdamW's."""
    from benchmarks.host import host_times
    from benchmarks.step import merged

    for row in host_times(tensors, rounds):
        times = (f"{row[key] * 1e3:.1f}" for key in ("tensors_seconds", "shards_seconds", "few_seconds"))
        console.print("{}: {} ms, shards {}, a tenth {}; {:.2f} of AdamW's".format(row["name"], *times, row["ratio"]))
        if output is not None:
            output.write_text(json.dumps(merged(output, row), indent=1) + "\n")


@app.command()
def sharded(
    ranks: Annotated[int, typer.Option(min=2, help="gloo processes.")] = 4,
    page: Annotated[Path, typer.Option(help="Markdown page to write.")] = Path("docs/fsdp-costs.md"),
) -> None:
    """Calls, launches and messages of a step under FSDP2, beside ZeRO-3's cuts and other people's optimizers."""
    from benchmarks.sharded import measure_sharded, sharded_page

    page.write_text(sharded_page(measure_sharded(ranks)))


def _step_line(row: dict[str, Any]) -> str:
    rival = f", published / ours {row['official_ratio']:.2f}" if "official_ratio" in row else ""
    floor = "" if row["of_floor"] is None else f" ({row['of_floor']:.2f} x the floor)"
    return f"{row['name']}: {row['seconds'] * 1e3:.1f} ms, {row['ratio']:.2f} x fused AdamW{floor}{rival}"


@app.command()
def training(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of a training step.")] = 2048,
    steps: Annotated[int, typer.Option(min=3, help="Timed steps of each optimizer.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of a CPU run.")] = 2,
    types: Annotated[list[str] | None, typer.Option("--type", help="Only these; may be given several times.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file of the figures.")] = None,
) -> None:
    """Time of whole training steps of GPT-2 small, over those with fused AdamW."""
    import torch

    from benchmarks.step import environment, merged
    from benchmarks.training import measure_training

    torch.set_num_threads(threads)
    where = torch.device(device)
    for row in measure_training(where, tokens, steps, types or ()):
        row |= {"model": "gpt2-small training", **environment(where)}
        console.print(f"{row['name']}: {row['seconds']:.2f} s, {row['ratio']:.3f} x with fused AdamW")
        if output is not None:
            output.write_text(json.dumps(merged(output, row), indent=1) + "\n")


@app.command()
def communication(
    ranks: Annotated[int, typer.Option(min=2, help="Processes: gloo on CPUs, NCCL on CUDA devices.")] = 2,
    model: Annotated[str, typer.Option(help="gpt2-small, llama-1b, llama-7b-layers or tiny.")] = "gpt2-small",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each optimizer.")] = 10,
    threads: Annotated[int, typer.Option(min=1, help="Of a process.")] = 1,
    types: Annotated[list[str] | None, typer.Option("--type", help="Only these; may be given several times.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON file of the figures; replaces rows of the same types.")
    ] = None,
) -> None:
    """Time in which the step of a sharded optimizer waits for messages, of parameters cut as ZeRO cuts them."""
    import torch

    from benchmarks.communication import measure_communication
    from benchmarks.step import merged

    for row in measure_communication(model, torch.device(device), ranks, steps, types or (), threads):
        parts = (
            f"{row[key] * 1e3:.1f}" for key in ("seconds", "host_seconds", "waited_seconds", "most_waited_seconds")
        )
        console.print("{}: {} ms, host {}, waiting {} to {} in {:.1f} calls".format(row["name"], *parts, row["waits"]))
        if output is not None:
            output.write_text(json.dumps(merged(output, row), indent=1) + "\n")


@app.command()
def performance(
    figures: Annotated[Path, typer.Argument(help="JSON written by step, training, communication, host.", exists=True)],
    page: Annotated[Path, typer.Argument(help="Markdown page to write, with a plot beside it.")] = Path(
        "docs/performance.md"
    ),
    host: Annotated[Path | None, typer.Option(help="JSON written by host, if kept apart.", exists=True)] = None,
) -> None:
    """Turn the timings into a page of the documentation."""
    from benchmarks.performance import draw, performance_page

    apart = [] if host is None else json.loads(host.read_text())
    rows = json.loads(figures.read_text()) + apart
    page.write_text(performance_page(rows))
    draw(rows, page.parent / "images" / "performance.png")


@app.command()
def gpu_page(
    figures: Annotated[
        Path, typer.Argument(help="JSON written by gpu; what gpu-frameworks wrote lies beside it.", exists=True)
    ],
    page: Annotated[Path, typer.Argument(help="Markdown page to write.")] = Path("docs/gpu.md"),
) -> None:
    """Turn what was found on a GPU into a page of the documentation."""
    from benchmarks.gpu.page import gpu_page

    beside = (figures.parent / f"{kind}-frameworks.json" for kind in ("cpu", "gpu"))
    cells = (json.loads(path.read_text()) if path.exists() else None for path in beside)
    page.write_text(gpu_page(json.loads(figures.read_text()), *cells))


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


@app.command()
def fsdp_parity(
    figures: Annotated[Path, typer.Argument(help="JSON lines written by FSDP2's parity tests.", exists=True)],
    page: Annotated[Path, typer.Argument(help="Markdown page to write.")] = Path("docs/fsdp-parity.md"),
) -> None:
    """Turn the FSDP2 parity tests' figures into a page of the documentation."""
    from benchmarks.fsdp_parity import fsdp_page
    from benchmarks.parity import read_figures

    page.write_text(fsdp_page(read_figures(figures, ("precision", "layout", "type"))))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def versions(
    context: typer.Context,
    checkout: Annotated[
        list[Path] | None, typer.Option(help="Folder that holds `megatron`; several times. Without: the installed one.")
    ] = None,
    page: Annotated[Path, typer.Option(help="Markdown page whose table is filled.")] = Path("docs/support.md"),
) -> None:
    """Run the tests of Megatron against versions of it; arguments of pytest may follow. Fills the table of versions."""
    from benchmarks.versions import RECORDS, load, merged, ran, with_versions

    for folder in checkout or [None]:
        records = merged(load(), *ran(folder, context.args))
        RECORDS.write_text(json.dumps(records, indent=1) + "\n")
        page.write_text(with_versions(page.read_text(), records))


@app.command()
def soak(
    rows: Annotated[Path, typer.Argument(help="JSON lines to add to; what is in it already is not done again.")],
    folder: Annotated[Path, typer.Argument(help="For the checkpoints.")],
    steps: Annotated[int, typer.Option(min=10, help="Of every run.")] = 5000,
    restarts: Annotated[int, typer.Option(min=0, help="Kills and stops of a disturbed run.")] = 25,
    types: Annotated[list[str] | None, typer.Option("--type", help="Only these; may be given several times.")] = None,
    runs: Annotated[
        list[str] | None, typer.Option("--run", help="undisturbed, disturbed, one rank; may be given several times.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the faults.")] = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    report_every: Annotated[int, typer.Option(min=1, help="Steps between reports of the loss.")] = 100,
) -> None:
    """A tiny GPT under ZeRO-3 whose ranks are killed, stopped, become more and fewer, beside an undisturbed one."""
    from benchmarks.soak import RUNS
    from benchmarks.soak import soak as run_soak
    from benchmarks.soak_rank import TYPES, import_early

    import_early()
    every = report_every, save_every
    for row in run_soak(types or list(TYPES), runs or RUNS, steps, restarts, rows, folder, every, seed):
        if row["kind"] in ("loss", "segment"):
            print(" ".join(f"{key} {value}" for key, value in row.items() if key not in ("kind", "rank")), flush=True)


@app.command()
def soak_figures(
    rows: Annotated[list[Path], typer.Argument(help="JSON lines written by soak, one file or several.", exists=True)],
    folder: Annotated[Path, typer.Option(help="The folder of the checkpoints.", exists=True)],
    output: Annotated[Path, typer.Option(help="JSON file of the figures.")] = Path("docs/data/soak.json"),
) -> None:
    """Condense the rows of soak for the documentation; print the section and what has grown, which is an error."""
    from benchmarks.soak import final_weights
    from benchmarks.soak_page import condensed, faults, soak_section

    found = [json.loads(line) for file in rows for line in file.read_text().splitlines()]
    kept = [*condensed(found), *final_weights(found, folder)]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")
    print(soak_section(kept))
    raise typer.Exit(bool(faults(found)))


@app.command()
def routing(page: Annotated[Path, typer.Argument(help="Markdown page to write.")] = Path("docs/routing.md")) -> None:
    """Which weights of which model take which rule, as the tests have it."""
    from benchmarks.routing_page import routing_page

    page.write_text(routing_page())


@app.command()
def around(
    rows: Annotated[list[Path], typer.Argument(help="JSON lines written by the tests of the play-book.", exists=True)],
    page: Annotated[Path, typer.Option(help="Markdown page to write.")] = Path("docs/around.md"),
) -> None:
    """Turn what tests/around saw (RANKWISE_AROUND_ROWS names the file) into a page; cells not played again stay."""
    from benchmarks.around_page import DATA, around_page, merged, recorded

    found = [json.loads(line) for file in rows for line in file.read_text().splitlines()]
    kept = merged(recorded(), found)
    DATA.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in kept) + "\n]\n")
    page.write_text(around_page(kept))


@app.command()
def plans(page: Annotated[Path, typer.Option(help="Markdown page to write.")] = Path("docs/model-plans.md")) -> None:
    """Plan every packaged configuration for a model; takes some minutes."""
    import subprocess

    from benchmarks.model_plans import plans_page

    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    page.write_text(plans_page(commit))


@app.command()
def messages(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each type, from seed 1.")] = 5,
    types: Annotated[list[str] | None, typer.Option("--type", help="Only these; may be given several times.")] = None,
    output: Annotated[Path | None, typer.Option(help="File of the figures, a line of JSON for each run.")] = None,
) -> None:
    """Losses of whole runs on two gloo ranks, by the type in which matrices travel between them."""
    from benchmarks.narrow_messages import DTYPES, TYPES, loss_with

    for seed, name in itertools.product(range(1, seeds + 1), types or TYPES):
        runs = [loss_with(name, dtype, seed) for dtype in DTYPES]
        for row in runs:
            change = row["loss"] - runs[0]["loss"]
            console.print(
                f"{name}, seed {seed}, {row['messages']}: {row['loss']:.4f} ({change:+.4f}), {row['sent']:,.0f} bytes"
            )
            if output is not None:
                with output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


@app.command()
def options(page: Annotated[Path, typer.Option(help="Markdown page to write.")] = Path("docs/options.md")) -> None:
    """Write the page of all options from their declarations."""
    from benchmarks.options_page import options_page

    page.write_text(options_page())


@app.command()
def reliability(
    rows: Annotated[Path, typer.Argument(help="JSON lines written by the tests of the fault table.", exists=True)],
    page: Annotated[Path, typer.Argument(help="Markdown page to write.")] = Path("docs/reliability.md"),
    soak: Annotated[Path, typer.Option(help="JSON written by soak-figures.")] = Path("docs/data/soak.json"),
) -> None:
    """Turn what the tests of the fault table saw, and the soak figures, into a page of the documentation."""
    from benchmarks.reliability import read_rows, reliability_page

    figures = json.loads(soak.read_text()) if soak.exists() else []
    page.write_text(reliability_page(read_rows(rows), figures))


@app.command()
def peers(
    torch: Annotated[bool, typer.Option("--torch", help="The checks of torch's optimizer records.")] = False,
    deepspeed: Annotated[
        Path | None, typer.Option(help="Checkout of DeepSpeed, near the installed version.", exists=True)
    ] = None,
    megatron: Annotated[
        Path | None, typer.Option(help="Checkout of Megatron-LM at the installed version of the core.", exists=True)
    ] = None,
    types: Annotated[list[str] | None, typer.Option("--type", help="Only these; may be given several times.")] = None,
    most: Annotated[int, typer.Option(min=1, help="Cases of a test function, from its first to its last.")] = 1,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds that a case may take.")] = 240.0,
    only: Annotated[str, typer.Option(help="Cases with this in their names.")] = "",
    again: Annotated[bool, typer.Option(help="Run what is known, too.")] = False,
    results: Annotated[Path, typer.Option(help="JSON file of the results; goes on where they end.")] = Path(
        "docs/data/peers.json"
    ),
    page: Annotated[Path, typer.Option(help="Markdown page to write.")] = Path("docs/peers.md"),
) -> None:
    """Other people's optimizer tests with our types in Adam's place; an error if anything unexpected came."""
    from benchmarks.peers.command import run
    from benchmarks.peers.deepspeed_hook import CONTROL, OPTIONS
    from benchmarks.peers.expected import verdict
    from benchmarks.peers.page import peers_page
    from benchmarks.peers.results import read
    from benchmarks.peers.suites import Run

    suites = [("torch", None)] if torch else []
    suites += [(name, path.resolve()) for name, path in (("deepspeed", deepspeed), ("megatron", megatron)) if path]
    wanted = types or [name for name in OPTIONS if name != CONTROL]
    found = []
    for row in run(suites, Run(results, wanted, most, limit, only, again)):
        found.append(verdict(row)[0])
        print(f"{row['type']} {row['case']}: {found[-1]} {row['message'][:100]}", flush=True)
    page.write_text(peers_page(read(results)))
    raise typer.Exit(any(each.startswith("unexpected") for each in found))


if __name__ == "__main__":
    app()
