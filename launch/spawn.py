"""This module starts one process per rank with torchrun, on a free port."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from rankwise.launch.environment import rank_environment

__all__ = ["choose_device", "exec_ranks", "print_ranks", "run_ranks", "started_ranks", "torchrun_command"]

_GRACE_SECONDS = 40.0
"""Seconds that torchrun may take to end; it gives its ranks 30."""
_LAST_WORDS_SECONDS = 2.0


def choose_device(device: str, ranks: int | None) -> tuple[bool, int]:
    """Decide between CPU and GPU, and how many ranks to start.

    Args:
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        ranks: Number of ranks, or None for one per GPU, two on a CPU.

    Returns:
        Whether to use the CPU, and the number of ranks.

    Raises:
        ValueError: There are fewer GPUs than ranks, or the number of ranks is not positive.
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


def torchrun_command(
    module: str, arguments: list[str], ranks: int, launcher: str = "torch.distributed.run"
) -> list[str]:
    """Return the command line that runs a module of :mod:`rankwise.launch` on every rank of this machine.

    Args:
        module: Module name without its package, e.g. ``"pretrain"``.
        arguments: Arguments of the module.
        ranks: Number of processes.
        launcher: Module that starts the processes.
    """
    torchrun = [sys.executable, "-m", launcher, f"--nproc-per-node={ranks}"]
    # Port 0 lets the rendezvous take any free one; localhost needs no resolvable host name.
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    return [*torchrun, *rendezvous, "--module", f"{_package()}.{module}", *arguments]


def _package() -> str:
    return importlib.import_module("rankwise.launch").__name__  # "launch" in a checkout that is not installed


def _quiet_command(module: str, arguments: list[str], ranks: int) -> list[str]:
    return torchrun_command(module, arguments, ranks, f"{_package()}.torchrun")


def print_ranks(module: str, arguments: list[str], ranks: int, cpu: bool) -> None:
    """Print what would be started as a line for a shell: the command, and variables that differ from this process's."""
    environment = rank_environment(ranks, cpu)
    changed = {name: value for name, value in sorted(environment.items()) if os.environ.get(name) != value}
    variables = [f"{name}={shlex.quote(value)}" for name, value in changed.items()]
    print(*variables, shlex.join(torchrun_command(module, arguments, ranks)))


@contextmanager
def started_ranks(
    module: str, arguments: list[str], ranks: int, environment: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the launcher of a module on every rank, and end it with its ranks when the context is left.

    Args:
        module: Module name without its package.
        arguments: Arguments of the module.
        ranks: Number of processes.
        environment: Environment of all processes.
        streams: ``stdout`` and ``stderr`` of all processes.
    """
    # The launcher has a session of its own, so that Ctrl-C reaches this process alone, which ends the launcher once.
    command = _quiet_command(module, arguments, ranks)
    process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def run_ranks(module: str, arguments: list[str], ranks: int, cpu: bool) -> int:
    """Run a module on every rank and wait for it; end the ranks when this process is interrupted.

    Returns:
        The launcher's exit status: 0 if every rank succeeded.

    Raises:
        BrokenPipeError: Nobody reads stdout any more.
    """
    environment = rank_environment(ranks, cpu)
    if sys.stdout.isatty():
        with started_ranks(module, arguments, ranks, environment) as process:
            return process.wait()
    # Output goes through this process, so that no rank fails if nobody reads any more.
    failed: list[OSError] = []
    with started_ranks(module, arguments, ranks, environment, stdout=subprocess.PIPE) as process:
        relay = threading.Thread(target=_relay, args=(process, failed), daemon=True)
        relay.start()
        status = process.wait()
        relay.join(_LAST_WORDS_SECONDS)  # a process that a rank has left behind may keep the pipe open for ever
    if failed:
        raise failed[0]
    return status


def _relay(process: subprocess.Popen[bytes], failed: list[OSError]) -> None:
    assert process.stdout is not None
    try:
        while said := os.read(process.stdout.fileno(), 1 << 16):
            sys.stdout.buffer.write(said)
            sys.stdout.flush()
    except OSError as error:
        failed.append(error)
        process.terminate()


def exec_ranks(module: str, arguments: list[str], ranks: int, cpu: bool) -> NoReturn:
    """Replace this process by the launcher, so that signals and the exit status are the launcher's own."""
    command = _quiet_command(module, arguments, ranks)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, rank_environment(ranks, cpu))
