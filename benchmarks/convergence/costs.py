"""E6 and E7: what the optimizers keep, as predicted and as held by real ranks, and what share of a step they take."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.communication import FlatPiece
from benchmarks.contenders import OURS, Contender
from benchmarks.convergence.optimizers import make_optimizer
from benchmarks.convergence.plots import bars
from benchmarks.convergence.tasks import LanguageModel
from benchmarks.models import fill_gradients, layer_set
from benchmarks.performance import markdown
from benchmarks.step import environment
from rankwise.estimate import estimate

__all__ = [
    "cost_claims",
    "cost_section",
    "draw_costs",
    "draw_memory",
    "measure_costs",
    "measure_memory",
    "memory_section",
]

Row = dict[str, Any]

# --- E6: memory ------------------------------------------------------------------------------------------------------

_MODEL = "gpt2-layers"
_KEPT = tuple(contender for contender in OURS if contender.name != "LDAdam, rank 256")  # saves nothing at this width
_WORLD = 2
# Bytes per parameter that are known without a measurement; 8 bits with a scale in fp32 for each 256 values.
_KNOWN = (("AdamW, fp32", 8.0), ("AdamW, 8-bit", 2.0 + 2 * 4 / 256), ("Muon, matrices", 4.0))


def measure_memory(model: str = _MODEL) -> list[Row]:
    """Step every type on two real ranks, whose parameters are cut as ZeRO-1 and 2 cut them, and predict what they hold.

    Args:
        model: Name of a parameter set, see :mod:`benchmarks.models`.

    Returns:
        A row per type: bytes of the fullest rank, held and predicted, and predictions for more ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_hold, args=(model, f"{folder}/store", queue), nprocs=_WORLD)
        held = queue.get()
    return [_memory_row(contender, model, held[contender.name]) for contender in _KEPT]


def _memory_row(contender: Contender, model: str, held: int) -> Row:
    optimizer = contender.build(layer_set(model, "meta"))
    predicted = {
        f"predicted_{world}_{stage}": max(rank.state_bytes for rank in estimate(optimizer, world=world, stage=stage))
        for world, stage in ((1, 0), (_WORLD, 1), (8, 1), (8, 3))
    }
    count = sum(parameter.numel() for parameter in layer_set(model, "meta").parameters())
    return {"name": contender.name, "model": model, "parameters": count, "held": held, **predicted}


def _hold(rank: int, model: str, store: str, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=_WORLD)
    found = {contender.name: _held(contender, model, rank) for contender in _KEPT}
    everyone: list[Any] = [None] * _WORLD
    dist.all_gather_object(everyone, found)
    if rank == 0:
        queue.put({name: max(mine[name] for mine in everyone) for name in found})
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads that gloo leaves behind can abort a process that ends in the usual way


def _held(contender: Contender, name: str, rank: int) -> int:
    model = layer_set(name)
    optimizer = contender.build(model)
    piece = FlatPiece(model, rank, _WORLD)
    optimizer.param_groups[0]["params"] = [piece.tensor]
    optimizer.attach(piece)
    if optimizer.needs_capture:
        fill_gradients(model, rank)
        model.zero_grad(set_to_none=True)
    piece.tensor.grad = torch.full_like(piece.tensor, 1e-3)
    optimizer.step()
    return sum(optimizer.state_bytes().values())


def memory_section(rows: Sequence[Row]) -> str:
    """Part of the page; says what is missing without rows.

    Args:
        rows: From :func:`measure_memory`.
    """
    title = "\n## E6: Memory\n\n"
    if not rows:
        return f"{title}**Nothing of this has been run.** `python -m benchmarks costs` measures it.\n"
    last = rows[-1]
    text = (
        f"Bytes of optimizer state per parameter of the model on the fullest rank: `{last['model']}`, two blocks of "
        f"GPT-2 with a width of 384 ({last['parameters'] / 1e6:.1f} M parameters), default options (MKOR's factors in "
        "bfloat16). *Held*: by two real ranks after a step, whose parameters are cut as ZeRO-1 and 2 cut them. "
        "*Predicted*: by `rankwise.estimate`, from shapes alone. `python -m benchmarks costs` repeats it.\n\n"
    )
    headings = ("type", "alone", "2 ranks, held", "2 ranks, predicted", "8 ranks, stage 1 or 2", "8 ranks, stage 3")
    keys = ("predicted_1_0", "held", "predicted_2_1", "predicted_8_1", "predicted_8_3")
    lines = [(row["name"], *(f"{row[key] / row['parameters']:.2f}" for key in keys)) for row in rows]
    known = [(name, *(f"{width / share:.2f}" for share in (1, 2, 2, 8, 8))) for name, width in _KNOWN]
    return (
        f"{title}{text}{markdown(headings, [*known, *lines])}\nThe rows of AdamW and Muon are computed.\n{_image('E6')}"
    )


def draw_memory(rows: Sequence[Row], path: Path) -> None:
    """Bytes per parameter of every type on one rank.

    Args:
        rows: From :func:`measure_memory`.
        path: PNG file to write.
    """
    bars(dict(_KNOWN) | _alone(rows), "bytes of optimizer state per parameter, one rank", "E6: Memory", path)


def _alone(rows: Sequence[Row]) -> dict[str, float]:
    """Bytes per parameter of every type on one rank, by its name."""
    return {row["name"]: row["predicted_1_0"] / row["parameters"] for row in rows}


def _image(name: str) -> str:
    return f"\n![costs of {name}](images/evidence-{name}.png)\n"


# --- E7: cost --------------------------------------------------------------------------------------------------------

_TOKENS = 65536
_WINDOW, _BATCH = 256, 8
_PASSES = 5
_TYPES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("AdamW, fused", "adamw", {"fused": True}),
    ("Muon, torch", "muon", {}),
    ("MARS-AdamW", "mars", {}),
    ("MARS-Lion", "mars", {"variant": "lion"}),
    ("MARS-M", "mars", {"variant": "muon"}),
    ("SONew, diagonal", "sonew", {"band": 0}),
    ("SONew, band 1", "sonew", {"band": 1}),
    ("SONew, band 4", "sonew", {"band": 4}),
    ("LDAdam, rank 32", "ldadam", {"rank": 32}),
    ("MKOR, every 10 steps", "mkor", {"factor_dtype": "bfloat16"}),
    ("MKOR, every step", "mkor", {"factor_dtype": "bfloat16", "update_interval": 1}),
    ("MKOR, every 100 steps", "mkor", {"factor_dtype": "bfloat16", "update_interval": 100}),
)


def measure_costs(steps: int = 10, layers: int = 4, hidden: int = 192) -> list[Row]:
    """Time steps of optimizers, and a micro-batch's forward and backward pass, to be taken as often as it needs.

    Times are of the processor, not of the clock: other work on the machine does not count.

    Args:
        steps: Timed steps; means are taken, so that MKOR's factor steps count.
        layers: Layers of the model, which is that of ``make train`` by default.
        hidden: Its width.

    Returns:
        A row per type.
    """
    task = LanguageModel(layers, hidden, 4, _WINDOW, _BATCH, 1.0, 0)
    passes = [_seconds(partial(task.gradient, step)) for step in range(1 + _PASSES)][1:]
    batch = statistics.median(passes) * _TOKENS / (_WINDOW * _BATCH)
    rows = []
    for name, kind, options in _TYPES:
        # What a step takes does not depend on the number of tokens.
        task = LanguageModel(layers, hidden, 4, _WINDOW, 1, 1.0, 0)
        optimizer = make_optimizer(kind, task.model, 1e-4, options)
        updates = []
        for step in range(steps + 2):
            optimizer.zero_grad()
            task.gradient(step)
            updates.append(_seconds(optimizer.step))
        count = sum(parameter.numel() for parameter in task.model.parameters())
        times = {"step": statistics.fmean(updates[2:]), "batch": batch}
        rows.append({"name": name, "parameters": count, **times, **environment(torch.device("cpu"))})
    return rows


def _seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def cost_section(rows: Sequence[Row]) -> str:
    """Part of the page; says what is missing without rows.

    Args:
        rows: From :func:`measure_costs`.
    """
    title = "\n## E7: Cost of a step\n\n"
    if not rows:
        return f"{title}**Nothing of this has been run.** `python -m benchmarks costs` measures it.\n"
    first = rows[0]
    passes = _WINDOW * _BATCH
    text = (
        f"The model of `make train` ({first['parameters'] / 1e6:.1f} M parameters), {_TOKENS:,} tokens a step: forward "
        f"and backward passes of {passes:,} tokens, times {_TOKENS // passes}, {first['batch']:.1f} s. Processor time "
        f"of one thread, {first['device']}, torch {first['torch']}, {first['date']}; on a GPU the shares differ "
        "([performance.md](performance.md)). `python -m benchmarks costs` repeats it.\n\n"
    )
    whole = [row["batch"] + row["step"] for row in rows]
    lines = [
        (row["name"], f"{1e3 * row['step']:.1f}", f"{row['step'] / own:.2%}", f"{own / whole[0] - 1:+.2%}")
        for row, own in zip(rows, whole, strict=True)
    ]
    headings = ("type", "optimizer's step, ms", "share of the whole step", "whole step over AdamW's")
    return f"{title}{text}{markdown(headings, lines)}{_image('E7')}"


def draw_costs(rows: Sequence[Row], path: Path) -> None:
    """The share of a whole step that every type's update takes.

    Args:
        rows: From :func:`measure_costs`.
        path: PNG file to write.
    """
    figures = {row["name"]: 100.0 * row["step"] / (row["batch"] + row["step"]) for row in rows}
    bars(figures, f"share of a whole step of {_TOKENS:,} tokens, %", "E7: Cost of a step", path)


# --- claims ----------------------------------------------------------------------------------------------------------


def cost_claims(memory: Sequence[Row], costs: Sequence[Row]) -> list[Sequence[str]]:
    """Lines for the table of claims; those alone that there are rows for.

    Args:
        memory: From :func:`measure_memory`.
        costs: From :func:`measure_costs`.
    """
    alone = _alone(memory)
    whole = {row["name"]: row["batch"] + row["step"] for row in costs}
    found: list[Sequence[str]] = []

    def add(paper: str, text: str, tried: str, figure: float, unit: str, most: float) -> None:
        verdict = "holds" if figure <= most else "does not hold"
        found.append((paper, text, tried, f"{figure:.2f} {unit}", f"{most:g}", f"**{verdict}**"))

    if alone:
        text = "5.40 bytes per parameter at rank 16 where AdamW has 8 (a model with embeddings; ours has none)"
        tried = "[E6](#e6-memory): LDAdam, rank 16"
        add("LDAdam, arXiv 2410.16103", text, tried, alone["LDAdam, rank 16"], "bytes per parameter", 5.4)
    if whole:
        cost = "[E7](#e7-cost-of-a-step): "
        for paper, text, ours, than, most in (
            ("SONew, arXiv 2311.10085", "a step takes 3 % more", "SONew, band 1", "AdamW, fused", 3.0),
            ("MARS, arXiv 2411.10438", "a step takes hardly more than AdamW's", "MARS-AdamW", "AdamW, fused", 3.0),
            ("MARS-M, arXiv 2510.21800", "a step takes hardly more than Muon's", "MARS-M", "Muon, torch", 3.0),
            (
                "MKOR, arXiv 2306.01685",
                "frequent updates are nearly free: every step against every 100",
                "MKOR, every step",
                "MKOR, every 100 steps",
                3.0,
            ),
        ):
            figure = 100.0 * (whole[ours] / whole[than] - 1.0)
            add(paper, text, f"{cost}{ours} against {than}", figure, "% of a whole step", most)
    return found
