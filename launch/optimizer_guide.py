"""What each type is for, when it is not, and what it costs: one table for the command line and for docs/choose.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rankwise.configs import deepspeed_config
from rankwise.estimate import estimate
from rankwise.launch.planning.model_shapes import build
from rankwise.launch.planning.optimizers import built, chosen
from rankwise.names import BY_SPELLING

__all__ = ["CHOICES", "Characteristics", "Row", "as_markdown", "rows", "shown"]

REFERENCE, RANKS, STAGE = "llama-1b", 64, 3
"""The model and the ranks that bytes are computed for."""
NOT_MEASURED = "not measured yet"


@dataclass(frozen=True)
class Characteristics:
    """What is known of a type beyond what can be computed.

    Attributes:
        purpose: What it is for.
        against: When not to take it.
        rate: Best learning rate over AdamW's in the longest searches of docs/rates.md; else :data:`NOT_MEASURED`.
        gains: Held-out loss less AdamW's in nats per byte by parameters, of docs/sizes.md; else :data:`NOT_MEASURED`.
    """

    purpose: str
    against: str
    rate: str = NOT_MEASURED
    gains: str = NOT_MEASURED


CHOICES: Mapping[str, Characteristics] = {
    "MARS": Characteristics('the four below, by "variant"', "see there", "2 to 4", "see there"),
    "MARS-AdamW": Characteristics(
        "AdamW with variance reduction, element by element",
        "exact mode under an engine: it needs two gradients",
        "2 to 4",
        "-0.09 at 0.075M, -0.04 at 0.12M, -0.02 at 0.26M",
    ),
    "MARS-Lion": Characteristics(
        "Lion with variance reduction: AdamW's memory",
        "a first choice: it ended behind AdamW in most runs",
        "0.25",
    ),
    "MARS-Shampoo": Characteristics(
        "orthogonalised momentum with variance reduction", "slow links at stage 3; CPUs without fast products", "16"
    ),
    "MARS-M": Characteristics(
        "Muon with variance reduction",
        "slow links at stage 3; CPUs without fast products",
        "5",
        "-0.27 at 0.075M, -0.17 at 0.12M, -0.12 at 0.26M",
    ),
    "SONew": Characteristics(
        "second-order steps whose states are as long as the weights; hardly any traffic",
        "wide bands (4 and more): states and time grow with the band",
        "2",
        "-0.09 at 0.075M, -0.05 at 0.12M",
    ),
    "LDAdam": Characteristics(
        "less memory than AdamW's: moments in a subspace, with error feedback",
        "models whose embedding holds most parameters, which keep AdamW's 8 bytes; ranks near the width",
        "2",
        "-0.08 at 0.075M, -0.01 at 0.12M",
    ),
    "MKOR": Characteristics(
        "second-order steps by Kronecker factors of activations and output gradients, or (rule sketch) of gradients",
        "short of memory (two factors for each matrix); stacked experts, which take its backend",
        "2 to 4",
        "+0.03? at 0.075M, -0.02 at 0.12M, -0.02 at 0.26M",
    ),
    "MKOR-H": Characteristics(
        "MKOR that ends as its backend once the loss flattens", "runs too short to reach its knee", "4"
    ),
}
"""By the spelling of a JSON's ``"type"``."""


class Row(NamedTuple):
    """A type in the table.

    Attributes:
        name: Name of the type.
        purpose: See :class:`Characteristics`.
        against: See :class:`Characteristics`.
        rate: See :class:`Characteristics`; with what the ready configuration has.
        gains: See :class:`Characteristics`.
        betas: Betas of the ready configuration, or the default.
        state: Bytes for each parameter of the reference model, of all ranks together.
        sent: Bytes for each parameter that all ranks together send in a step at stage 3.
        flops: Operations of a step for each parameter.
        maturity: What has run.
    """

    name: str
    purpose: str
    against: str
    rate: str
    gains: str
    betas: str
    state: float
    sent: float
    flops: float
    maturity: str


HEADINGS = (
    "type",
    "for",
    "not for",
    "lr over AdamW's",
    "loss less AdamW's, by parameters",
    "betas (ready file)",
    "state, bytes per parameter (AdamW: 8)",
    "sent, bytes per parameter and step",
    "operations per parameter and step",
    "maturity",
)
MATURITY = "CPU ranks; one GPU without a framework"
NARROW = 120
"""Columns of a terminal below which a table of eight columns breaks words, or has one to a line."""


def rows() -> Iterator[Row]:
    """Every type, with what its ready configuration costs on the reference model."""
    baseline = deepspeed_config("adamw")["optimizer"]["params"]["lr"]
    for spelling, choice in CHOICES.items():
        params: Mapping[str, Any] = deepspeed_config(spelling)["optimizer"]["params"]
        model, _ = build(REFERENCE)
        optimizer = built(chosen(None, spelling.lower(), []), model)
        count = sum(parameter.numel() for parameter in model.parameters())
        (alone,) = estimate(optimizer, world=1)
        ranks = estimate(optimizer, world=RANKS, stage=STAGE)
        sent = sum(rank.bytes_sent + rank.periodic_bytes / rank.period for rank in ranks)
        betas = params.get("betas") or BY_SPELLING[spelling].optimizer.options_type.table()["betas"].default
        rate = f"{choice.rate} (ready file: {params['lr'] / baseline:.2g})"
        yield Row(
            *(spelling, choice.purpose, choice.against, rate, choice.gains),
            ", ".join(f"{beta:g}" for beta in betas),
            alone.state_bytes / count,
            sent / count,
            alone.flops / count,
            MATURITY,
        )


def cells(row: Row) -> list[str]:
    """A row in words."""
    return [
        *(row.name, row.purpose, row.against, row.rate, row.gains, row.betas),
        *(f"{row.state:.2f}", f"{row.sent:.2f}", f"{row.flops:,.0f}", row.maturity),
    ]


def shown(width: int) -> RenderableType:
    """A table, or on a narrow terminal one paragraph for each type; maturity is left out, as all have the same.

    Args:
        width: Columns of the terminal.
    """
    lines = [cells(row)[:-1] for row in rows()]
    if width < NARROW:
        return Group(*map(_paragraph, lines))
    table = Table(*HEADINGS[:-1], show_lines=True)
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _paragraph(line: list[str]) -> RenderableType:
    name, *values = line
    said = [f"{heading}: {value}" for heading, value in zip(HEADINGS[1:-1], values, strict=True)]
    return Group(Text(name, style="bold"), *(Padding(Text(text), (0, 0, 0, 2)) for text in said), "")


def as_markdown() -> str:
    """The table of docs/choose.md."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *map(cells, rows())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
