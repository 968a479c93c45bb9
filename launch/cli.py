"""The ``rankwise`` command."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rankwise.launch import inspection_commands as looking
from rankwise.launch.exit_codes import EXIT_CODES, OrderlyGroup
from rankwise.launch.settings import ON_A_GPU, Form, Place, Ranks, Settings
from rankwise.launch.terminal import complain, console, say
from rankwise.launch.typed_options import bad_usage, count, takes_dataclasses
from rankwise.rule_modules import VARIABLE, add_rule_modules, names_rule_modules
from rankwise.version import __version__

__all__ = ["app"]

app = typer.Typer(
    name="rankwise",
    help="MARS, SONew, LDAdam, MKOR for DeepSpeed, Megatron and FSDP2.",
    epilog=f"Begin with: rankwise doctor, then rankwise list, then rankwise train\n\n{EXIT_CODES}",
    cls=OrderlyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_PASSING_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_Arguments = Annotated[list[str] | None, typer.Argument(help="Its arguments.", show_default=False)]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and its environment.")]


def _version(asked: bool) -> None:
    if asked:
        console.print(f"rankwise {__version__}", highlight=False)
        raise typer.Exit


def _add_rules(words: list[str] | None) -> None:
    if not (words or names_rule_modules()):
        return  # what needs no torch answers without its import
    with bad_usage():
        # The first import of the names reads the variable.
        importlib.import_module("rankwise.names")
        add_rule_modules(words or [])


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
    rules: Annotated[
        list[str] | None,
        typer.Option(
            callback=_add_rules,
            metavar="MODULE",
            help=f"Module or .py file with optimizers of your own, for this command and its ranks, as {VARIABLE}.",
        ),
    ] = None,
) -> None:
    """Keeps ``rankwise train`` a subcommand whatever commands there are."""


app.command(epilog="Example: rankwise doctor --json > doctor.json")(looking.doctor)
app.command(
    epilog="Example: rankwise plan --config ds.json --model llama-70b --ranks 64",
    context_settings={"allow_extra_args": True},
)(looking.plan)
app.command(epilog="Example: rankwise compare runs/adamw runs/mkor --png losses.png")(looking.compare)
app.command("list", epilog="Example: rankwise list --markdown > types.md")(looking.list_types)
app.command(epilog="Example: rankwise explain --config ds.json --model gpt2-small")(looking.explain)


@app.command(epilog="Example: rankwise train --optimizer adamw,mkor --steps 500 --stage 3 --ranks 2")
@takes_dataclasses
def train(context: typer.Context, settings: Settings, dry_run: _DryRun = False) -> None:
    """Pretrain a small language model with one or more optimizers and compare them.

    The runs share all but the "optimizer" block. On GPUs what is not typed is GPT-2 small's, compiled, in bfloat16.
    """
    from rankwise.launch.data import load_corpus, load_tokenizer
    from rankwise.launch.run_configs import planned_runs
    from rankwise.launch.sampler import WindowSampler
    from rankwise.launch.spawn import choose_device, print_ranks

    with bad_usage():
        cpu, processes = choose_device(settings.device, settings.ranks)
        if not cpu and settings.framework == "deepspeed" and settings.config is None:
            settings = replace(settings, **_untyped(context, ON_A_GPU))
        runs = planned_runs(settings, processes)
        if dry_run:
            for run in runs:
                print_ranks(_script(run), [str(run.write())], processes, cpu)
            return
        with console.status("reading the text"):
            corpus = load_corpus(settings.data, load_tokenizer(settings.tokenizer), settings.cache)
        for tokens in (corpus.train, corpus.validation):
            WindowSampler(tokens, settings.seq_len, 1, 1, 1)
    say(f"text: {len(corpus.train):,} tokens to train on, {len(corpus.validation):,} held out")
    labels = ", ".join(run.label for run in runs)
    say(f"runs: {labels} on {processes} {'CPU' if cpu else 'GPU'} rank(s), results in {settings.output}")
    _train_and_compare(runs, processes, cpu, settings.output)


def _untyped(context: typer.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of options that were not typed."""
    typed = {name for name in values if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    return {name: value for name, value in values.items() if name not in typed}


def _script(run: Settings) -> str:
    return "megatron_pretrain" if run.framework == "megatron" else "pretrain"


def _train_and_compare(runs: list[Settings], processes: int, cpu: bool, folder: Path) -> None:
    from rankwise.launch.drawing import HOW_TO_DRAW
    from rankwise.launch.report import plot_curves, read_summary, results_table
    from rankwise.launch.spawn import run_ranks

    done: list[Path] = []
    for run in runs:
        status = run_ranks(_script(run), [str(run.write())], processes, cpu)
        if status == 0:
            done.append(run.output)
        else:
            complain(f"{run.label}: the launcher ended with status {status}; its message is above")
    if done:
        console.print(results_table([read_summary(run) for run in done]))
        drawn = plot_curves(done, folder / "loss.png")
        say(f"loss curves: {folder / 'loss.png' if drawn else HOW_TO_DRAW}")
    if len(done) < len(runs):
        raise typer.Exit(1)


@app.command(
    context_settings=_PASSING_ON, epilog="Example: rankwise deepspeed --ranks 8 train.py --deepspeed_config ds.json"
)
def deepspeed(
    script: Annotated[Path, typer.Argument(help="Your training script.", exists=True, dir_okay=False)],
    arguments: _Arguments = None,
    ranks: Ranks = None,
    device: Place = "auto",
    dry_run: _DryRun = False,
) -> None:
    """Run an unedited DeepSpeed script with our optimizer types known to its JSON.

    Options of this command come before the script's name. Under a launcher (RANK is set) it runs the script in this
    process, otherwise it starts the ranks itself.
    """
    from rankwise.launch.shim import run_script
    from rankwise.launch.spawn import choose_device, exec_ranks, print_ranks

    if "RANK" in os.environ:
        run_script(script, arguments or [])
        return
    with bad_usage():
        cpu, processes = choose_device(device, ranks)
    start = print_ranks if dry_run else exec_ranks
    start("shim", [str(script), *(arguments or [])], processes, cpu)


@app.command(
    context_settings=_PASSING_ON,
    epilog="Example: rankwise megatron --ranks 8 pretrain_gpt.py --optimizer ldadam --ldadam-rank 256 ...",
)
def megatron(
    script: Annotated[
        Path, typer.Argument(help="pretrain_gpt.py of a Megatron-LM checkout.", exists=True, dir_okay=False)
    ],
    arguments: _Arguments = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of flags; those typed after the script win.", exists=True, dir_okay=False),
    ] = None,
    ranks: Ranks = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Trial run without a GPU: CPU tensors, gloo, no fused kernels.")
    ] = False,
    dry_run: _DryRun = False,
) -> None:
    """Run an unedited Megatron-LM script whose --optimizer takes our names and flags.

    Options of this command come before the script's name; `rankwise megatron pretrain_gpt.py --help` lists the flags,
    ours in a group of their own. Under a launcher (RANK is set) it runs the script in this process, otherwise it starts
    the ranks itself.
    """
    from rankwise.launch.flags import read_flags
    from rankwise.launch.megatron_shim import require_training, run_script
    from rankwise.launch.spawn import choose_device, exec_ranks, print_ranks

    try:
        flags = [*([] if config is None else read_flags(config)), *(arguments or [])]
        require_training(script)
        if "RANK" in os.environ or {"-h", "--help"} & set(flags):
            run_script(script, flags, cpu)
            return
        _, processes = choose_device("cpu" if cpu else "cuda", ranks)
    except ValueError as error:
        raise typer.BadParameter(f"{error}".replace("--device cpu", "--cpu")) from error
    start = print_ranks if dry_run else exec_ranks
    start("megatron_shim", [*(["--cpu"] if cpu else []), str(script), *flags], processes, cpu)


@app.command(epilog="Example: rankwise universal checkpoints/global_step100 checkpoints/universal")
def universal(
    source: Annotated[Path, typer.Argument(help="Folder of a tag, such as checkpoints/global_step100.")],
    target: Annotated[Path, typer.Argument(help="Folder to write, such as checkpoints/universal.")],
    workers: Annotated[int, count("Processes of DeepSpeed's converter.")] = 2,
) -> None:
    """Make a DeepSpeed universal checkpoint that keeps the states of our optimizers.

    Load it with "checkpoint": {"load_universal": true} in the JSON, at any ZeRO stage on any number of ranks.
    """
    from deepspeed_plugin.checkpoints import CheckpointError, convert

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise typer.BadParameter(f"target is {str(target)!r}, which exists: name a new folder, or remove it first")
    with bad_usage(CheckpointError):
        convert(source, target, workers)
    where, tag = target.resolve().parent, target.name
    say(
        f'written: {target}. Set "checkpoint": {{"load_universal": true}} in the JSON and call\n'
        f"engine.load_checkpoint({str(where)!r}, tag={tag!r})"
    )


@app.command(epilog="Example: rankwise convert checkpoints/universal run/step100 --to torch")
def convert(
    source: Annotated[
        Path,
        typer.Argument(help="A universal, torch_dist or torch.distributed.checkpoint folder; its kind is recognised."),
    ],
    target: Annotated[Path, typer.Argument(help="Folder to write; a new one.")],
    to: Annotated[Form, typer.Option(metavar="NAME", help="deepspeed, megatron or torch.")],
    names: Annotated[
        Path | None,
        typer.Option(help='JSON of new names by old: {"model.*": "*"}.', exists=True, dir_okay=False),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(help="For megatron: a checkpoint of the run that goes on.", exists=True, file_okay=False),
    ] = None,
) -> None:
    """Make a checkpoint of our optimizers one of another framework: weights, states, counts and options.

    From a DeepSpeed universal checkpoint (see 'rankwise universal'), a Megatron torch_dist folder (iter_0000100), or
    torch.distributed.checkpoint of {"model": ..., "optimizer": ...}, as FSDP2 saves it. The model must be the same
    module code; schedules, random numbers and positions in the data stay behind. See docs/checkpoints.md.
    """
    from rankwise.launch.convert import CONVERSION_ERRORS, convert_checkpoint, how_to_load

    with bad_usage(*CONVERSION_ERRORS):
        done = convert_checkpoint(source, target, to, names, like)
    say(f"{done}\n{how_to_load(target, to)}")


if __name__ == "__main__":
    app()
