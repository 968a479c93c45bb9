"""``python -m benchmarks.frameworks.rank TASK``: one rank of a cell."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
import warnings

from benchmarks.frameworks.cells import CODES
from benchmarks.frameworks.tasks import Result, Task

__all__ = ["main"]


def main(path: str) -> None:
    """Run the optimizers of a task one after the other.

    What is refused on all ranks is written down, and the next optimizer runs. After any other error the ranks of a
    group no longer agree: the process ends.
    """
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    task = Task.read(path)
    if task.device == "cuda":
        torch.cuda.set_device(0)
    front = importlib.import_module(f"benchmarks.frameworks.{task.cell.front}_front")
    result = Result(task)
    runs = [("weights", 0.0)]
    if task.cell.rounding:
        runs.append(("perturbed", task.cell.rounding))
    with front.opened(task):
        for kind in task.kinds:
            own = [*runs, ("perturbed", CODES)] if len(runs) == 1 and _is_coded(kind) else runs
            try:
                for run, noise in own:
                    result.add(kind, front.train(task, kind, noise), run)
            except Exception as error:
                traceback.print_exc()
                result.fail(kind, error)
                if task.ranks > 1 and not isinstance(error, ValueError):
                    break
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that communication libraries leave behind can abort a process that ends in the usual way.
    os._exit(0)


def _is_coded(kind: str) -> bool:
    from benchmarks.frameworks.problem import KINDS

    return kind in KINDS and KINDS[kind].rounds


if __name__ == "__main__":
    main(sys.argv[1])
