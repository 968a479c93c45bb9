"""This module finds the logs of runs below paths."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankwise.launch.comparing.log_formats import (
    Reader,
    from_csv,
    from_megatron,
    from_ours,
    from_tensorboard,
    from_trainer,
)
from rankwise.launch.comparing.logged_run import LogError, LoggedRun

__all__ = ["read_runs"]

_KINDS: tuple[tuple[str, Reader], ...] = (
    ("metrics.jsonl", from_ours),
    ("trainer_state.json", from_trainer),
    ("*tfevents*", from_tensorboard),
    ("*.csv", from_csv),
)
"""Readers by the files that a folder holds; the first that fits is taken."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
"""Names of the Trainer's folders."""


def read_runs(paths: Sequence[Path], loss: str | None = None, seq_len: int | None = None) -> list[LoggedRun]:
    """Return every run at some paths, with labels that differ.

    Args:
        paths: Folders of ``rankwise train``, of TensorBoard's event files, of DeepSpeed's CSV files or of the Trainer's
            checkpoints, folders with such folders, and files of what Megatron printed.
        loss: Name of the loss in the logs; None: one of the usual ones.
        seq_len: Tokens of a sample, for logs that count samples.

    Raises:
        LogError: A path has no known log, or a log has no such loss.
    """
    runs = [run for path in paths for run in _runs_at(path.resolve(), loss, seq_len)]
    runs = list({run.source: run for run in runs}.values())
    for run in runs:
        if not run.loss.steps:
            raise LogError(f"{run.source} has no loss yet; see --loss")
    return _told_apart(runs)


def _runs_at(path: Path, loss: str | None, seq_len: int | None) -> Iterator[LoggedRun]:
    if path.is_file():
        yield from_megatron(path, loss, seq_len)
        return
    if not path.is_dir():
        raise LogError(f"{path} does not exist")
    reader = _reader(path)
    if reader is not None:
        yield reader(path, loss, seq_len)
        return
    folders = [folder for folder in _folders(path) if _reader(folder)]
    if not folders:
        kinds = ", ".join(kind for kind, _ in _KINDS)
        raise LogError(f"{path} has no log in it or below: a folder with {kinds}, or a file of what Megatron printed")
    for folder in folders:
        yield from _runs_at(folder, loss, seq_len)


def _reader(folder: Path) -> Reader | None:
    return next((reader for kind, reader in _KINDS if any(folder.glob(kind))), None)


def _folders(path: Path) -> Iterator[Path]:
    """Yield folders with logs at any depth, but none below another."""
    folders = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    saved = {int(match[1]): folder for folder in folders if (match := _CHECKPOINT.fullmatch(folder.name))}
    older = set(saved.values()) - {saved[max(saved)]} if saved else set()
    for folder in folders:
        if folder in older:
            continue  # this log is the beginning of the newest one
        if _reader(folder):
            yield folder
        else:
            yield from _folders(folder)


def _told_apart(runs: Sequence[LoggedRun]) -> list[LoggedRun]:
    """Add more of the path to labels that several runs have."""
    count = Counter(run.label for run in runs)
    named = [run.named(f"{run.source.parent.name}/{run.label}") if count[run.label] > 1 else run for run in runs]
    count = Counter(run.label for run in named)
    return [run.named(str(run.source)) if count[run.label] > 1 else run for run in named]
