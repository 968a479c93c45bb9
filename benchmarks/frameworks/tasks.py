"""What a rank of a cell is told, and what it leaves behind."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.frameworks.cells import Cell, cell_of
from benchmarks.frameworks.problem import STEPS, Weights

__all__ = ["PATIENCE_BESIDE_A_KILLED", "Result", "Task", "results_of"]

_KILLED_AT = STEPS // 2
_PATIENCE = 30.0
PATIENCE_BESIDE_A_KILLED = 15.0
"""Seconds that a rank waits for one that is killed."""


@dataclass(frozen=True)
class Task:
    """A part of a cell, for all of its ranks.

    Attributes:
        key: Key of the cell.
        kinds: The optimizers to run, in this order.
        device: "cuda", on which all ranks share the first device, or "cpu".
        out: Where results go, without their rank.
        ranks: Processes.
        first: First step; later than 0 if a checkpoint is gone on with.
        last: Step that is not taken any more; earlier than the end if a checkpoint is left.
        store: Folder of checkpoints, and of what the cells of a front share.
    """

    key: str
    kinds: tuple[str, ...]
    device: str
    out: str
    ranks: int
    first: int = 0
    last: int = STEPS
    store: str = ""

    @property
    def cell(self) -> Cell:
        """The cell."""
        return cell_of(self.key)

    @property
    def place(self) -> torch.device:
        """Device of the tensors."""
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def rank(self) -> int:
        """Of this process."""
        return int(os.environ["RANK"])

    @property
    def patience(self) -> float:
        """Seconds that a rank waits for another one's message."""
        return PATIENCE_BESIDE_A_KILLED if self.cell.is_killed else _PATIENCE

    @property
    def steps(self) -> range:
        """Steps to take."""
        return range(self.first, self.last)

    @property
    def loads(self) -> bool:
        """Whether a checkpoint is gone on with."""
        return self.first > 0

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is left."""
        return self.last < STEPS

    def folder(self, kind: str, noise: float) -> str:
        """Where the checkpoint of a run lies."""
        path = Path(self.store) / self.key.replace("/", "-") / f"{kind}-{noise:g}"
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    def end_here(self, step: int) -> None:
        """Die without a word, if this is the rank and the step of a cell in which one dies."""
        if self.cell.is_killed and step == _KILLED_AT and self.rank == self.ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, path: Path) -> None:
        """For the ranks to read."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: str) -> Task:
        """What was written."""
        content = json.loads(Path(path).read_text())
        return Task(**{**content, "kinds": tuple(content["kinds"])})


class Result:
    """What a rank found so far: whole on the disk after each optimizer.

    Args:
        task: What it was told.
    """

    def __init__(self, task: Task) -> None:
        self._path = f"{task.out}.{task.rank}"
        self._keeps = task.rank == 0
        self.found: dict[str, dict[str, Any]] = {}

    def add(self, kind: str, weights: Weights, run: str) -> None:
        """Whole weights after a run: those of rank 0 are kept, of the others a checksum.

        Args:
            kind: The optimizer.
            weights: By name.
            run: "weights", or "perturbed": begun from changed weights.
        """
        digest = hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()
        self.found.setdefault(kind, {})[f"{run} checksum"] = digest
        if self._keeps:
            self.found[kind][run] = weights
        self._write()

    def fail(self, kind: str, error: Exception) -> None:
        """What went wrong."""
        self.found.setdefault(kind, {})["error"] = f"{type(error).__name__}: {str(error)[:400]}"
        self._write()

    def _write(self) -> None:
        beside = f"{self._path}.new"
        with open(beside, "wb") as file:
            pickle.dump(self.found, file)
        os.replace(beside, self._path)


def results_of(out: str, ranks: int) -> list[dict[str, dict[str, Any]]]:
    """What the ranks of a task have found, by rank; nothing of one that has written nothing."""
    found = []
    for rank in range(ranks):
        path = Path(f"{out}.{rank}")
        found.append(pickle.loads(path.read_bytes()) if path.exists() else {})
    return found
