"""These functions read a run from each known format of logs."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from rankwise.launch.comparing.logged_run import Curve, LogError, LoggedRun

__all__ = ["Reader", "from_csv", "from_megatron", "from_ours", "from_tensorboard", "from_trainer"]

Reader = Callable[[Path, str | None, int | None], LoggedRun]
"""Takes a path, the name of the loss (None: one of the usual ones) and tokens per sample (None: unknown)."""

_LOSSES = ("lm loss", "Train/Samples/train_loss", "train/loss", "train_loss", "loss")
_VALIDATIONS = ("lm loss validation", "eval/loss", "eval_loss", "validation_loss", "val_loss")
_SAMPLES = "Train/Samples/"
"""Names of DeepSpeed begin so; its events are counted in samples."""
_RATE = f"{_SAMPLES}lr"
"""Name of a quantity that is written at every step."""
_PARTS = tuple(f"{_SAMPLES}elapsed_time_ms_{part}" for part in ("forward", "backward", "step"))
_PEAK = "mem-max-allocated-bytes"


def from_ours(folder: Path, loss: str | None, seq_len: int | None) -> LoggedRun:
    """Read a folder of ``rankwise train``; if the run has not ended, it has no summary yet."""
    records = list(_lines(folder / "metrics.jsonl"))
    settings, summary = _json(folder / "settings.json"), _json(folder / "summary.json")
    tokens = summary["tokens"] / summary["steps"] if summary else None
    return LoggedRun(
        label=str(summary.get("label") or settings.get("label") or folder.name),
        source=folder,
        loss=_column(records, loss or "loss"),
        validation=_column(records, "validation_loss"),
        seconds=_column(records, "seconds"),
        tokens_per_step=tokens,
        step_share=summary.get("step_share"),
        state_bytes=summary.get("state_bytes_per_rank"),
    )


def from_trainer(folder: Path, loss: str | None, seq_len: int | None) -> LoggedRun:
    """Read ``trainer_state.json`` of Hugging Face's Trainer."""
    records = _json(folder / "trainer_state.json").get("log_history", [])
    return LoggedRun(
        label=folder.parent.name if folder.name.startswith("checkpoint-") else folder.name,
        source=folder,
        loss=_column(records, loss or "loss"),
        validation=_column(records, "eval_loss"),
    )


_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*\d+ \|")
_VALIDATION = re.compile(r"validation loss at iteration (\d+).*?lm loss value: ([-+.\dEeinfa]+)")
_MAX_ALLOCATED = re.compile(r"max allocated: ([\d.]+)")


def from_megatron(file: Path, loss: str | None, seq_len: int | None) -> LoggedRun:
    """Read what Megatron's training loop printed, ``--log-interval`` iterations a line."""
    name, seconds, done = loss or "lm loss", 0.0, 0
    losses, validations, times, samples, peaks = {}, {}, {}, {}, [0.0]
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        peaks += [float(match) * 2**20 for match in _MAX_ALLOCATED.findall(line)]
        if held := _VALIDATION.search(line):
            validations[float(held[1])] = float(held[2])
        if not (match := _ITERATION.search(line)):
            continue
        cells = {cell.partition(":")[0].strip(): cell.partition(":")[2].strip() for cell in line.split("|")}
        step = int(match[1])
        if "elapsed time per iteration (ms)" in cells:
            seconds += float(cells["elapsed time per iteration (ms)"]) / 1000 * (step - done if step > done else 0)
            times[float(step)] = seconds
        done = step
        samples[float(step)] = float(cells.get("consumed samples", "nan"))
        if name in cells:
            losses[float(step)] = float(cells[name])
    per_step = next((count / step for step, count in reversed(samples.items())), math.nan)
    return LoggedRun(
        label=file.stem,
        source=file,
        loss=Curve.of(losses),
        validation=Curve.of(validations),
        seconds=Curve.of(times),
        tokens_per_step=None if seq_len is None or math.isnan(per_step) else per_step * seq_len,
        peak_bytes=max(peaks) or None,
    )


def from_tensorboard(folder: Path, loss: str | None, seq_len: int | None) -> LoggedRun:
    """Read event files of DeepSpeed's monitor, Megatron, Hugging Face's Trainer and others."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise LogError(f"{folder} holds TensorBoard's event files, which need: pip install tensorboard") from error
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    events = {name: board.Scalars(name) for name in board.Tags()["scalars"]}
    series = {name: {float(event.step): event.value for event in points} for name, points in events.items()}
    chosen = _chosen(series, folder, loss)
    start = min((points[0].wall_time for points in events.values()), default=0.0)
    clock = {float(event.step): event.wall_time - start for event in events[chosen]}
    run = _of_series(folder, series, chosen, seq_len)
    per_step = _samples_per_step(series, chosen)
    return LoggedRun(**{**vars(run), "seconds": Curve.of({at / per_step: value for at, value in clock.items()})})


def from_csv(folder: Path, loss: str | None, seq_len: int | None) -> LoggedRun:
    """Read a folder of DeepSpeed's ``csv_monitor``, which has a file for each quantity."""
    names = {_as_file(name): name for name in (*_LOSSES, *_VALIDATIONS, *_PARTS, _RATE, *([loss] if loss else []))}
    series = {}
    for file in folder.glob("*.csv"):
        with file.open(newline="", encoding="utf-8") as lines:
            rows = [row for row in csv.reader(lines) if len(row) == 2 and row[0] != "step"]
        try:
            series[names.get(file.name, file.stem)] = {float(at): float(value) for at, value in rows}
        except ValueError as error:
            raise LogError(f"{file} is not a file of csv_monitor, which has only numbers: {error}") from error
    return _of_series(folder, series, _chosen(series, folder, loss), seq_len)


# --- shared ----------------------------------------------------------------------------------------------------------


def _of_series(folder: Path, series: Mapping[str, Mapping[float, float]], loss: str, seq_len: int | None) -> LoggedRun:
    counted = loss.startswith(_SAMPLES)
    per_step = _samples_per_step(series, loss)
    held = next((name for name in _VALIDATIONS if name in series), None)
    parts = [sum(series[name].values()) for name in _PARTS if name in series]
    taken = sum(parts, 0.0)
    peak = max(series.get(_PEAK, {}).values(), default=None)
    batch = series.get("batch-size")
    samples = per_step if counted else max(batch.values()) if batch else None

    def curve(name: str | None) -> Curve:
        scale = per_step if name is not None and name.startswith(_SAMPLES) else 1.0
        return Curve.of({at / scale: value for at, value in series[name].items()}) if name is not None else Curve()

    return LoggedRun(
        label=folder.name,
        source=folder,
        loss=curve(loss),
        validation=curve(held),
        tokens_per_step=None if seq_len is None or samples is None else samples * seq_len,
        step_share=parts[-1] / taken if len(parts) == len(_PARTS) and taken else None,
        peak_bytes=peak,
    )


def _chosen(series: Iterable[str], folder: Path, loss: str | None) -> str:
    names = sorted(series)
    loss_name = next((name for name in ([loss] if loss else _LOSSES) if name in names), None)
    if loss_name is None:
        wanted = f"nothing of the name {loss!r}" if loss else f"none of {', '.join(_LOSSES)}"
        raise LogError(f"{folder} has {wanted}: name one of {', '.join(names)} by --loss")
    return loss_name


def _samples_per_step(series: Mapping[str, Mapping[float, float]], loss: str) -> float:
    """Return the samples of a step if a loss is logged by samples: the least distance of two points, or from 0."""
    if not loss.startswith(_SAMPLES):
        return 1.0
    at = sorted({0.0, *series[loss], *series.get(_RATE, ())})
    return min((later - earlier for earlier, later in pairwise(at)), default=1.0)


def _as_file(name: str) -> str:
    return name.replace("/", "_").replace(" ", "_") + ".csv"


def _column(records: Iterable[Mapping[str, Any]], key: str) -> Curve:
    return Curve.of({float(record["step"]): float(record[key]) for record in records if key in record})


def _json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return content


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        try:
            yield json.loads(line)
        except ValueError as error:
            # A run that was killed may have left half a line.
            if number + 1 < len(lines):
                raise LogError(f"{file} has a line {number + 1} that is not JSON: {error}") from error
