"""The ``rankwise`` command."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rankwise.launch import inspection_commands as looking
from rankwise.launch.models import ModelFamily
from rankwise.launch.settings import Form, Framework
from rankwise.names import CLASSES
from rankwise.version import __version__

__all__ = ["app", "console"]

app = typer.Typer(
    name="rankwise",
    help=f"{', '.join(known.__name__ for known in CLASSES)} for DeepSpeed, Megatron and FSDP2.",
    epilog="Begin with: rankwise doctor, then rankwise list, then rankwise train",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Console()

_PASSING_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_WHERE, _RUN, _SHAPE, _TEXT = "Ranks", "The run", "The model", "Text and results"
_Ranks = Annotated[int | None, typer.Option(metavar="N", help="Processes; by default one per GPU, or two.")]
_Arguments = Annotated[list[str] | None, typer.Argument(help="Its arguments.", show_default=False)]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and its environment.")]
_Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
_Model = Annotated[ModelFamily, typer.Option(metavar="NAME", help="gpt2 or llama.", rich_help_panel=_SHAPE)]
_Layers = Annotated[int, typer.Option(min=1, metavar="N", help="Transformer blocks.", rich_help_panel=_SHAPE)]
_Hidden = Annotated[int, typer.Option(min=1, metavar="N", help="Width; a multiple of --heads.", rich_help_panel=_SHAPE)]
_Heads = Annotated[int, typer.Option(min=1, metavar="N", help="Attention heads.", rich_help_panel=_SHAPE)]
_SeqLen = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens per sample.", rich_help_panel=_SHAPE)]
_Config = Annotated[Path | None, typer.Option(help="DeepSpeed JSON file.", exists=True, dir_okay=False)]


def _version(asked: bool) -> None:
    if asked:
        console.print(f"rankwise {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
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
def train(
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="Types, separated by commas, or 'all'.", show_default="adamw, mars-m"),
    ] = None,
    config: _Config = None,
    framework: Annotated[
        Framework, typer.Option(metavar="NAME", help="deepspeed or megatron.", rich_help_panel=_WHERE)
    ] = "deepspeed",
    stage: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=3,
            metavar="N",
            help="ZeRO's; default: the config's, or 2. Megatron: 0 is plain.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option(min=1, metavar="N", help="Megatron's tensor parallelism.", rich_help_panel=_WHERE)
    ] = 1,
    ranks: _Ranks = None,
    device: _Device = "auto",
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Optimizer steps.", rich_help_panel=_RUN)] = 300,
    warmup: Annotated[
        float, typer.Option(min=0, max=1, metavar="X", help="Share of steps lr rises in.", rich_help_panel=_RUN)
    ] = 0.1,
    lr: Annotated[
        float | None, typer.Option(metavar="X", help="Peak, instead of the config's.", rich_help_panel=_RUN)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="File or folder; by default Python's standard library.", rich_help_panel=_TEXT),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="'bytes', or one of Hugging Face.", rich_help_panel=_TEXT)] = "bytes",
    model: _Model = "gpt2",
    layers: _Layers = 4,
    hidden: _Hidden = 192,
    heads: _Heads = 6,
    seq_len: _SeqLen = 128,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples of a pass and rank.", rich_help_panel=_RUN)
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Micro-batches per step.", rich_help_panel=_RUN)
    ] = None,
    validation_interval: Annotated[
        int, typer.Option(min=1, metavar="N", help="Steps between validations.", rich_help_panel=_TEXT)
    ] = 50,
    validation_samples: Annotated[
        int, typer.Option(min=1, metavar="N", help="Windows per validation.", rich_help_panel=_TEXT)
    ] = 128,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of weights and samples.", rich_help_panel=_RUN)] = 0,
    output: Annotated[Path | None, typer.Option(help="Folder; by default runs/<time>.", rich_help_panel=_TEXT)] = None,
    cache: Annotated[Path, typer.Option(help="Of the tokenized text.", rich_help_panel=_TEXT)] = Path("runs/.cache"),
    dry_run: _DryRun = False,
) -> None:
    """Pretrain a small language model with one or more optimizers and compare them.

    The runs share model, data, schedule and DeepSpeed configuration, but for its "optimizer" block.
    Megatron is given the same values.
    """
    from rankwise.launch.data import load_corpus, load_tokenizer
    from rankwise.launch.drawing import HOW_TO_DRAW
    from rankwise.launch.report import plot_curves, read_summary, results_table
    from rankwise.launch.run_configs import Overrides, check_framework, planned_configs, read_config, split_names
    from rankwise.launch.sampler import WindowSampler
    from rankwise.launch.settings import Settings
    from rankwise.launch.spawn import choose_device, print_ranks, run_ranks

    try:
        names = split_names(optimizer or [])
        if not names and config is None:
            names = ["adamw", "mars-m"]
        cpu, processes = choose_device(device, ranks)
        overrides = Overrides(stage, micro_batch, accumulation, lr)
        configs = planned_configs(None if config is None else read_config(config), names, overrides)
        check_framework(framework, processes, tp, configs)
        folder = output or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
        runs = [
            Settings(
                label=label,
                output=str(folder / label),
                deepspeed=deepspeed,
                model=model,
                layers=layers,
                hidden=hidden,
                heads=heads,
                seq_len=seq_len,
                steps=steps,
                warmup=warmup,
                data=None if data is None else str(data),
                tokenizer=tokenizer,
                cache=str(cache),
                seed=seed,
                validation_interval=validation_interval,
                validation_samples=validation_samples,
                framework=framework,
                tensor_parallel=tp,
            )
            for label, deepspeed in configs.items()
        ]
        script = "megatron_pretrain" if framework == "megatron" else "pretrain"
        if dry_run:
            for settings in runs:
                print_ranks(script, [str(settings.write())], processes, cpu)
            return
        with console.status("reading the text"):
            corpus = load_corpus(data, load_tokenizer(tokenizer), cache)
        for tokens in (corpus.train, corpus.validation):
            WindowSampler(tokens, seq_len, 1, 1, 1)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    console.print(f"text: {len(corpus.train):,} tokens to train on, {len(corpus.validation):,} held out")
    console.print(f"runs: {', '.join(configs)} on {processes} {'CPU' if cpu else 'GPU'} rank(s), results in {folder}")
    done: list[Path] = []
    failed: list[str] = []
    for settings in runs:
        status = run_ranks(script, [str(settings.write())], processes, cpu)
        if status == 0:
            done.append(Path(settings.output))
        else:
            failed.append(settings.label)
            console.print(f"[red]{settings.label}: the launcher ended with status {status}; its message is above")
    if done:
        console.print(results_table([read_summary(run) for run in done]))
        drawn = plot_curves(done, folder / "loss.png")
        console.print(f"loss curves: {folder / 'loss.png' if drawn else HOW_TO_DRAW}", markup=False)
    if failed:
        raise typer.Exit(1)


@app.command(
    context_settings=_PASSING_ON, epilog="Example: rankwise deepspeed --ranks 8 train.py --deepspeed_config ds.json"
)
def deepspeed(
    script: Annotated[Path, typer.Argument(help="Your training script.", exists=True, dir_okay=False)],
    arguments: _Arguments = None,
    ranks: _Ranks = None,
    device: _Device = "auto",
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
    try:
        cpu, processes = choose_device(device, ranks)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
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
    ranks: _Ranks = None,
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
    workers: Annotated[int, typer.Option(min=1, metavar="N", help="Processes of DeepSpeed's converter.")] = 2,
) -> None:
    """Make a DeepSpeed universal checkpoint that keeps the states of our optimizers.

    Load it with "checkpoint": {"load_universal": true} in the JSON, at any ZeRO stage on any number of ranks.
    """
    from deepspeed_plugin.checkpoints import CheckpointError, convert

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise typer.BadParameter(f"target is {str(target)!r}, which exists: name a new folder, or remove it first")
    try:
        convert(source, target, workers)
    except CheckpointError as error:
        raise typer.BadParameter(str(error)) from error
    where, tag = target.resolve().parent, target.name
    console.print(
        f'written: {target}. Set "checkpoint": {{"load_universal": true}} in the JSON and call\n'
        f"engine.load_checkpoint({str(where)!r}, tag={tag!r})",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@app.command(epilog="Example: rankwise convert checkpoints/universal run/step100 --to torch")
def convert(
    source: Annotated[
        Path, typer.Argument(help="A universal, torch_dist or torch.distributed.checkpoint folder; which, it shows.")
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

    try:
        done = convert_checkpoint(source, target, to, names, like)
    except CONVERSION_ERRORS as error:
        raise typer.BadParameter(str(error)) from error
    console.print(f"{done}\n{how_to_load(target, to)}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
