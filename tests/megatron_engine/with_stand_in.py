"""Runs functions of the tests in a process with Transformer Engine's stand-in, which Megatron looks for on import."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
STAND_IN = _HERE / "stand_in"
LIMIT = 1500.0
"""Seconds that one process may take; whatever hangs in it is found by its ranks' own limit."""

Call = tuple[int, Callable[..., Any], tuple[Any, ...]]


def run_with_stand_in(*calls: Call) -> list[list[Any]]:
    """What :func:`ranks.run_ranks` returns for each call, one after the other in one process.

    Args:
        calls: Number of ranks, function and arguments, all of which can be pickled.
    """
    paths = [str(STAND_IN), str(_HERE), str(_HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:
        asked, found = Path(folder) / "calls", Path(folder) / "results"
        asked.write_bytes(pickle.dumps(calls))
        command = [sys.executable, __file__, str(asked), str(found)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        results: list[list[Any]] = pickle.loads(found.read_bytes())
        return results


def _main(asked: Path, found: Path) -> None:
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch
    from ranks import run_ranks

    from megatron_patches.cpu import import_megatron

    torch.set_num_threads(1)
    import_megatron("megatron.core.models.gpt")
    from megatron.core.extensions.transformer_engine import HAVE_TE

    assert HAVE_TE, "Megatron did not take the stand-in"
    calls: tuple[Call, ...] = pickle.loads(asked.read_bytes())
    found.write_bytes(pickle.dumps([run_ranks(world, fn, *args) for world, fn, args in calls]))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
