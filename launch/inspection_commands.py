"""These commands inspect, and start no training."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankwise.launch.planning.devices import Links
from rankwise.launch.planning.question import (
    ANSWER,
    MODEL,
    Goal,
    Heads,
    Hidden,
    Layers,
    ModelName,
    OptimizerName,
    PlanConfig,
    Question,
    VocabSize,
)
from rankwise.launch.terminal import console, say, tell_programs
from rankwise.launch.typed_options import bad_usage, count, takes_dataclasses

if TYPE_CHECKING:
    from rankwise.launch.planning.advice import Advice
    from rankwise.launch.planning.rank_figures import Figures

__all__ = ["compare", "doctor", "explain", "list_types", "plan"]

OWNERS = "Owners"
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


def doctor(
    self_test: Annotated[
        bool, typer.Option(help="Two ranks on the CPU follow recorded trajectories; takes about half a minute.")
    ] = True,
    as_json: Json = False,
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
        tell_programs(written(findings))
    else:
        console.print(findings_table(findings))
    failed = [finding for finding in findings if finding.status == "fail"]
    if failed:
        raise typer.Exit(1)


@takes_dataclasses
def plan(context: typer.Context, question: Question, links: Links, goal: Goal) -> None:
    """What every rank will hold, send and compute; Megatron's flags follow after --."""
    from rankwise.launch.planning import presentation
    from rankwise.launch.planning.advice import advised
    from rankwise.launch.planning.costs import cost
    from rankwise.launch.planning.devices import DEVICES, device_of
    from rankwise.launch.planning.plan_request import answered

    _check_png(goal.png)
    with bad_usage():
        judge = device_of(goal.gpu)
        asked = answered(replace(question, flags=tuple(context.args)))
        figures = asked.figures()
    judges = [] if judge in DEVICES else [judge]
    costs = [cost(figures, device, links, asked.tokens, goal.efficiency) for device in (*DEVICES, *judges)]

    def limits(of: Figures) -> list[tuple[str, float]]:
        share = cost(of, judge, links, asked.tokens, goal.efficiency).share
        return list(goal.limits(max(of.states()), share))

    def excess(of: Figures) -> float:
        return sum(max(over, 0.0) for _, over in limits(of))

    fitting = not excess(figures)
    shown = (asked.picked.name, figures, asked.cluster)
    if not goal.as_json:
        presentation.show(console, *shown, costs, links)
        presentation.show_assumptions(console, figures, links, asked.tokens, goal.efficiency)
    if goal.png is not None:
        presentation.draw(*shown, goal.png)
    advice = None if fitting else advised(asked, excess)
    told = [] if advice is None else [_advice(advice, limits(advice.figures))]
    if goal.as_json:
        content = {**presentation.as_json(*shown, costs, links), "fits": fitting}
        content["assumed"] = {"tokens": asked.tokens, "efficiency": goal.efficiency, **asdict(links)}
        tell_programs({**content, "recommended": told if advice is not None and advice.meets else []})
    else:
        for words, over in limits(figures):
            say(f"{'Not met' if over > 0 else 'Met'}: {words}.")
        for line in [] if fitting else told or ["Nothing that was tried helps."]:
            say(line)
    if not fitting:
        raise typer.Exit(1)


def _check_png(png: Path | None) -> None:
    from rankwise.launch.drawing import HOW_TO_DRAW, pyplot_if_installed

    if png is not None and pyplot_if_installed() is None:
        raise typer.BadParameter(HOW_TO_DRAW, param_hint="--png")


def _advice(advice: Advice, limits: list[tuple[str, float]]) -> str:
    reached = "; ".join(words for words, _ in limits)
    if advice.meets:
        return f"It is met with {advice.words}: {reached}."
    return f"Nothing that was tried meets it. Nearest comes {advice.words}: {reached}."


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or of several runs; files of what Megatron printed.")
    ],
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture of the losses.", rich_help_panel=ANSWER)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.", rich_help_panel=ANSWER)] = False,
    loss: Annotated[
        str | None, typer.Option(help="Name of the loss in the logs, if it is none of the usual ones.")
    ] = None,
    seq_len: Annotated[int | None, count("Tokens of a sample, for logs that count samples alone.")] = None,
) -> None:
    """Losses of runs against steps, tokens and wall-clock, step share and memory, from the logs they left.

    Logs: of rankwise train, TensorBoard's event files, DeepSpeed's csv_monitor, the Trainer's trainer_state.json, and
    what Megatron printed. The first run is what the others are measured by.
    """
    from rankwise.launch.comparing.logs import read_runs
    from rankwise.launch.comparing.side_by_side import as_rows, compared, draw

    _check_png(png)
    with bad_usage():
        logged = read_runs(runs, loss, seq_len)
    if as_json:
        tell_programs(as_rows(logged))
    else:
        console.print(compared(logged))
    if png is not None:
        png.parent.mkdir(parents=True, exist_ok=True)
        draw(logged, png)


def list_types(
    whole: Annotated[bool, typer.Option("--all", help="All that is known of each type.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The tables of docs/choose.md.")] = False,
    as_json: Json = False,
) -> None:
    """Every optimizer type, the lowest loss first: learning rate over AdamW's, memory, time, and what it is for."""
    from rankwise.launch import optimizer_guide as choices

    if markdown:
        typer.echo(choices.as_markdown(), nl=False)
        return
    if as_json:
        tell_programs([row.content for row in choices.rows()])
        return
    console.print(choices.shown(console.width, whole))
    console.print("docs/choose.md has recipes, docs/evidence.md what was tried; --all says more of each.")


def explain(
    config: PlanConfig = None,
    optimizer: OptimizerName = None,
    model: ModelName = None,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    seq_len: Annotated[int, count("Longest sequence.", MODEL)] = 128,
    vocab_size: VocabSize = None,
    ranks: Annotated[int | None, count("Show the owner of each matrix, too, on so many ranks.", OWNERS)] = None,
    stage: Annotated[int | None, count("Of ZeRO; by default the config's, else 2.", OWNERS, least=0, most=3)] = None,
    whole: Annotated[bool, typer.Option("--all", help="A line for each parameter, not for equal layers.")] = False,
    as_json: Json = False,
) -> None:
    """Show which rule every parameter of a model takes and what its state costs; no weights are made.

    With --ranks, also which rank owns each matrix (MKOR's factors, LDAdam's basis), and why.

    What is not said of gpt2 and llama is 4 layers, 192 wide, 6 heads and 257 token ids.
    """
    from rankwise.launch.explain import explain_table, explained, explained_owners, owners_table
    from rankwise.launch.planning.plan_request import answered

    with bad_usage():
        yaml = config is not None and config.suffix in (".yaml", ".yml")
        sized = bool(layers or hidden or heads or vocab_size)
        if not yaml and model in (None, "gpt2", "llama"):
            model, sized = model or "gpt2", True
            layers, hidden, heads, vocab_size = layers or 4, hidden or 192, heads or 6, vocab_size or 257
        sizes = (layers, hidden, heads, vocab_size) if sized else (None, None, None, None)
        if stage is not None and ranks is None:
            raise ValueError(f"stage is {stage}, and owners are not asked for: add --ranks N, or leave it out")
        question = Question(config, optimizer, model, *sizes, ranks=ranks, stage=stage, seq_len=seq_len)
        # Whole parameters, although a configuration may cut them over ranks.
        asked = answered(replace(question, ranks=1, stage=None, tp=1, pp=1, cp=1, vpp=1, ep=1, etp=1))
        rows = explained(asked)
        owners = None if ranks is None else explained_owners(answered(question))
    if as_json:
        told = {"optimizer": asked.picked.name, "parameters": [row._asdict() for row in rows]}
        tell_programs(told if owners is None else {**told, "owners": [row._asdict() for row in owners]})
        return
    console.print(explain_table(rows, asked.picked.name, whole))
    if ranks is not None and owners is not None:
        console.print(owners_table(owners, ranks))
