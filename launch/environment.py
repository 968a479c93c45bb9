"""DeepSpeed expects variables of the ranks' processes, and a compiler, which this module works around."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from rankwise.abandoned_locks import watch_builds

__all__ = ["available_cores", "leave_groups", "missing_build_tools", "prepare_shm_build", "rank_environment"]


def available_cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rank_environment(ranks: int, cpu: bool, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of the processes that run the ranks. Variables that are set already stay.

    Args:
        ranks: Number of processes on this machine, which share its cores.
        cpu: Whether to train on the CPU even if there are GPUs.
        base: Environment to start from; this process's own by default.
    """
    environment = dict(os.environ if base is None else base)
    # ninja, which DeepSpeed calls to build its CPU collectives, is beside the interpreter in a virtual environment.
    scripts = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([scripts, environment.get("PATH", os.defpath)])
    environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // ranks)))
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    if cpu:
        environment["DS_ACCELERATOR"] = "cpu"
        environment["CUDA_VISIBLE_DEVICES"] = ""
    package = importlib.import_module("rankwise.launch")
    if package.__name__ == "launch":  # ranks must also find a checkout that is not installed
        checkout = str(Path(package.__path__[0]).resolve().parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), checkout]))
    return environment


def leave_groups() -> None:
    """Destroy all process groups, and wait for their threads.

    Objects that refer to a group keep its threads, and gloo's threads abort the process if they free a tensor while the
    interpreter ends. So drop optimizers and engines first; cycles are collected here.
    """
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def missing_build_tools() -> list[str]:
    """Return what a just-in-time build of a C++ extension needs and this machine lacks."""
    missing = [tool for tool in (os.environ.get("CXX", "c++"), "g++", "ninja") if shutil.which(tool) is None]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return missing if header.exists() else [*missing, str(header)]


def prepare_shm_build() -> list[str]:
    """Keep DeepSpeed from failing, or waiting for ever, over its shared-memory collectives.

    DeepSpeed builds them on every CPU machine at start-up. They only serve inference; training runs over gloo alone. So
    they are left out if they cannot be compiled. A lock that a killed job has left there, or at another extension, is
    removed when a build meets it, and every wait says what it waits for.

    Returns:
        The missing tools; empty if the build can begin or is not needed.
    """
    from deepspeed.accelerator import get_accelerator

    watch_builds()
    if get_accelerator().device_name() != "cpu":
        return []
    missing = missing_build_tools()
    if missing:
        importlib.import_module("deepspeed.comm")
        # Importing deepspeed.comm.torch by name would return torch itself, which that module re-exports.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    return missing
