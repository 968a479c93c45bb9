"""torchtitan's own trainer on its debug model, cut to two layers; beside it torchtitan on one rank."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.frameworks.problem import CONTROL, KINDS, Weights, as_array, corrected, perturbed_
from benchmarks.frameworks.tasks import Task

__all__ = ["opened", "train"]

_LENGTH, _ROWS = 256, 4  # Whole blocks of torch's FlexAttention on each of two ranks.
_TESTS = Path(__file__).resolve().parents[2] / "tests"
_WORDS = {"shard": "data_parallel_shard", "replicate": "data_parallel_replicate"}
_WORDS |= {"tp": "tensor_parallel", "cp": "context_parallel"}


@contextmanager
def opened(task: Task) -> Iterator[None]:
    """The models of the tests; torchtitan opens and closes its process groups itself.

    On a host without cards they bring along what torchtitan lacks there; on a card nothing of it is replaced.
    """
    sys.path[:0] = [str(_TESTS), str(_TESTS / "torchtitan_engine")]
    if task.device == "cuda":
        sys.modules["cpu_titan"] = importlib.import_module("benchmarks.frameworks.titan_data")
    yield


def train(task: Task, kind: str, noise: float) -> Weights:
    """Whole weights after the task's steps; "start": the first ones, which all cells begin with."""
    runs = importlib.import_module("titan_runs")
    start = f"{task.store}/titan-start"
    if kind == "start":
        saving = {"folder": start, "load_only": False, "create_seed_checkpoint": True}
        trainer = runs.start(_cell(runs, task), _optimizer(CONTROL), **saving)
        trainer.checkpointer.save(curr_step=0, last_step=True)
        found = _weights(runs, trainer)
        trainer.close()
        return found
    trainer = runs.start(_cell(runs, task), _optimizer(kind), f"{start}/checkpoint/step-0")
    if noise:
        trainer.checkpointer.load(step=trainer.config.checkpoint.load_step)
        first = _weights(runs, trainer)
        perturbed_(
            [getattr(p.data, "_local_tensor", p.data) for m in trainer.model_parts for p in m.parameters()], noise
        )
        changed = _weights(runs, trainer)
        trainer.checkpointer.load = lambda step: False  # Else training would begin with the checkpoint's weights.
    trainer.train()
    found = _weights(runs, trainer)
    trainer.close()
    return corrected(found, changed, first) if noise else found


def _weights(runs: Any, trainer: Any) -> Weights:
    return {name: as_array(value) for name, value in runs.weights(trainer).items() if name != "loss"}


def _cell(runs: Any, task: Task) -> Any:
    degrees = {f"{_WORDS[name]}_degree": degree for name, degree in task.cell.settings["degrees"].items()}
    return runs.Cell(task.ranks, parallel=degrees, batch=1, length=_LENGTH, rows=_ROWS)


def _optimizer(kind: str) -> Any:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    spelling, options = KINDS[kind]
    group = ParamGroupConfig(pattern=".*", optimizer_name=spelling, optimizer_kwargs=dict(options))
    return OptimizersContainer.Config(param_groups=[group], implementation="foreach")
