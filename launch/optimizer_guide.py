"""One table, for the command line and for docs/choose.md, says what each type is for, when not, and what it costs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rankwise.rule_modules import names_rule_modules

__all__ = ["CHOICES", "RECORDED", "SETTING", "Characteristics", "Row", "as_markdown", "computed", "rows", "shown"]

RECORDED = Path(__file__).parent / "recorded" / "costs.json"
"""What :func:`computed` gave for every type of ours, read in its place, which needs no torch.

``python -m rankwise.launch.optimizer_guide`` writes it.
"""
REFERENCE, RANKS, STAGE, TOKENS = "llama-8b", 64, 3, 1 << 20
SETTING = f"Llama 8 B on {RANKS} H100s, ZeRO-{STAGE}, {TOKENS:,} tokens a step"
NOT_MEASURED = "not measured yet"
SIZES = ("0.12M", "0.26M")
"""Sizes of docs/sizes.md that the table shows; it is sorted by the last, the largest at which all were measured."""


@dataclass(frozen=True)
class Characteristics:
    """The facts of a type that cannot be computed.

    Attributes:
        purpose: What it is for.
        against: When not to take it.
        brief: What it is, in a few words.
        rate: Best learning rate over AdamW's in the longest searches of docs/rates.md; else :data:`NOT_MEASURED`.
        gains: Held-out loss less AdamW's in nats per byte by parameters, of docs/sizes.md; else :data:`NOT_MEASURED`.
        gpu: Its step's name in docs/gpu.md, and the time over fused AdamW's there; None: not measured.
    """

    purpose: str
    against: str
    brief: str
    rate: str = NOT_MEASURED
    gains: str = NOT_MEASURED
    gpu: tuple[str, float] | None = None


CHOICES: Mapping[str, Characteristics] = {
    "MARS": Characteristics('the four below, by "variant"', "see there", "by its variant", "2 to 4", "see there"),
    "MARS-AdamW": Characteristics(
        "AdamW with variance reduction, element by element",
        "exact mode under an engine: it needs two gradients",
        "AdamW, variance reduced",
        "2 to 4",
        "-0.09 at 0.075M, -0.04 at 0.12M, -0.02 at 0.26M",
        ("MARS-AdamW", 1.49),
    ),
    "MARS-Lion": Characteristics(
        "Lion with variance reduction: AdamW's memory",
        "a first choice: it ended behind AdamW in most runs",
        "Lion, variance reduced",
        "0.25",
        gpu=("MARS-Lion", 1.22),
    ),
    "MARS-Shampoo": Characteristics(
        "orthogonalised momentum with variance reduction",
        "slow links at stage 3; CPUs without fast products",
        "MARS-M at Muon's rates",
        "16",
        gpu=("MARS-Shampoo", 16.96),
    ),
    "MARS-M": Characteristics(
        "Muon with variance reduction",
        "slow links at stage 3; CPUs without fast products",
        "Muon, variance reduced",
        "5",
        "-0.27 at 0.075M, -0.17 at 0.12M, -0.12 at 0.26M",
        ("MARS-M", 16.79),
    ),
    "SONew": Characteristics(
        "second-order steps with states as long as the weights; hardly any traffic",
        "wide bands (4 and more): states and time grow with the band",
        "second order, no traffic",
        "2",
        "-0.09 at 0.075M, -0.05 at 0.12M, -0.05 at 0.26M",
        ("SONew, tridiagonal", 1.80),
    ),
    "LDAdam": Characteristics(
        "less memory than AdamW's: moments in a subspace, with error feedback",
        "models whose embedding holds most parameters, which keep AdamW's 8 bytes; ranks near the width",
        "AdamW in less memory",
        "2",
        "-0.08 at 0.075M, -0.01 at 0.12M, +0.00? at 0.26M",
        ("LDAdam, rank 256", 9.75),
    ),
    "MKOR": Characteristics(
        "the paper's second-order steps: Kronecker factors of activations and output gradients",
        "stacked experts, which take its backend",
        "second order, the paper's",
        "2 to 4",
        "+0.03? at 0.075M, -0.02 at 0.12M, -0.02 at 0.26M",
    ),
    "MKOR-H": Characteristics(
        "MKOR that ends as its backend once the loss flattens",
        "runs too short to reach its knee",
        "MKOR, then AdamW alone",
        "4",
    ),
    "MKOR-Sketch": Characteristics(
        "MKOR with factors of the gradient itself, updated at every step; our rule, not the paper's",
        "short of memory (two factors for each matrix)",
        "second order, our own rule",
        "2",
        "-0.23 at 0.075M, -0.13 at 0.12M, -0.09 at 0.26M",
    ),
}
"""Characteristics by the spelling of a JSON's ``"type"``."""


class Computed(NamedTuple):
    """What can be computed of a type: costs in the :data:`SETTING`, with its configuration for that model.

    Attributes:
        state: Bytes for each parameter, of all ranks together.
        sent: Bytes for each parameter that all ranks together send in a step.
        share: Share of a whole training step that the optimizer takes.
        ready: The ready file's learning rate over AdamW's there.
        betas: Betas of the ready configuration, or the default.
    """

    state: float
    sent: float
    share: float
    ready: float
    betas: str


@dataclass(frozen=True)
class Row:
    """A type in the table.

    Attributes:
        name: Name of the type.
        choice: What cannot be computed of it.
        costs: What can.
    """

    name: str
    choice: Characteristics
    costs: Computed

    @property
    def content(self) -> dict[str, Any]:
        """All that is known of the type, by the names of :class:`Characteristics` and :class:`Computed`."""
        known = {"name": self.name, **asdict(self.choice), **self.costs._asdict()}
        return {**known, "gpu": self.choice.gpu[1] if self.choice.gpu else None}

    def gain(self, size: str) -> str:
        """Return the loss less AdamW's at one of the :data:`SIZES`; an empty text if there is none."""
        match = re.search(rf"(\S+) at {re.escape(size)}", self.choice.gains)
        return re.sub(r"[+-](?=0\.0+\?*$)", "", match[1]) if match else ""  # zero has no sign


def computed(name: str) -> Computed:
    """Return what can be computed of a type, its costs by ``rankwise plan``.

    Args:
        name: Name of the optimizer.
    """
    from rankwise.configs import model_config_path
    from rankwise.configs.making import VALUES
    from rankwise.launch.planning.costs import cost
    from rankwise.launch.planning.devices import Links, device_of
    from rankwise.launch.planning.plan_request import answered
    from rankwise.launch.planning.question import Goal, Question
    from rankwise.names import BY_NAME, is_ours

    run: dict[str, Any] = {
        "model": REFERENCE,
        "ranks": RANKS,
        "stage": STAGE,
        "batch_tokens": TOKENS,
        "precision": "bf16",
    }
    config = model_config_path(REFERENCE, "mars-adamw" if name == "mars" else name) if is_ours(name) else None
    asked = answered(Question(config, None if config else name, **run))
    figures = asked.figures()
    total = cost(figures, device_of("H100"), Links(), asked.tokens, Goal.efficiency)
    sent = sum(rank.bytes_sent + rank.periodic_bytes / rank.period for rank in figures.ranks)
    named = BY_NAME[name]
    params = named.complete(VALUES[name], name, instead=named.optimizer.__name__)
    table = named.optimizer.options_type.table()
    betas = params.get("betas") or (table["betas"].default if "betas" in table else ())
    return Computed(
        sum(figures.states()) / figures.parameters,
        sent / figures.parameters,
        total.share,
        params["lr"] / VALUES["adamw"]["lr"],
        ", ".join(f"{beta:g}" for beta in betas),
    )


def rows() -> Iterator[Row]:
    """Yield every type, the lowest loss at the last of the :data:`SIZES` first; types of rules from outside last."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    found = [Row(name, choice, Computed(**recorded[name.lower()])) for name, choice in CHOICES.items()]
    yield from sorted([*found, *_brought()], key=_place)


def _brought() -> Iterator[Row]:
    """Yield the types of users' own modules, if there are any."""
    if not (names_rule_modules() or "rankwise.names" in sys.modules):
        return
    from rankwise.names import BY_SPELLING

    for spelling, named in BY_SPELLING.items():
        if spelling not in CHOICES:
            module = named.optimizer.__module__
            yield Row(spelling, Characteristics(f"see {module}", "", f"of {module}"), computed(spelling.lower()))


def _place(row: Row) -> tuple[bool, float]:
    gain = row.gain(SIZES[-1])
    return not gain, float(gain.rstrip("?") or 0)


_HEADINGS = ("type", *SIZES, "lr", "state", "share", "GPU", "what it is")
_NARROW = 76
"""Columns of a terminal below which the table breaks words."""


def _cells(row: Row) -> list[str]:
    """Return a row of the short table."""
    gains = [row.gain(size) for size in SIZES]
    rate = "" if row.choice.rate == NOT_MEASURED else row.choice.rate
    gpu = "" if row.choice.gpu is None else f"{row.choice.gpu[1]:.1f}"
    return [row.name, *gains, rate, f"{row.costs.state:.1f}", f"{row.costs.share:.1%}", gpu, row.choice.brief]


def _telling(rows: list[list[str]]) -> list[int]:
    """Return the columns in which rows differ, and the first."""
    return [number for number, cells in enumerate(zip(*rows, strict=True)) if number == 0 or len(set(cells)) > 1]


EXPLAINED = (
    f"{SIZES[0]}, {SIZES[1]}: held-out loss less AdamW's, nats per byte, by parameters, rates searched ('?': not "
    "settled). lr: best over AdamW's. State: bytes per parameter (AdamW: 8). Share: of a training step, computed "
    f"({SETTING}). GPU: step over fused AdamW's, measured on an H200."
)


def shown(width: int, whole: bool = False) -> RenderableType:
    """Return a table with a line for each type, or a paragraph for each.

    Args:
        width: Columns of the terminal; below a limit there are paragraphs, which break no word.
        whole: Whether all columns are shown, in paragraphs.
    """
    listed = list(_listed())
    cells = [(_facts if whole or width < _NARROW else _cells)(row) for row in listed]
    columns = _telling(cells)
    if whole or width < _NARROW:
        return Group(*(_paragraph([row[column] for column in columns]) for row in cells))
    headings = [_HEADINGS[column] for column in columns]
    table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    for row in cells:
        table.add_row(*(Text(row[column]) for column in columns))
    return Group(table, Text(EXPLAINED))


def _listed() -> Iterator[Row]:
    """Return the rows without MARS's, which is one of the others by its variant."""
    return (row for row in rows() if row.name != "MARS")


def _facts(row: Row) -> list[str]:
    """Return the name of a type and all that is known of it, a line for each."""
    choice, costs = row.choice, row.costs
    return [
        row.name,
        f"for: {choice.purpose}",
        f"not for: {choice.against}",
        f"lr over AdamW's: {choice.rate} (ready file: {costs.ready:.2g})",
        f"loss less AdamW's, by parameters: {choice.gains}",
        f"betas (ready file): {costs.betas or 'none'}",
        f"state, bytes per parameter (AdamW: 8): {costs.state:.2f}",
        f"sent, bytes per parameter and step: {costs.sent:.2f}",
        f"share of a training step: {costs.share:.1%}",
        f"GPU step over fused AdamW's: {NOT_MEASURED if choice.gpu is None else f'{choice.gpu[1]:.2f}'}",
    ]


def _paragraph(facts: list[str]) -> RenderableType:
    said = (Padding(Text(text), (0, 0, 0, 2)) for text in facts[1:])
    return Group(Text(facts[0], style="bold"), *said, "")


def as_markdown() -> str:
    """Return the tables of docs/choose.md: what to compare, and what each is for."""
    first = ("type", *(f"loss less AdamW's at {size}" for size in SIZES), "lr over AdamW's (ready file)")
    first += ("state, bytes per parameter (AdamW: 8)", "share of a step", "GPU step over fused AdamW's")
    lines = [first, ["---"] * len(first)]
    for row in _listed():
        name, *gains, rate, state, share, gpu, _ = _cells(row)
        lines.append((name, *gains, f"{rate} ({row.costs.ready:.2g})".strip(), state, share, gpu))
    lines += [(), ("type", "for", "not for"), ["---"] * 3]
    lines += [(row.name, row.choice.purpose, row.choice.against) for row in _listed()]
    return "".join(f"| {' | '.join(line)} |\n" if line else "\n" for line in lines)


def _record() -> None:
    costs = {name.lower(): computed(name.lower())._asdict() for name in CHOICES}
    RECORDED.write_text(json.dumps(costs, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _record()
