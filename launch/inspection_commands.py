"""Commands that look and tell, and start no training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rankwise.launch.planning.costs import Cost
    from rankwise.launch.planning.plan_request import Asked
    from rankwise.launch.planning.rank_figures import Figures

__all__ = ["compare", "doctor", "explain", "list_types", "plan"]

_MODEL, _SIZES, _SPEED, _ANSWER = "The model", "The cluster", "Its speed", "The answer"
_Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="DeepSpeed JSON, or YAML of Megatron's flags.", exists=True, dir_okay=False),
]
_Optimizer = Annotated[
    str | None, typer.Option(metavar="NAME", help="Ready options; by default the config's, or mkor.")
]
_Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="llama-70b, a config.json, or module:function.",
        rich_help_panel=_MODEL,
    ),
]
_Layers = Annotated[int | None, typer.Option(min=1, metavar="N", help="Blocks.", rich_help_panel=_MODEL)]
_Hidden = Annotated[int | None, typer.Option(min=1, metavar="N", help="Width.", rich_help_panel=_MODEL)]
_Heads = Annotated[int | None, typer.Option(min=1, metavar="N", help="Attention heads.", rich_help_panel=_MODEL)]
_VocabSize = Annotated[int | None, typer.Option(min=1, metavar="N", help="Token ids.", rich_help_panel=_MODEL)]

console = Console()


def doctor(
    self_test: Annotated[
        bool, typer.Option(help="Two ranks on the CPU follow recorded trajectories; takes about half a minute.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    timeout: Annotated[float, typer.Option(min=1, metavar="N", help="Seconds the self-test may take.")] = 300.0,
) -> None:
    """Check this environment: versions, devices, compiler, kernels, frameworks, locks, and two ranks at work.

    Ends with status 1 if anything would keep rankwise from working: a line marked FAIL, with what to do.
    """
    from rankwise.launch.doctor import as_json as written
    from rankwise.launch.doctor import examine
    from rankwise.launch.findings import findings_table

    findings = list(examine(self_test, timeout))
    if as_json:
        typer.echo(written(findings))
    else:
        console.print(findings_table(findings))
    failed = [finding for finding in findings if finding.status == "fail"]
    if failed:
        raise typer.Exit(1)


def _percentage(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} must be a share such as 2% or 0.02") from error
    if not 0 < value < 1:
        raise typer.BadParameter(f"{text!r} must lie between 0 and 100%")
    return value


def plan(
    context: typer.Context,
    config: _Config = None,
    optimizer: _Optimizer = None,
    model: _Model = None,
    layers: _Layers = None,
    hidden: _Hidden = None,
    heads: _Heads = None,
    vocab_size: _VocabSize = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="deepspeed, megatron or fsdp.", rich_help_panel=_SIZES),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="NAME=N,..", help="FSDP2's: dp=64,tp=8.", rich_help_panel=_SIZES),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="All of them; 8, or the mesh's.", rich_help_panel=_SIZES)
    ] = None,
    stage: Annotated[
        int | None,
        typer.Option(min=0, max=3, metavar="N", help="Of ZeRO; by default the config's.", rich_help_panel=_SIZES),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Megatron's tensor parallelism.", rich_help_panel=_SIZES)
    ] = None,
    pp: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Megatron's pipeline stages.", rich_help_panel=_SIZES)
    ] = None,
    cp: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Context parallelism.", rich_help_panel=_SIZES)
    ] = None,
    vpp: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Chunks of a stage.", rich_help_panel=_SIZES)
    ] = None,
    ep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Expert parallelism.", rich_help_panel=_SIZES)
    ] = None,
    etp: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tensor parallelism of experts.", rich_help_panel=_SIZES)
    ] = None,
    precision: Annotated[
        Literal["bf16", "fp16", "fp32"] | None, typer.Option(help="Of weights.", rich_help_panel=_SIZES)
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a global batch.", rich_help_panel=_SIZES)
    ] = None,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, metavar="N", help="Ranks of a node.", rich_help_panel=_SPEED)
    ] = 8,
    node_gbps: Annotated[
        float, typer.Option(min=0.001, metavar="X", help="GB/s in a node.", rich_help_panel=_SPEED)
    ] = 300.0,
    net_gbps: Annotated[
        float, typer.Option(min=0.001, metavar="X", help="GB/s between nodes.", rich_help_panel=_SPEED)
    ] = 50.0,
    latency_us: Annotated[
        float, typer.Option(min=0, metavar="X", help="Of a collective.", rich_help_panel=_SPEED)
    ] = 20.0,
    efficiency: Annotated[
        float,
        typer.Option(min=0.01, max=1, metavar="X", help="Share of peak FLOP/s.", rich_help_panel=_SPEED),
    ] = 0.4,
    max_state_gb: Annotated[
        float | None,
        typer.Option(min=0, metavar="X", help="GiB on the fullest rank; not met: status 1.", rich_help_panel=_ANSWER),
    ] = None,
    max_overhead: Annotated[
        str | None, typer.Option(metavar="X%", help="Share of a training step.", rich_help_panel=_ANSWER)
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(metavar="NAME", help="A100 to MI300X, or TFLOP/s:TB/s.", rich_help_panel=_ANSWER),
    ] = "H100",
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture of the load per rank.", rich_help_panel=_ANSWER)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs, with every rank and owner.", rich_help_panel=_ANSWER)
    ] = False,
) -> None:
    """What every rank will hold, send and compute; Megatron's flags follow after --."""
    from rankwise.launch.drawing import HOW_TO_DRAW, pyplot_if_installed
    from rankwise.launch.planning import presentation
    from rankwise.launch.planning.costs import cost
    from rankwise.launch.planning.devices import DEVICES, Links, device_of
    from rankwise.launch.planning.plan_request import Question, answered

    if png is not None and pyplot_if_installed() is None:
        raise typer.BadParameter(HOW_TO_DRAW, param_hint="--png")
    most = None if max_overhead is None else _percentage(max_overhead)
    try:
        judge = device_of(gpu)
        question = Question(
            *(config, optimizer, model, layers, hidden, heads, vocab_size, ranks, stage),
            **{"tp": tp, "pp": pp, "cp": cp, "vpp": vpp, "ep": ep, "etp": etp, "precision": precision},  # type: ignore[arg-type]
            batch_tokens=batch_tokens,
            flags=tuple(context.args),
            engine=engine,
            mesh=mesh,
        )
        asked = answered(question)
        found = asked.figures()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    links = Links(gpus_per_node, node_gbps, net_gbps, latency_us * 1e-6)

    def costs(of: Figures) -> list[Cost]:
        own = [] if judge in DEVICES else [judge]
        return [cost(of, one, links, asked.tokens, efficiency) for one in (*DEVICES, *own)]

    def fits(of: Figures) -> bool:
        held = max_state_gb is None or max(of.states()) <= max_state_gb * 2**30
        return held and (most is None or cost(of, judge, links, asked.tokens, efficiency).share <= most)

    if as_json:
        content = presentation.as_json(asked.picked.name, found, asked.cluster, costs(found), links)
    else:
        presentation.show(console, asked.picked.name, found, asked.cluster, costs(found), links)
    if png is not None:
        presentation.draw(asked.picked.name, found, asked.cluster, png)
    advice = [] if fits(found) else _advice(asked, fits)
    if as_json:
        typer.echo(presentation.write_json({**content, "fits": fits(found), "recommended": advice}))
    elif not fits(found):
        console.print(
            "The limit is not met. " + (advice[0] if advice else "Nothing that was tried meets it."), markup=False
        )
    if not fits(found):
        raise typer.Exit(1)


def _advice(asked: Asked, fits: Callable[[Figures], bool]) -> list[str]:
    """The mildest change that meets the limits."""
    from rankwise.launch.planning.advice import changes

    for change in changes(asked.picked, asked.cluster):
        try:
            found = asked.changed(change.picked, change.cluster).figures()
        except ValueError:
            continue
        if fits(found):
            return [f"With {change.words} it is: {max(found.states()) / 2**30:.3f} GiB on the fullest rank."]
    return []


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or of several runs; files of what Megatron printed.")
    ],
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture of the losses.", rich_help_panel=_ANSWER)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.", rich_help_panel=_ANSWER)] = False,
    loss: Annotated[
        str | None, typer.Option(help="Name of the loss in the logs, if it is none of the usual ones.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens of a sample, for logs that count samples alone.")
    ] = None,
) -> None:
    """Losses of runs against steps, tokens and wall-clock, step share and memory, from the logs they left.

    Logs: of rankwise train, TensorBoard's event files, DeepSpeed's csv_monitor, the Trainer's trainer_state.json, and
    what Megatron printed. The first run is what the others are measured by.
    """
    from rankwise.launch.comparing.logs import read_runs
    from rankwise.launch.comparing.side_by_side import as_rows, compared, draw
    from rankwise.launch.drawing import HOW_TO_DRAW, pyplot_if_installed

    if png is not None and pyplot_if_installed() is None:
        raise typer.BadParameter(HOW_TO_DRAW, param_hint="--png")
    try:
        found = read_runs(runs, loss, seq_len)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        typer.echo(json.dumps(as_rows(found), indent=2))
    else:
        console.print(compared(found))
    if png is not None:
        png.parent.mkdir(parents=True, exist_ok=True)
        draw(found, png)


def list_types(
    markdown: Annotated[bool, typer.Option("--markdown", help="The table of docs/choose.md.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Every optimizer type: what for and when not, learning rate over AdamW's, memory, traffic, maturity.

    Bytes and operations are computed from what the types declare: a Llama of 1.2 B parameters, 64 ranks, stage 3.
    """
    from rankwise.launch import optimizer_guide as choices

    if markdown:
        typer.echo(choices.as_markdown(), nl=False)
        return
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in choices.rows()], indent=2))
        return
    console.print(choices.shown(console.width))
    console.print(f"Maturity of all: {choices.MATURITY}. docs/choose.md has recipes, docs/evidence.md what was tried.")


def explain(
    config: _Config = None,
    optimizer: _Optimizer = None,
    model: _Model = None,
    layers: _Layers = None,
    hidden: _Hidden = None,
    heads: _Heads = None,
    seq_len: Annotated[int, typer.Option(min=1, metavar="N", help="Longest sequence.", rich_help_panel=_MODEL)] = 128,
    vocab_size: _VocabSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show which rule every parameter of a model takes and what its state costs; no weights are made.

    What is not said of gpt2 and llama is 4 layers, 192 wide, 6 heads and 257 token ids.
    """
    from rankwise.launch.explain import explain_table, explained
    from rankwise.launch.planning.plan_request import Question, answered

    try:
        yaml = config is not None and config.suffix in (".yaml", ".yml")
        sized = bool(layers or hidden or heads or vocab_size)
        if not yaml and model in (None, "gpt2", "llama"):
            model, sized = model or "gpt2", True
            layers, hidden, heads, vocab_size = layers or 4, hidden or 192, heads or 6, vocab_size or 257
        sizes = (layers, hidden, heads, vocab_size) if sized else (None, None, None, None)
        asked = answered(Question(config, optimizer, model, *sizes, ranks=1, seq_len=seq_len))
        rows = explained(asked)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        found = {"optimizer": asked.picked.name, "parameters": [row._asdict() for row in rows]}
        typer.echo(json.dumps(found, indent=2))
    else:
        console.print(explain_table(rows, asked.picked.name))
