"""Starts one process per rank with torchrun, on a free port."""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import subprocess
import sys
from types import FrameType
from typing import NoReturn

import torch

from rankwise.launch.environment import rank_environment

__all__ = ["choose_device", "exec_ranks", "print_ranks", "run_ranks", "torchrun_command"]

_GRACE_SECONDS = 30.0


def choose_device(device: str, ranks: int | None) -> tuple[bool, int]:
    """Decides between CPU and GPU and how many ranks to start.

    Args:
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        ranks: number of ranks, or None for one per GPU, two on a CPU.

    Returns:
        Whether to use the CPU, and the number of ranks.

    Raises:
        ValueError: if there are fewer GPUs than ranks, or the number of ranks is not positive.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is {device!r}: it must be 'auto', 'cpu' or 'cuda'")
    if ranks is not None and ranks < 1:
        raise ValueError(f"ranks is {ranks}: it must be at least 1")
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus == 0:
        raise ValueError("device is 'cuda' and torch sees no GPU; use --device cpu")
    if gpus == 0:
        return True, ranks or 2
    if ranks is not None and ranks > gpus:
        raise ValueError(f"ranks is {ranks} and there are {gpus} GPU(s); use --ranks {gpus} or --device cpu")
    return False, ranks or gpus


def torchrun_command(module: str, arguments: list[str], ranks: int) -> list[str]:
    """The command line that runs a module of :mod:`rankwise.launch` on every rank of this machine.

    Args:
        module: module name without its package, e.g. ``"pretrain"``.
        arguments: arguments of the module.
        ranks: number of processes.
    """
    package = importlib.import_module("rankwise.launch").__name__  # "launch" in a checkout that is not installed
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    # Port 0 lets the rendezvous take any free one; localhost needs no resolvable host name.
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    return [*torchrun, *rendezvous, "--module", f"{package}.{module}", *arguments]


def print_ranks(module: str, arguments: list[str], ranks: int, cpu: bool) -> None:
    """What would be started, as a line for a shell: the variables that are not this process's own, and the command."""
    environment = rank_environment(ranks, cpu)
    changed = {name: value for name, value in sorted(environment.items()) if os.environ.get(name) != value}
    variables = [f"{name}={shlex.quote(value)}" for name, value in changed.items()]
    print(*variables, shlex.join(torchrun_command(module, arguments, ranks)))


def run_ranks(module: str, arguments: list[str], ranks: int, cpu: bool) -> int:
    """Runs a module on every rank and waits for it; ends the ranks when this process is interrupted or terminated.

    Returns:
        The launcher's exit status: 0 if every rank succeeded.
    """

    def stop(signal_number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signal_number)

    before = signal.signal(signal.SIGTERM, stop)
    process = subprocess.Popen(torchrun_command(module, arguments, ranks), env=rank_environment(ranks, cpu))
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def exec_ranks(module: str, arguments: list[str], ranks: int, cpu: bool) -> NoReturn:
    """Replaces this process by the launcher, so that signals and the exit status are the launcher's own."""
    command = torchrun_command(module, arguments, ranks)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, rank_environment(ranks, cpu))
