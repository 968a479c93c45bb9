"""docs/sizes.md: E9's differences by size and by length, and what they say together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from benchmarks.convergence.experiment import Claim, Experiment
from benchmarks.convergence.ladder_page import ladder_section
from benchmarks.convergence.language_models import LONG_MEMORY, SKETCHED
from benchmarks.convergence.page import (
    decided,
    experiment_section,
    paired_figures,
    recorded_rows,
    seeds_loss,
)
from benchmarks.convergence.plots import draw, draw_differences, draw_gains
from benchmarks.convergence.results import Results
from benchmarks.convergence.search import best_trial, known_figures
from benchmarks.convergence.sizes import CELLS, CONTENDERS, Cell
from benchmarks.convergence.variations import BASE, VARIATIONS
from benchmarks.convergence.verdicts import Difference, mean_interval
from benchmarks.performance import markdown
from rankwise.sonew.options import SONewOptions

__all__ = ["differences", "draw_sizes", "follows", "gains", "sizes_page", "steps_for"]

_BASELINE = CONTENDERS[0]
_OUTSIDE = " (*)"
_OURS = CONTENDERS[1:]
_CANDIDATES = (
    ("MARS-AdamW, gamma 0.025", "MARS-AdamW, published betas"),
    ("MARS-AdamW, gamma 0.05", "MARS-AdamW, gamma 0.025"),
    (LONG_MEMORY, "MKOR on AdamW"),
)
_OTHERS = (
    (SKETCHED.name, "MKOR on AdamW"),
    ("MKOR on Muon", "MKOR on AdamW"),
    ("MKOR on Muon", "Muon"),
    ("MARS-M", "Muon"),
)
_SIZES = sorted((cell for cell in CELLS if cell.bytes_each == 20), key=lambda cell: cell.parameters)
_LENGTHS = sorted(
    (cell for cell in CELLS if cell.parameters == 260_736),
    key=lambda cell: cell.bytes_each,
)

_FURTHER = [cell for cell in _LENGTHS if cell not in _SIZES]
_DECIDING = (*_SIZES, *_FURTHER)

_HEAD = """# What remains as models grow

Gains of optimizers shrink with size and with the length of training; independent sweeps found 1.4 times at 0.1 B
parameters and 1.1 times at 1.2 B ([2509.02046](https://arxiv.org/abs/2509.02046)). This page asks the same of the types
here: one comparison at several sizes with 20 bytes of text a parameter, and at one size with 5, 20 and 80.

The short answer is the first table: the held-out loss less AdamW's, in nats per byte, lower is better. Every learning
rate is searched at every size ([they](rates.md#by-width-and-length)), three seeds are paired with AdamW's, and
intervals are of 95 % (Student's t). A difference counts from 0.01 on; **bold** ones hold.

"""

_RULE = """
## What follows for the defaults

The rule was fixed beforehand: an option's default changes where two sizes and both further lengths speak for it, with
intervals that exclude zero. The published value stays, by name ([deviations](deviations.md)). Each cell is the loss of
the first less that of the second; **bold** where it speaks for the first. *Yet*: some have not been run. *No default*:
another method rather than a value. `rule="sketch"` in particular stays an option whatever it gains, for the name MKOR
promises the paper's rule.

"""

_LAW = """
## What is a law here, and what is not

- **These rows settle which types end below AdamW**, at these sizes. By how much is no property of the size: models,
  steps and bytes grow together from column to column, and the batch stays at 2,048 bytes.
- **There is no exponent.** This page used to fit the differences as a power of the number of parameters (-0.63 for
  MARS-M). The fit is taken back: a try on one H200, with another batch and window, contradicts it. From 0.26 M on it
  says -0.05 for MARS-M at 1.1 M and -0.02 at 4.2 M; the try found -0.40 and -0.07.
- **Nats measure how late AdamW leaves its plateau**, where runs are short. Shares of AdamW's steps and of its time
  can be compared from one size to another; the [ladder](#e13-the-ladder) is shown in those.

The try, 2026-11-27: one H200, one seed, rates by factors of two, windows of 256 bytes of installed sources, bfloat16
products, 20 bytes a parameter; 64 windows and 1,221 steps at 1.1 M, 128 windows and 2,441 steps at 4.2 M. AdamW ended
at 1.346 and 0.838 nats. *Reached at*: the share of AdamW's steps at which its last training loss was reached. It was
run by hand, and E13 measures it again; empty: no whole run.

| | 1.1 M, less AdamW's | reached at | 4.2 M, less AdamW's | reached at |
|---|---|---|---|---|
| Muon | -0.386 | 35 % | | |
| MARS-M | -0.396 | 35 % | -0.071 | 70 % |
| MKOR on AdamW, rule sketch | -0.354 | 40 % | -0.050 | 75 % |
| SONew | -0.205 | 60 % | -0.020 | 85 % |
| LDAdam, rank d/4, buffer int8 | -0.180 | 75 % | | |
| MARS-AdamW, gamma 0.025 | -0.041 | 90 % | -0.014 | 85 % |
"""

_STEPS = """
## Steps to AdamW's loss

AdamW's loss over its steps, at the middle size, is interpolated between {lengths} bytes a parameter as a power of the
steps. From it comes how many steps AdamW needs for a type's loss; over the type's own steps, that is the *speed-up*.
*Time of a step* is the median over the runs, beside AdamW's on the same processor. It was taken at the lowest priority
of a machine that did other work, on a model so small that overheads count most: divide by it with care. (*) lies
beyond AdamW's own lengths, where the power law is continued.

"""

_VARIED = f"""
## Other schedules, batches and decay

At {BASE.size}, each with its rates searched anew: the loss less AdamW's in the same experiment, and AdamW's own. WSD
decays linearly over the last fifth. Four times the batch has a quarter of the steps. Cautious and independent decay are
the option `weight_decay_method`; AdamW with them is MARS with nothing to correct. Empty: not run yet, or without that
option.

"""


def sizes_page(results: Results) -> str:
    """The page.

    Args:
        results: What has been run, be it little.
    """
    heading = ("", *(f"{cell.size}, {cell.all_steps:,} steps" for cell in _SIZES))
    lengths = ("", *(f"{cell.bytes_each} bytes, {cell.all_steps:,} steps" for cell in _LENGTHS))
    sections = "".join(experiment_section(each, results) for each in (*CELLS.values(), *VARIATIONS))
    return "".join(
        (
            _HEAD,
            markdown(heading, [(name, *_cells(name, _SIZES, results)) for name in _OURS]),
            "\n![differences by size and by length](images/sizes.png)\n\n",
            f"At {_LENGTHS[0].size}, by bytes of text a parameter:\n\n",
            markdown(lengths, [(name, *_cells(name, _LENGTHS, results)) for name in _OURS]),
            _LAW,
            ladder_section(results),
            _STEPS.format(lengths=" and ".join(str(cell.bytes_each) for cell in _known_lengths(results))),
            markdown(
                ("", *(f"{cell.bytes_each} bytes" for cell in _LENGTHS), "time of a step"), list(_speed_ups(results))
            ),
            _VARIED,
            _varied(results),
            _RULE,
            _claims(results),
            sections,
        )
    )


def differences(cells: Sequence[Cell], name: str, results: Results) -> Mapping[Cell, Difference]:
    """A contender's loss less AdamW's, where both have been run.

    Args:
        cells: Of which sizes and lengths.
        name: The contender.
        results: What has been run.
    """
    return {cell: mean_interval(each) for cell, each in _by_seed(cells, name, results).items()}


def _by_seed(cells: Sequence[Cell], name: str, results: Results) -> Mapping[Cell, list[float]]:
    pairs = {cell: paired_figures(CELLS[cell], name, _BASELINE, results) for cell in cells}
    return {cell: [ours - other for ours, other in each] for cell, each in pairs.items() if each}


def _with_all_seeds(name: str, results: Results) -> Mapping[Cell, list[float]]:
    found = _by_seed(_SIZES, name, results)
    return {cell: each for cell, each in found.items() if len(each) == len(CELLS[cell].seeds)}


def gains(name: str, results: Results) -> str:
    """A contender's difference from AdamW at each size, in one line; "?" where the interval includes zero.

    Args:
        name: The contender.
        results: What has been run.
    """
    found = {cell: mean_interval(each) for cell, each in _with_all_seeds(name, results).items()}
    return ", ".join(
        f"{each.mean:+.2f}{'?' if each.low < 0.0 < each.high else ''} at {cell.size}" for cell, each in found.items()
    )


def steps_for(loss: float, known: Mapping[int, float]) -> float | None:
    """Steps that would reach a loss, on the power law between two neighbouring lengths.

    Args:
        loss: The loss to be reached.
        known: Losses by the steps of whole runs.

    Returns:
        None with fewer than two lengths; beyond the outermost ones the nearest two are continued.
    """
    points = sorted(known.items())
    if len(points) < 2:
        return None
    between = [index for index in range(len(points) - 1) if points[index + 1][1] <= loss <= points[index][1]]
    index = between[0] if between else (0 if loss > points[0][1] else len(points) - 2)
    (first, upper), (second, lower) = points[index], points[index + 1]
    slope = math.log(second / first) / math.log(lower / upper)
    return first * math.exp(slope * math.log(loss / upper))


def draw_sizes(results: Results, images: Path) -> None:
    """Draw the plots of the page.

    Args:
        results: What has been run.
        images: Folder to write them to.
    """
    panels = {}
    for title, cells, value in (
        ("20 bytes a parameter", _SIZES, lambda cell: cell.parameters),
        (f"{_LENGTHS[0].size} parameters", _LENGTHS, lambda cell: cell.bytes_each),
    ):
        panels[title] = {name: _points(cells, name, value, results) for name in _OURS}
    draw_differences(panels, ("parameters", "bytes of text a parameter"), images / "sizes.png")
    draw_gains(_gains_by_type(results), images / "gains.png")
    for experiment in (*CELLS.values(), *VARIATIONS):
        draw(experiment, results, images / f"evidence-{experiment.name}.png")


_TYPES = {
    "MARS-M": "MARS-M",
    "Muon": "Muon",
    "MKOR on AdamW, rule sketch": "MKOR-Sketch",
    "SONew": "SONew",
    "MARS-AdamW, gamma 0.025": "MARS-AdamW",
    "MKOR on AdamW": "MKOR",
    "LDAdam, rank d/4, buffer int8": "LDAdam, half of\nAdamW's memory",
}
"""What README's picture shows: contenders, and the names of their types."""


def _gains_by_type(results: Results) -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """Differences with all their seeds, at the sizes beyond the smallest."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for name, shown in _TYPES.items():
        settled = {cell: mean_interval(each) for cell, each in _with_all_seeds(name, results).items()}
        found[shown] = {cell.size: (one.mean, one.half) for cell, one in settled.items() if cell != _SIZES[0]}
    return found


def _points(
    cells: Sequence[Cell], name: str, value: Callable[[Cell], int], results: Results
) -> list[tuple[int, float, float]]:
    found = differences(cells, name, results)
    return [(value(cell), each.mean, each.half) for cell, each in found.items() if math.isfinite(each.half)]


def _cells(name: str, cells: Sequence[Cell], results: Results) -> Iterator[str]:
    for cell in cells:
        yield _against_adamw(CELLS[cell], name, results)


def _shown(experiment: Experiment, claim: Claim, results: Results) -> str:
    """A difference in bold where its claim holds."""
    difference, _, words = decided(experiment, claim, results)
    if words == "**holds**":
        return f"**{difference}**"
    return f"{difference} ({words.strip('*')})" if "seeds yet" in words else difference


def _known_lengths(results: Results) -> list[Cell]:
    return [cell for cell in _LENGTHS if _losses(_BASELINE, cell, results)]


def _losses(name: str, cell: Cell, results: Results) -> list[float]:
    return known_figures(CELLS[cell], CELLS[cell].contender(name), results)


def _speed_ups(results: Results) -> Iterator[Sequence[str]]:
    known = {cell.all_steps: fmean(_losses(_BASELINE, cell, results)) for cell in _known_lengths(results)}
    for name in _OURS:
        cells = []
        for cell in _LENGTHS:
            losses = _losses(name, cell, results)
            needed = steps_for(fmean(losses), known) if losses and all(map(math.isfinite, losses)) else None
            outside = needed is not None and not min(known) <= needed <= max(known)
            mark = _OUTSIDE if outside else ""
            cells.append(f"{needed / cell.all_steps:.2f}{mark}" if needed is not None else "")
        yield name, *cells, _time_of_a_step(name, results)


def _time_of_a_step(name: str, results: Results) -> str:
    """Over AdamW's, in the largest model of which there are runs of both."""
    for cell in reversed(_SIZES):
        own, base = (_seconds(CELLS[cell], each, results) for each in (name, _BASELINE))
        for device in sorted(own.keys() & base.keys()):
            return f"{median(own[device]) / median(base[device]):.2f} at {cell.size}"
    return ""


def _seconds(experiment: Experiment, name: str, results: Results) -> dict[str, list[float]]:
    """By the device that ran it."""
    found: dict[str, list[float]] = {}
    for row in recorded_rows(experiment, [experiment.contender(name)], results):
        if not row["diverged"]:
            found.setdefault(row["device"], []).append(row["seconds"])
    return found


def _varied(results: Results) -> str:
    columns = (CELLS[BASE], *VARIATIONS)
    own = [seeds_loss(each, each.contender(_BASELINE), results) for each in columns]
    rows = [(f"{_BASELINE}'s loss", *own)]
    for other in VARIATIONS[0].contenders[1:]:
        rows.append((other.name, *(_against_adamw(each, other.name, results) for each in columns)))
    return markdown(("", "cosine", *(each.name for each in VARIATIONS)), rows)


def _against_adamw(experiment: Experiment, name: str, results: Results) -> str:
    claims = [each for each in experiment.claims if (each.ours, each.than) == (name, _BASELINE)]
    return _shown(experiment, claims[0], results) if claims else ""


def _claims(results: Results) -> str:
    """What each cell says of the candidates: the options that these contenders differ in."""
    rows = []
    for ours, than in (*_CANDIDATES, *_OTHERS):
        shown = [_shown(CELLS[cell], Claim("", "", ours, than), results) for cell in _DECIDING]
        is_default = (ours, than) in _CANDIDATES
        rows.append((f"{ours}, against {than}", *shown, follows(ours, than, results) if is_default else "no default"))
    heading = [f"{cell.size}, {cell.bytes_each} bytes" for cell in _DECIDING]
    return markdown(("", *heading, "follows"), rows) + _best_eps(results)


def _best_eps(results: Results) -> str:
    """SONew's, of which every value has a search of its own."""
    found = {cell: best_trial(CELLS[cell], CELLS[cell].contender("SONew"), results) for cell in _DECIDING}
    words = [f"{best.setting['eps']:g} at {cell.size}, {cell.bytes_each} bytes" for cell, best in found.items() if best]
    if not words:
        return ""
    return f"\nThe best `eps` of SONew's trials, whose default is {SONewOptions().eps:g}: {'; '.join(words)}.\n"


def follows(ours: str, than: str, results: Results) -> str:
    """Whether one contender's options are to be the default instead of another's, in words.

    Args:
        ours: The one.
        than: The other, with the default.
        results: What has been run.
    """
    claim = Claim("", "", ours, than)
    found = {cell: decided(CELLS[cell], claim, results)[2].strip("*") for cell in _DECIDING}
    holds = [cell for cell, words in found.items() if words == "holds"]
    sizes, lengths = ([cell for cell in cells if cell in holds] for cells in (_SIZES, _FURTHER))
    if len(sizes) >= 2 and len(lengths) == len(_FURTHER):
        return "**it changes**"
    missing = " yet" if any("run yet" in words or "seeds yet" in words for words in found.values()) else ""
    return f"{len(sizes)} of {len(_SIZES)} sizes, {len(lengths)} of {len(_FURTHER)} lengths{missing}"
